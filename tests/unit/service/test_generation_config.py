"""What a checkpoint recommends for sampling is taken where a client leaves it open, only there."""

import json

import pytest

from service.generation_config import read_sampling_defaults
from service.handler.defaults import NO_DEFAULTS, SamplingDefaults
from service.handler.requests import GenerationRequest, TokenPrompt
from workers.errors import ModelLoadError
from workers.sampling.params import SamplingParams


def write(folder, text):
    (folder / "generation_config.json").write_text(text)
    return folder


def test_the_five_that_are_sampling_are_read_and_a_null_is_none(tmp_path):
    document = {
        "temperature": 0.6,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": None,
        "repetition_penalty": 1,
        "max_new_tokens": 7,
        "do_sample": True,
        "eos_token_id": [1, 2],
    }
    found = read_sampling_defaults(write(tmp_path, json.dumps(document)))
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.0}
    assert found == SamplingDefaults(values, 7)


def test_a_folder_without_such_a_file_recommends_nothing(tmp_path):
    assert read_sampling_defaults(tmp_path) == NO_DEFAULTS


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"temperature": "hot"}',
        '{"top_p": 0}',
        '{"top_k": 1.5}',
        '{"max_new_tokens": 0}',
    ],
)
def test_what_makes_no_sense_is_an_error_that_names_the_file(tmp_path, text):
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        read_sampling_defaults(write(tmp_path, text))


def test_what_the_client_says_wins():
    request = GenerationRequest(
        (TokenPrompt([1]),),
        SamplingParams(temperature=1.0, top_k=0),
        unset=frozenset(("top_k", "top_p")),
        default_max_tokens=16,
    )
    applied = SamplingDefaults({"temperature": 0.1, "top_k": 5}, 7).applied(request)
    assert applied.sampling == SamplingParams(temperature=1.0, top_k=5)
    assert applied.default_max_tokens == 16


def test_a_length_is_recommended_where_no_protocol_has_one():
    request = GenerationRequest((TokenPrompt([1]),), SamplingParams())
    assert SamplingDefaults({}, 7).applied(request).default_max_tokens == 7
