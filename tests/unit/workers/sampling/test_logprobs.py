"""Log probabilities are those of the raw logits, with ranks and the top tokens."""

import numpy as np
import pytest
import torch

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits, sample_each
from workers.engine.logprobs import TokenLogprobs
from workers.sampling import logprobs
from workers.sampling.logprobs import compute_logprobs, prompt_logprobs, read_logprobs
from workers.sampling.params import SamplingParams

VOCAB = 200


def _expected(row: torch.Tensor, token_id: int, num_top: int) -> TokenLogprobs:
    exact = row.double().log_softmax(-1)
    order = sorted(range(len(row)), key=lambda i: -exact[i].item())[:num_top]
    rank = 1 + sum(1 for value in row.tolist() if value > row[token_id].item())
    return TokenLogprobs(exact[token_id].item(), rank, order, [exact[i].item() for i in order])


def _assert_close(actual: TokenLogprobs | None, expected: TokenLogprobs) -> None:
    assert actual is not None
    assert actual.logprob == pytest.approx(expected.logprob, abs=2e-6)
    assert actual.rank == expected.rank
    assert actual.top_token_ids == expected.top_token_ids
    assert actual.top_logprobs == pytest.approx(expected.top_logprobs, abs=2e-6)


def test_sampled_logprobs_ignore_everything_that_changed_the_choice() -> None:
    logits = random_logits(4, VOCAB)
    samplings = [
        SamplingParams(temperature=0.3, top_p=0.9, logprobs=3),
        SamplingParams(temperature=0, logit_bias={17: 100.0}, logprobs=0),
        SamplingParams(temperature=0, repetition_penalty=5.0),
        SamplingParams(temperature=2.0, top_k=5, presence_penalty=2.0, logprobs=20),
    ]
    sampled = sample_each(logits, samplings)
    assert sampled.logprobs is not None
    entries = sampled.start_download().logprobs.read()
    token_ids = sampled.token_ids.tolist()
    assert token_ids[1] == 17
    assert entries[2] is None
    for row, num_top in ((0, 3), (1, 0), (3, 20)):
        _assert_close(entries[row], _expected(logits[row], token_ids[row], num_top))


def test_no_row_that_asks_means_no_logprobs() -> None:
    assert sample_each(random_logits(2, VOCAB), [SamplingParams()] * 2).logprobs is None


def test_logprobs_stop_when_the_slot_is_taken_over() -> None:
    state = make_state(VOCAB)
    slots, lengths = np.array([0], dtype=np.int32), np.array([2], dtype=np.int32)
    state.admit([admitted(0, SamplingParams(logprobs=2))])
    assert state.sample(random_logits(1, VOCAB), slots, lengths).logprobs is not None
    state.admit([admitted(0, SamplingParams())])
    assert state.sample(random_logits(1, VOCAB), slots, lengths).logprobs is None


def test_half_precision_logits_are_normalised_in_float32() -> None:
    logits = random_logits(3, VOCAB).bfloat16()
    token_ids = torch.tensor([0, 50, 199])
    entries = read_logprobs(compute_logprobs(logits, token_ids, 0), [slice(0)] * 3)
    exact = logits.double().log_softmax(-1)
    for row, token_id in enumerate(token_ids.tolist()):
        assert entries[row].logprob == pytest.approx(exact[row, token_id].item(), abs=2e-6)


def test_rank_counts_strictly_higher_logits_only() -> None:
    logits = torch.tensor([[2.0, 3.0, 2.0, 2.0, 1.0]]).repeat(3, 1)
    ranks = compute_logprobs(logits, torch.tensor([1, 3, 4]), 0).ranks
    assert ranks.tolist() == [1, 2, 5]


def test_more_top_tokens_than_vocabulary_gives_the_vocabulary() -> None:
    tensors = compute_logprobs(random_logits(1, 5), torch.tensor([0]), 20)
    assert len(read_logprobs(tensors, [slice(20)])[0].top_token_ids) == 5


@pytest.mark.parametrize("num_rows", [0, 1, 300, 513])
def test_prompt_logprobs_are_exact_over_any_number_of_pieces(
    num_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logprobs, "MAX_PIECE_BYTES", 128 * 50 * 4)
    logits = random_logits(num_rows, 50)
    targets = torch.arange(num_rows) % 50
    made: list[int] = []

    def head(hidden: torch.Tensor) -> torch.Tensor:
        made.append(len(hidden))
        return hidden

    tensors = prompt_logprobs(head, logits, targets, 4, 50)
    entries = read_logprobs(tensors, [slice(4)] * num_rows)
    assert (sum(made), max(made)) == (num_rows, min(num_rows, 128))
    assert len(entries) == num_rows
    for row in range(num_rows):
        _assert_close(entries[row], _expected(logits[row], row % 50, 4))
