"""Many rows are sampled in pieces: the bits are those of all at once, the memory is one piece's."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits
from workers.sampling import device_rows
from workers.sampling.device_rows import piece_ends
from workers.sampling.params import SamplingParams
from workers.sampling.run_drafts import RunDrafts
from workers.sampling.state import SampledTokens, SamplingState

VOCAB = 300
SAMPLINGS = (
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5, top_p=0.5, min_p=0.1),
    SamplingParams(top_k=100, top_p=0.9, logprobs=2),
    SamplingParams(min_p=0.05, repetition_penalty=1.2, frequency_penalty=0.3),
    SamplingParams(logit_bias={1: 2.0}, min_tokens=4, stop_token_ids=(3,), logprobs=5),
    SamplingParams(allowed_token_ids=(5, 6), logprobs=0, logprob_token_ids=(1, 2, 3)),
    SamplingParams(bad_words=((7,), (7, 8, 9)), top_p=0.8),
)
LARGEST = SamplingParams(
    top_p=0.9, top_k=100, min_p=0.1, frequency_penalty=0.1, allowed_token_ids=(0,), logprobs=1
)


def runs_of(num_slots: int) -> tuple[np.ndarray, np.ndarray, RunDrafts]:
    """Runs of 1 to 4 samples: the slot and the position of each, and its drafts."""
    lens = 1 + np.arange(num_slots) % 4
    slots = np.repeat(np.arange(num_slots), lens).astype(np.int32)
    behind = np.concatenate([np.arange(n) for n in lens]).astype(np.int32)
    drafts = np.random.default_rng(0).integers(0, VOCAB, len(slots)).astype(np.int32)
    return slots, 4 + behind, RunDrafts(drafts, behind)


def filled(num_slots: int) -> SamplingState:
    state = make_state(VOCAB, num_slots)
    samplings = [SAMPLINGS[slot % len(SAMPLINGS)] for slot in range(num_slots)]
    state.admit([admitted(i, one, i, output=(7, 8)) for i, one in enumerate(samplings)])
    return state


def sampled_by(state: SamplingState, has_drafts: bool) -> SampledTokens:
    slots, positions, drafts = runs_of(40)
    if not has_drafts:
        slots = np.arange(40, dtype=np.int32)
        return state.sample(random_logits(40, VOCAB), slots, slots * 0 + 4)
    logits = random_logits(len(slots), VOCAB)
    logits[17] = torch.nan
    return state.sample(logits, slots, positions, drafts)


@pytest.mark.parametrize("has_drafts", [False, True])
@pytest.mark.parametrize("max_rows", [1, 3, 7, 64])
def test_pieces_have_the_bits_of_the_whole(
    monkeypatch: pytest.MonkeyPatch, max_rows: int, has_drafts: bool
) -> None:
    states = filled(40), filled(40)
    whole = sampled_by(states[0], has_drafts)
    monkeypatch.setattr(device_rows, "MAX_PIECE_ROWS", max_rows)
    pieces = sampled_by(states[1], has_drafts)
    assert torch.equal(pieces.token_ids, whole.token_ids)
    assert torch.equal(pieces.has_nan, whole.has_nan)
    assert bool(whole.has_nan.any()) == has_drafts
    assert whole.logprobs is not None
    assert pieces.logprobs is not None
    assert repr(pieces.logprobs.read()) == repr(whole.logprobs.read())
    first, second = states
    assert torch.equal(first._penalties.output_counts, second._penalties.output_counts)
    assert torch.equal(first._bad_words.recent, second._bad_words.recent)


def test_pieces_hold_whole_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_rows, "MAX_PIECE_ROWS", 4)
    num_before = np.array([0, 1, 2, 0, 0, 1, 2, 3, 4, 5, 0, 0, 1], dtype=np.int32)
    ends = piece_ends(len(num_before), RunDrafts(num_before, num_before))
    assert ends == [4, 10, 13]
    assert piece_ends(13, None) == [4, 8, 12, 13]


def test_a_usual_batch_is_one_piece() -> None:
    assert piece_ends(256, None) == [256]
    assert piece_ends(0, None) == [0]


class LiveBytes(TorchDispatchMode):
    """Of storages that operators have made: the most that were there at once. Views of a given
    one are none."""

    def __init__(self, given: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._given = given.untyped_storage()._cdata
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple | list) else (found,):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                if storage._cdata != self._given:
                    reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                    self._made[storage._cdata] = reference, storage.nbytes()
        gone = [key for key, (own, _) in self._made.items() if own.expired()]  # type: ignore[no-untyped-call]
        for key in gone:
            del self._made[key]
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._made.values()))
        return found


def peak_bytes(num_slots: int, run_len: int, vocab_size: int = 128_256) -> int:
    """On a device without values, as which tensors of any size take no memory. Tables of all slots
    and the logits are made before."""
    state = make_state(vocab_size, num_slots, device="meta")
    state.admit([admitted(slot, LARGEST) for slot in range(num_slots)])
    num_rows = num_slots * run_len
    logits = torch.empty(num_rows, vocab_size, dtype=torch.bfloat16, device="meta")
    slots = np.repeat(np.arange(num_slots, dtype=np.int32), run_len)
    behind = np.tile(np.arange(run_len, dtype=np.int32), num_slots)
    drafts = RunDrafts(behind, behind) if run_len > 1 else None
    live = LiveBytes(logits)
    with live:
        state.sample(logits, slots, 4 + behind, drafts)
    return live.peak


def test_memory_does_not_grow_with_rows() -> None:
    plain = peak_bytes(256, 1)
    # 17 rows each of 256 slots, as for trees of 16 drafts.
    many = peak_bytes(256, 17)
    assert many < 1.02 * plain
    assert plain < 48 * 256 * 128_256
    # Or nothing has been counted.
    assert plain > 20 * 256 * 128_256
