"""What a beam search takes of a model's recommendations, and what it keeps while it runs."""

from dataclasses import replace

import pytest

from service.handler.beam_requests import check_beams, with_beam_length
from service.handler.beams import BeamOptions, BeamSearch
from service.handler.defaults import SamplingDefaults
from service.handler.requests import GenerationRequest, TokenPrompt
from service.limits import Limits
from workers.sampling.params import SamplingParams

ASKED = GenerationRequest(
    prompts=(TokenPrompt([1, 2]),),
    sampling=SamplingParams(),
    n=2,
    unset=frozenset(("repetition_penalty", "temperature")),
    beams=BeamOptions(),
)


def test_a_penalty_that_the_checkpoint_recommends_excludes_no_search():
    defaults = SamplingDefaults({"repetition_penalty": 1.05})
    check_beams(defaults.applied(ASKED), Limits())
    sampled = defaults.applied(replace(ASKED, beams=None))
    assert sampled.sampling.repetition_penalty == 1.05


@pytest.mark.parametrize(("recommended", "taken"), [(None, 1024), (7, 7), (32768, 1024)])
def test_a_length_that_the_checkpoint_recommends_is_below_the_ceiling(recommended, taken):
    request = SamplingDefaults(max_tokens=recommended).applied(ASKED)
    assert with_beam_length(request, Limits()).default_max_tokens == taken


@pytest.mark.parametrize("num_top", [0, 3])
def test_a_beam_keeps_of_its_tokens_what_is_told_of_them(num_top):
    search = BeamSearch(2, BeamOptions(), frozenset(), 4, num_top)
    tops = (list(range(256)), [-float(i) for i in range(256)])
    while search.live:
        search.advance([tops] * len(search.live))
    entries = [entry for beam in search.best(2) for entry in beam.entries]
    assert len(entries) == 8
    assert all(entry.top_token_ids == list(range(num_top)) for entry in entries)
    assert all(entry.logprob == 1.0 - entry.rank for entry in entries)
