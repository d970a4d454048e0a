"""Penalties as transformers and OpenAI define them, over state that lives on the device."""

import numpy as np
import pytest
import torch
from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits
from workers.sampling.params import SamplingParams
from workers.sampling.penalties import apply_penalties

VOCAB = 40


def _penalised(
    logits: torch.Tensor,
    prompts: list[list[int]],
    outputs: list[list[int]],
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> torch.Tensor:
    mask = torch.zeros(logits.shape, dtype=torch.bool)
    counts = torch.zeros(logits.shape, dtype=torch.int32)
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        mask[row, prompt] = True
        for token_id in output:
            counts[row, token_id] += 1
    values = [torch.full((len(logits), 1), value) for value in (repetition, presence, frequency)]
    return apply_penalties(logits, mask, counts, *values)


@pytest.mark.parametrize("repetition", [0.5, 1.0, 1.3, 10.0])
def test_repetition_penalty_equals_transformers_over_prompt_and_output(repetition: float) -> None:
    logits = random_logits(4, VOCAB)
    prompts, outputs = (
        [[1, 2, 2], [5, 6, 7], [0, 0, 0], [39, 38, 1]],
        [[3, 1], [5, 5], [9, 9], [4, 4]],
    )
    input_ids = torch.tensor([p + o for p, o in zip(prompts, outputs, strict=True)])
    expected = RepetitionPenaltyLogitsProcessor(repetition)(input_ids, logits)
    actual = _penalised(logits, prompts, outputs, repetition=repetition)
    torch.testing.assert_close(actual, expected)


def test_presence_and_frequency_follow_openai_and_ignore_the_prompt() -> None:
    # OpenAI: mu[j] - c[j] * frequency - float(c[j] > 0) * presence, c counted over the output.
    logits = random_logits(2, VOCAB)
    outputs = [[3, 3, 3, 8], []]
    expected = logits.double()
    for token_id, count in ((3, 3), (8, 1)):
        expected[0, token_id] -= count * 0.4 + 0.7
    actual = _penalised(logits, [[8, 9, 9], [1]], outputs, presence=0.7, frequency=0.4)
    torch.testing.assert_close(actual.double(), expected)


def test_repetition_comes_before_frequency_and_presence() -> None:
    actual = _penalised(torch.tensor([[4.0, -4.0]]), [[]], [[0, 1]], 2.0, 1.0, 0.5)
    assert actual.tolist() == [[4.0 / 2 - 1.5, -4.0 * 2 - 1.5]]


def test_masked_logits_stay_masked() -> None:
    actual = _penalised(torch.tensor([[-float("inf"), 0.0]]), [[0]], [[0]], 2.0, -2.0, -2.0)
    assert actual[0, 0].item() == -float("inf")


def _greedy_run(sampling: SamplingParams, num_steps: int, known: tuple[int, ...] = ()) -> list[int]:
    """Greedy tokens from constant logits: only penalties can change the choice."""
    logits = torch.arange(VOCAB, 0, -1).float().unsqueeze(0) / 10
    state = make_state(VOCAB)
    state.admit([admitted(3, sampling, prompt=(0, 1), output=known)])
    tokens = []
    for step in range(num_steps):
        length = np.array([2 + len(known) + step], dtype=np.int32)
        tokens.append(state.sample(logits, np.array([3], dtype=np.int32), length).token_ids.item())
    return list(known) + tokens


def test_output_tokens_enter_the_counts_on_the_device() -> None:
    # One presence penalty costs 1.0 logit, ten tokens of the ladder: each is taken once.
    assert _greedy_run(SamplingParams(temperature=0, presence_penalty=1.0), 8) == list(range(8))
    # Frequency 0.15 lets token 0 (0.1 above the next) win again and again, but ever later.
    run = _greedy_run(SamplingParams(temperature=0, frequency_penalty=0.15), 6)
    assert run == _ladder_by_hand(0.15, 6)


def _ladder_by_hand(frequency: float, num_steps: int) -> list[int]:
    counts, tokens = [0] * VOCAB, []
    for _ in range(num_steps):
        values = [(VOCAB - i) / 10 - counts[i] * frequency for i in range(VOCAB)]
        tokens.append(max(range(VOCAB), key=values.__getitem__))
        counts[tokens[-1]] += 1
    return tokens


def test_prompt_counts_for_repetition_from_the_first_token() -> None:
    assert _greedy_run(SamplingParams(temperature=0, repetition_penalty=1.5), 3) == [2, 3, 4]


@pytest.mark.parametrize("retracted_after", [1, 3, 5])
def test_a_request_that_comes_back_continues_as_if_never_retracted(retracted_after: int) -> None:
    sampling = SamplingParams(
        temperature=0, repetition_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2
    )
    whole = _greedy_run(sampling, 8)
    resumed = _greedy_run(sampling, 8 - retracted_after, known=tuple(whole[:retracted_after]))
    assert resumed == whole


def test_a_slot_taken_over_forgets_its_former_counts() -> None:
    logits = torch.arange(VOCAB, 0, -1).float().unsqueeze(0) / 10
    slots, lengths = np.array([3], dtype=np.int32), np.array([2], dtype=np.int32)
    state = make_state(VOCAB)
    sampling = SamplingParams(temperature=0, presence_penalty=1.0)
    for _ in range(3):
        state.admit([admitted(3, sampling)])
        assert state.sample(logits, slots, lengths).token_ids.tolist() == [0]
        assert state.sample(logits, slots, lengths + 1).token_ids.tolist() == [1]


def test_neighbours_without_penalties_are_left_alone() -> None:
    logits = torch.arange(VOCAB, 0, -1).float().repeat(3, 1) / 10
    state = make_state(VOCAB)
    penalised = SamplingParams(temperature=0, presence_penalty=1.0)
    plain = SamplingParams(temperature=0)
    state.admit([admitted(0, plain), admitted(1, penalised), admitted(2, plain)])
    slots = np.array([2, 1, 0], dtype=np.int32)
    for step in range(4):
        sampled = state.sample(logits, slots, np.full(3, 2 + step, dtype=np.int32))
        assert sampled.token_ids.tolist() == [0, step, 0]
