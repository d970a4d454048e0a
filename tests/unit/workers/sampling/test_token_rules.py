"""allowed_token_ids, bad_words and logprob_token_ids, row by row of mixed batches."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits, sample_each
from workers.errors import RequestRejectedError
from workers.sampling.bad_words import BadWords
from workers.sampling.params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    SamplingParams,
)

VOCAB = 50


def banned(words, output):
    """By their definition, as vLLM reads bad words."""
    return {
        word[-1]
        for word in words
        if len(word) - 1 <= len(output)
        and tuple(output[len(output) - len(word) + 1 :]) == word[:-1]
    }


WORDS = st.lists(
    st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), min_size=1, max_size=5
).map(tuple)


@given(
    slots=st.lists(
        st.tuples(WORDS, st.lists(st.integers(0, 3), max_size=5)), min_size=1, max_size=4
    ),
    later=st.lists(st.integers(0, 3), max_size=6),
)
def test_bad_words_are_banned_behind_their_beginnings_only(slots, later):
    state = BadWords(8, VOCAB, torch.device("cpu"))
    outputs = []
    # One slot after another, so that tables grow while others use them.
    for slot, (words, output) in enumerate(slots):
        state.set([slot], [words], [np.array(output, dtype=np.int32)])
        outputs.append(list(output))
    everyone = torch.arange(len(slots))
    for token_id in (None, *later):
        if token_id is not None:
            state.add(everyone, torch.full((len(slots),), token_id))
            for output in outputs:
                output.append(token_id)
        logits = torch.zeros(len(slots), VOCAB)
        state.rule_out_(logits, everyone, everyone)
        for row, (words, _) in enumerate(slots):
            assert set((logits[row] == -torch.inf).nonzero().flatten().tolist()) == banned(
                words, outputs[row]
            )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_sampled_and_neighbours_do_not_notice(temperature):
    logits = random_logits(3, VOCAB)
    free = SamplingParams(temperature=temperature)
    bound = SamplingParams(temperature=temperature, allowed_token_ids=(7, 9, 11))
    alone = sample_each(logits, [free, free, free])
    mixed = sample_each(logits, [free, bound, free])
    assert mixed.token_ids[[0, 2]].tolist() == alone.token_ids[[0, 2]].tolist()
    assert int(mixed.token_ids[1]) in bound.allowed_token_ids
    expected = logits[1, [7, 9, 11]].argmax()
    if temperature == 0.0:
        assert int(mixed.token_ids[1]) == bound.allowed_token_ids[int(expected)]


def test_a_slot_forgets_what_the_request_before_it_was_allowed():
    state = make_state(VOCAB)
    logits = torch.zeros(1, VOCAB)
    slots, lens = np.zeros(1, dtype=np.int32), np.full(1, 4, dtype=np.int32)
    for allowed in ((3,), (8,)):
        sampling = SamplingParams(temperature=0, allowed_token_ids=allowed)
        state.admit([admitted(0, sampling)])
        assert state.sample(logits, slots, lens).token_ids.tolist() == list(allowed)


def test_what_was_sampled_counts_for_bad_words_and_so_does_what_a_request_brings():
    words = ((4, 5), (5, 4))
    logits = torch.zeros(1, VOCAB)
    logits[0, 4], logits[0, 5], logits[0, 6] = 3.0, 2.0, 1.0
    slots, lens = np.zeros(1, dtype=np.int32), np.full(1, 4, dtype=np.int32)
    sampling = SamplingParams(temperature=0, bad_words=words, allowed_token_ids=(4, 5, 6))

    def said(state, num):
        return [int(state.sample(logits, slots, lens).token_ids) for _ in range(num)]

    state = make_state(VOCAB)
    state.admit([admitted(0, sampling)])
    assert said(state, 4) == [4, 4, 4, 4]
    logits[0, 4] = 1.5
    assert said(state, 3) == [4, 4, 4]
    resumed = make_state(VOCAB)
    resumed.admit([admitted(0, sampling, output=(4,))])
    assert said(resumed, 1) == [4]
    unlike = make_state(VOCAB)
    unlike.admit([admitted(0, sampling, output=(6,))])
    assert said(unlike, 2) == [5, 5]


def test_log_probabilities_of_named_tokens_come_in_their_order_beside_others_likeliest():
    logits = random_logits(3, VOCAB)
    named = SamplingParams(temperature=0, logprobs=0, logprob_token_ids=(9, 3))
    top = SamplingParams(temperature=0, logprobs=4)
    (first, second, third) = sample_each(logits, [named, top, SamplingParams()]).logprobs.read()
    exact = logits.log_softmax(dim=-1)
    assert first.top_token_ids == [9, 3]
    assert first.top_logprobs == pytest.approx(exact[0, [9, 3]].tolist(), abs=1e-5)
    assert second.top_token_ids == exact[1].topk(4).indices.tolist()
    assert third is None


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (-1,)}, "allowed_token_ids"),
        ({"allowed_token_ids": (1,) * (MAX_ALLOWED_TOKEN_IDS + 1)}, "allowed_token_ids"),
        ({"logprob_token_ids": (1,)}, "logprob_token_ids"),
        ({"logprob_token_ids": (VOCAB,), "logprobs": 0}, "logprob_token_ids"),
        ({"bad_words": ((),)}, "bad_words"),
        ({"bad_words": ((VOCAB,),)}, "bad_words"),
        ({"bad_words": ((1,) * (MAX_BAD_WORD_TOKENS + 1),)}, "bad_words"),
        ({"bad_words": ((1,),) * (MAX_BAD_WORDS + 1)}, "bad_words"),
    ],
)
def test_what_is_out_of_range_is_named(fields, param):
    with pytest.raises(RequestRejectedError) as refusal:
        SamplingParams(**fields).validate(VOCAB)
    assert refusal.value.param == param


@pytest.mark.parametrize(
    ("fields", "is_left"),
    [
        ({"allowed_token_ids": (2,), "min_tokens": 1}, False),
        ({"allowed_token_ids": (2, 3), "min_tokens": 1}, True),
        ({"allowed_token_ids": (2,)}, True),
        ({"allowed_token_ids": (5,), "bad_words": ((5, 5),)}, False),
        ({"bad_words": tuple((i,) for i in range(VOCAB))}, False),
        ({"bad_words": tuple((i,) for i in range(VOCAB - 1))}, True),
    ],
)
def test_what_leaves_no_token_is_refused(fields, is_left):
    sampling = SamplingParams(**fields)
    if is_left:
        sampling.check_something_is_left(VOCAB, (2,))
    else:
        with pytest.raises(RequestRejectedError):
            sampling.check_something_is_left(VOCAB, (2,))
