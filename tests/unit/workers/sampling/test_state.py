"""SamplingState: greedy rows, masks, biases, degenerate logits and the last sampled tokens."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.workers.sampling.cases import (
    EOS,
    admitted,
    make_state,
    random_logits,
    sample_each,
)
from workers.sampling.params import SamplingParams
from workers.sampling.state import SamplingState

GREEDY = SamplingParams(temperature=0)
VOCAB = 151
RANDOM_CASES = [
    SamplingParams(),
    SamplingParams(temperature=1e-5),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=5),
    SamplingParams(top_k=100),
    SamplingParams(min_p=1.0),
    SamplingParams(top_k=10**9, top_p=0.9, min_p=0.1),
    SamplingParams(presence_penalty=1.0),
]


def _i32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_greedy_rows_take_the_largest_logit(dtype: torch.dtype) -> None:
    logits = random_logits(9, VOCAB).to(dtype)
    assert torch.equal(sample_each(logits, [GREEDY] * 9).token_ids, logits.argmax(-1))


def test_greedy_rows_stay_greedy_in_mixed_batches() -> None:
    logits = random_logits(9, VOCAB)
    samplings = [GREEDY, *RANDOM_CASES]
    assert sample_each(logits, samplings).token_ids[0] == logits[0].argmax()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(temperature=1e-5),
        SamplingParams(min_p=1.0),
        SamplingParams(top_k=1),
        SamplingParams(top_p=1e-9),
        SamplingParams(top_p=5e-324),
        SamplingParams(top_k=9, top_p=5e-324),
    ],
    ids=str,
)
def test_parameters_that_leave_one_token_take_the_largest_logit(sampling: SamplingParams) -> None:
    logits = random_logits(50, VOCAB)
    assert torch.equal(sample_each(logits, [sampling] * 50).token_ids, logits.argmax(-1))


def test_top_k_beyond_the_vocabulary_filters_nothing() -> None:
    for vocab_size in (20, VOCAB):
        logits = random_logits(200, vocab_size, scale=0.5)
        plain = sample_each(logits, [SamplingParams()] * 200).token_ids
        for top_k in (vocab_size, vocab_size + 1, 2**31 - 1):
            beyond = sample_each(logits, [SamplingParams(top_k=top_k)] * 200).token_ids
            assert torch.equal(beyond, plain)


def test_logits_are_left_as_they_are() -> None:
    logits = random_logits(len(CHANGING_CASES), VOCAB)
    before = logits.clone()
    sample_each(logits, CHANGING_CASES)
    assert torch.equal(logits, before)


CHANGING_CASES = [
    *RANDOM_CASES,
    SamplingParams(logit_bias={3: 9.0}),
    SamplingParams(min_tokens=9),
    SamplingParams(logprobs=2),
]


def test_a_slice_of_padded_logits_is_sampled_as_its_copy() -> None:
    padded = random_logits(len(CHANGING_CASES), VOCAB + 13)
    sliced = padded[:, :VOCAB]
    actual = sample_each(sliced, CHANGING_CASES).token_ids
    assert torch.equal(actual, sample_each(sliced.contiguous(), CHANGING_CASES).token_ids)


def test_logit_bias_is_added_before_the_choice() -> None:
    logits = random_logits(4, VOCAB)
    biases = [{7: 100.0}, {int(logits[1].argmax()): -100.0}, {0: 50.0, 1: 60.0}, {}]
    samplings = [SamplingParams(temperature=0, logit_bias=bias) for bias in biases]
    expected = logits.clone()
    for row, bias in enumerate(biases):
        for token_id, value in bias.items():
            expected[row, token_id] += value
    assert torch.equal(sample_each(logits, samplings).token_ids, expected.argmax(-1))


def test_logit_bias_of_a_former_request_is_gone_when_the_slot_is_taken_over() -> None:
    state = make_state(VOCAB)
    logits = torch.zeros(1, VOCAB)
    many = dict.fromkeys(range(100, 140), 1.0)
    for bias, expected in (({5: 3.0}, 5), (many, 100), ({6: 2.0}, 6), ({}, 0)):
        state.admit([admitted(4, SamplingParams(temperature=0, logit_bias=bias))])
        assert state.sample(logits, _i32(4), _i32(2)).token_ids.tolist() == [expected]


def test_bias_entries_of_old_slots_survive_the_growth_of_the_table() -> None:
    state = make_state(VOCAB)
    state.admit([admitted(0, SamplingParams(temperature=0, logit_bias={9: 5.0}))])
    state.admit(
        [admitted(1, SamplingParams(temperature=0, logit_bias=dict.fromkeys(range(20, 90), 1.0)))]
    )
    sampled = state.sample(torch.zeros(2, VOCAB), _i32(0, 1), _i32(2, 2))
    assert sampled.token_ids.tolist() == [9, 20]


def test_ending_tokens_are_masked_until_min_tokens_exist() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 9, 10, 11]] = torch.tensor([8.0, 7.0, 6.0, 5.0])
    state = make_state(VOCAB)
    sampling = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(9, 10))
    state.admit([admitted(0, sampling, prompt=(1, 1, 1))])
    tokens = [state.sample(logits, _i32(0), _i32(length)).token_ids.item() for length in (3, 4, 5)]
    assert tokens == [11, 11, EOS]


def test_min_tokens_counts_the_output_that_a_retracted_request_brings() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, EOS] = 5.0
    state = make_state(VOCAB)
    sampling = SamplingParams(temperature=0, min_tokens=3)
    state.admit([admitted(0, sampling, prompt=(1, 1), output=(4, 4))])
    tokens = [state.sample(logits, _i32(0), _i32(length)).token_ids.item() for length in (4, 5)]
    assert tokens[0] != EOS
    assert tokens[1] == EOS


def test_an_ignored_end_of_sequence_may_be_sampled_at_once() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, [EOS, 9]] = torch.tensor([5.0, 6.0])
    sampling = SamplingParams(temperature=0, min_tokens=3, ignore_eos=True, stop_token_ids=(9,))
    assert sample_each(logits, [sampling]).token_ids.tolist() == [EOS]


@pytest.mark.parametrize("sampling", [GREEDY, *RANDOM_CASES], ids=str)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_degenerate_rows_yield_valid_tokens_and_do_not_touch_their_neighbours(
    sampling: SamplingParams, bad: float
) -> None:
    logits = random_logits(3, VOCAB)
    clean = sample_each(logits, [sampling] * 3)
    logits[1] = bad
    sampled = sample_each(logits, [sampling] * 3)
    assert 0 <= sampled.token_ids[1] < VOCAB
    assert sampled.token_ids[::2].tolist() == clean.token_ids[::2].tolist()
    assert sampled.has_nan.tolist() == [False, math.isnan(bad), False]


@pytest.mark.parametrize("sampling", [GREEDY, *RANDOM_CASES], ids=str)
def test_one_nan_is_flagged_and_one_infinite_logit_wins(sampling: SamplingParams) -> None:
    logits = random_logits(2, VOCAB)
    logits[0, 3] = math.nan
    logits[1, 4] = math.inf
    sampled = sample_each(logits, [sampling] * 2)
    assert sampled.has_nan.tolist() == [True, False]
    assert sampled.token_ids[1] == 4


@pytest.mark.parametrize("sampling", RANDOM_CASES, ids=str)
def test_tokens_masked_with_minus_infinity_are_never_drawn(sampling: SamplingParams) -> None:
    logits = torch.full((100, VOCAB), -math.inf)
    logits[:, [17, 90]] = 0.0
    token_ids = sample_each(logits, [sampling] * 100).token_ids
    assert set(token_ids.tolist()) <= {17, 90}


def test_huge_logits_do_not_overflow() -> None:
    logits = torch.full((20, VOCAB), -3e38)
    logits[:, 3] = 3e38
    for sampling in RANDOM_CASES:
        assert sample_each(logits, [sampling] * 20).token_ids.unique().tolist() == [3]


def test_an_empty_batch_is_an_empty_result() -> None:
    sampled = make_state(VOCAB).sample(torch.zeros(0, VOCAB), _i32(), _i32())
    assert sampled.token_ids.shape == (0,)
    assert sampled.has_nan.shape == (0,)


def test_shapes_that_do_not_fit_are_refused() -> None:
    state = make_state(VOCAB)
    for logits, slots, lengths in (
        (torch.zeros(2, VOCAB), _i32(0), _i32(1)),
        (torch.zeros(1, VOCAB + 1), _i32(0), _i32(1)),
        (torch.zeros(1, VOCAB), _i32(0), _i32(1, 2)),
    ):
        with pytest.raises(ValueError, match="expected logits"):
            state.sample(logits, slots, lengths)


def test_resolve_puts_the_last_sampled_token_in_place_of_negative_ids() -> None:
    state = make_state(VOCAB)
    state.remember(torch.tensor([3, 0]), torch.tensor([77, 88]))
    state.remember(torch.tensor([3]), torch.tensor([99]))
    resolved = state.resolve(torch.tensor([-1, 5, 0, -1]), torch.tensor([0, 0, 3, 3]))
    assert resolved.tolist() == [88, 5, 0, 99]


VOID_SAMPLINGS = [
    SamplingParams(seed=1, top_k=5, logprobs=2),
    SamplingParams(temperature=0.0, frequency_penalty=0.7, logit_bias={3: 2.0}, logprobs=4),
    SamplingParams(seed=2, top_p=0.8, presence_penalty=0.4, repetition_penalty=1.2),
    SamplingParams(seed=3, bad_words=((7,), (7, 8)), allowed_token_ids=(5, 6, 7, 8), logprobs=1),
]


@pytest.mark.parametrize("void", [[0], [1], [2], [3], [1, 3], [0, 1, 2, 3]], ids=str)
def test_a_void_row_leaves_no_trace_and_others_have_the_same_bits(void: list[int]) -> None:
    """However often it comes, what it and the others sample then is what they would have."""
    slots, lengths = _i32(0, 1, 2, 3), _i32(4, 5, 6, 7)
    steps = [random_logits(4, VOCAB, seed=seed) for seed in range(6)]

    def sample(state: SamplingState, logits: torch.Tensor, void: list[int]) -> list[Any]:
        sampled = state.sample_from(logits, logits, slots, lengths, np.array(void, dtype=np.int64))
        result = sampled.start_download().read()
        entries = result.logprobs or (None,) * 4
        return list(zip(result.token_ids.tolist(), entries, strict=True))

    states = [make_state(VOCAB) for _ in range(2)]
    for state in states:
        state.admit([admitted(slot, one, seed=slot) for slot, one in enumerate(VOID_SAMPLINGS)])
    plain, disturbed = states
    others = [row for row in range(4) if row not in void]
    for logits in steps:
        # What is sampled for the void rows is something else.
        garbage = logits.clone()
        garbage[void] = -logits[void]
        expected, told = sample(plain, logits, []), sample(disturbed, garbage, void)
        assert [told[row] for row in others] == [expected[row] for row in others]
        assert all(told[row][1] is None for row in void)
        rest = np.array(others, dtype=np.int64)
        again = disturbed.sample_from(logits, logits, slots, lengths, rest)
        tokens = again.start_download().read().token_ids
        assert tokens[void].tolist() == [expected[row][0] for row in void]
