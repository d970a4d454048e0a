"""A run is sampled as its tokens would be one after the other, and counts what holds."""

import numpy as np
import torch

from workers.sampling.params import SamplingParams
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SamplingState
from workers.scheduler.plan import AdmittedRequest

VOCAB_SIZE = 24
NUM_STEPS = 12
PENALISED, WORDED, FREE = 2, 0, 1


def admitted() -> SamplingState:
    params = {
        PENALISED: SamplingParams(temperature=0.8, frequency_penalty=1.5, repetition_penalty=1.3),
        WORDED: SamplingParams(bad_words=((3, 4), (5, 3, 6), (7,)), presence_penalty=0.5),
        FREE: SamplingParams(temperature=0.0),
    }
    state = SamplingState(4, VOCAB_SIZE, (0,), torch.device("cpu"))
    output = np.array([3, 5], dtype=np.int32)
    state.admit(
        [
            AdmittedRequest(slot, seed=slot, sampling=own, num_prompt_tokens=4, output_ids=output)
            for slot, own in params.items()
        ]
    )
    return state


def logits_at(slot: int, position: int) -> torch.Tensor:
    """Few tokens are likely, so that rules about them matter."""
    generator = torch.Generator().manual_seed(97 * slot + position)
    logits = torch.randn(VOCAB_SIZE, generator=generator)
    logits[3:7] += 3.0
    return logits


def one_by_one() -> dict[int, list[int]]:
    state = admitted()
    slots = np.array([PENALISED, WORDED, FREE], dtype=np.int32)
    texts: dict[int, list[int]] = {int(slot): [] for slot in slots}
    for position in range(6, 6 + NUM_STEPS):
        logits = torch.stack([logits_at(int(slot), position) for slot in slots])
        sampled = state.sample(logits, slots, np.full(3, position, dtype=np.int32))
        for slot, token_id in zip(slots.tolist(), sampled.token_ids.tolist(), strict=True):
            texts[slot].append(token_id)
    return texts


def in_runs(texts: dict[int, list[int]], rng: np.random.Generator) -> dict[int, list[int]]:
    """Drafts are the true text up to a place in each run, then others."""
    state = admitted()
    found: dict[int, list[int]] = {slot: [] for slot in texts}
    while any(len(own) < NUM_STEPS for own in found.values()):
        slots, positions, behind, num_before = [], [], [], []
        for slot, own in found.items():
            known = len(own)
            drafts = texts[slot][known : known + int(rng.integers(0, 5))]
            if len(drafts) > 1 and rng.random() < 0.6:
                drafts[int(rng.integers(0, len(drafts)))] = int(rng.integers(8, VOCAB_SIZE))
            for index, token_id in enumerate([-1, *drafts]):
                slots.append(slot)
                positions.append(6 + known + index)
                behind.append(token_id)
                num_before.append(index)
        logits = torch.stack([logits_at(*place) for place in zip(slots, positions, strict=True)])
        arrays = [np.array(one, dtype=np.int32) for one in (slots, positions, behind, num_before)]
        sampled = state.sample(logits, *arrays[:2], RunDrafts(*arrays[2:])).token_ids.tolist()
        for slot, own in found.items():
            own_rows = [row for row, other in enumerate(slots) if other == slot]
            for row in own_rows:
                own.append(sampled[row])
                if row + 1 not in own_rows or behind[row + 1] != sampled[row]:
                    break
    return {slot: own[:NUM_STEPS] for slot, own in found.items()}


def test_runs_say_what_single_tokens_say() -> None:
    texts = one_by_one()
    for seed in range(8):
        assert in_runs(texts, np.random.default_rng(seed)) == texts


def test_rules_decide_within_these_texts() -> None:
    """Or the test above would hold for a sampler that forgets all drafts."""
    texts = one_by_one()
    raw = {slot: [int(logits_at(slot, 6 + i).argmax()) for i in range(NUM_STEPS)] for slot in texts}
    assert texts[WORDED] != raw[WORDED]
    assert len(set(texts[PENALISED])) > len(set(raw[PENALISED]))
