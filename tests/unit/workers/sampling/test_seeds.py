"""A seed decides a request's tokens, whatever else is in the batch and wherever the row stands."""

import numpy as np
import pytest
import torch

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits
from workers.sampling.params import SamplingParams

VOCAB = 997
NUM_STEPS = 6
CASES = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(temperature=2.0),
    SamplingParams(top_p=0.9),
    SamplingParams(top_k=40),
    SamplingParams(top_k=3, top_p=0.7),
    SamplingParams(top_k=200),
    SamplingParams(min_p=0.02),
    SamplingParams(top_k=100, top_p=0.95, min_p=0.001),
    SamplingParams(presence_penalty=1.0, frequency_penalty=0.5),
    SamplingParams(repetition_penalty=1.3, top_p=0.95),
    SamplingParams(logit_bias={5: 4.0, 77: -100.0}, logprobs=4),
    SamplingParams(min_tokens=3, stop_token_ids=(9, 10)),
]
SAMPLINGS = [CASES[row % len(CASES)] for row in range(33)]


def _logits(row: int, step: int) -> torch.Tensor:
    return random_logits(1, VOCAB, scale=2.0, seed=1000 * row + step)[0]


def _run(rows: list[int], slots: list[int]) -> dict[int, list[int]]:
    """Tokens of each of the given rows, sampled together in this order."""
    state = make_state(VOCAB)
    state.admit(
        [admitted(slot, SAMPLINGS[r], seed=7 * r) for r, slot in zip(rows, slots, strict=True)]
    )
    tokens: dict[int, list[int]] = {row: [] for row in rows}
    for step in range(NUM_STEPS):
        logits = torch.stack([_logits(row, step) for row in rows])
        lengths = np.full(len(rows), 2 + step, dtype=np.int32)
        sampled = state.sample(logits, np.array(slots, dtype=np.int32), lengths)
        for row, token_id in zip(rows, sampled.token_ids.tolist(), strict=True):
            tokens[row].append(token_id)
    return tokens


@pytest.fixture(scope="module")
def alone() -> dict[int, list[int]]:
    return {row: _run([row], [0])[row] for row in range(33)}


@pytest.mark.parametrize("order_seed", [0, 1, 2])
def test_tokens_are_the_same_alone_and_among_32_others_in_any_order(
    alone: dict[int, list[int]], order_seed: int
) -> None:
    generator = np.random.default_rng(order_seed)
    rows = generator.permutation(33).tolist()
    assert _run(rows, generator.permutation(64)[:33].tolist()) == alone


def test_tokens_are_the_same_with_few_neighbours(alone: dict[int, list[int]]) -> None:
    generator = np.random.default_rng(5)
    for _ in range(20):
        rows = generator.permutation(33)[: generator.integers(2, 6)].tolist()
        assert _run(rows, list(range(len(rows)))) == {row: alone[row] for row in rows}


def test_logits_full_of_ties_give_the_same_tokens_in_every_batch() -> None:
    random_cases = [sampling for sampling in CASES if not sampling.is_greedy] * 4
    logits = random_logits(len(random_cases), VOCAB, scale=1.0).round()
    state = make_state(VOCAB)
    state.admit([admitted(row, s, seed=row) for row, s in enumerate(random_cases)])
    slots = np.arange(len(random_cases), dtype=np.int32)
    lengths = np.full(len(random_cases), 5, dtype=np.int32)
    together = state.sample(logits, slots, lengths).token_ids.tolist()
    state.admit([admitted(row, s, seed=row) for row, s in enumerate(random_cases)])
    for row in range(len(random_cases)):
        one = slice(row, row + 1)
        assert state.sample(logits[one], slots[one], lengths[one]).token_ids[0] == together[row]


def test_other_seeds_and_other_positions_give_other_tokens() -> None:
    logits = torch.zeros(1, VOCAB)

    def draw(seed: int, position: int) -> int:
        state = make_state(VOCAB, 1)
        state.admit([admitted(0, SamplingParams(), seed=seed)])
        lengths = np.array([position], dtype=np.int32)
        return state.sample(logits, np.zeros(1, dtype=np.int32), lengths).token_ids.item()

    assert len({draw(seed, 3) for seed in range(50)}) > 40
    assert len({draw(3, position) for position in range(50)}) > 40
    assert draw(-(2**63) + 1, 0) != draw(2**63 - 1, 0)


def test_a_retracted_request_draws_on_as_if_never_retracted() -> None:
    sampling = SamplingParams(top_p=0.95, frequency_penalty=1.0)
    prompt = (5, 6)

    def step(state, slot, position):
        slots, lengths = np.array([slot], dtype=np.int32), np.array([position], dtype=np.int32)
        return state.sample(_logits(0, position).unsqueeze(0), slots, lengths).token_ids.item()

    state = make_state(VOCAB)
    state.admit([admitted(0, sampling, 11, prompt)])
    whole = [step(state, 0, position) for position in range(2, 10)]
    state.admit([admitted(9, sampling, 11, prompt, output=whole[:4])])
    assert [step(state, 9, position) for position in range(6, 10)] == whole[4:]
