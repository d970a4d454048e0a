"""Nothing on the sampling path asks the device for a value."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.workers.sampling.cases import admitted, make_state, random_logits
from workers.sampling.logprobs import prompt_logprobs
from workers.sampling.params import SamplingParams
from workers.sampling.state import SamplingState

VOCAB = 300
SAMPLINGS = [
    SamplingParams(temperature=0),
    SamplingParams(),
    SamplingParams(top_k=5, top_p=0.5, min_p=0.1),
    SamplingParams(top_k=100, top_p=0.5, min_p=0.1),
    SamplingParams(presence_penalty=1.0, repetition_penalty=1.2),
    SamplingParams(logit_bias={1: 2.0}, min_tokens=4, stop_token_ids=(3,), logprobs=5),
    SamplingParams(allowed_token_ids=(5, 6), logprobs=0, logprob_token_ids=(1, 2, 3)),
    SamplingParams(bad_words=((7,), (7, 8, 9)), temperature=0),
]
SYNCING_OPS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero")
SYNCING_METHODS = ("item", "cpu", "tolist", "numpy", "nonzero", "__bool__", "__int__", "__float__")


class NoSync(TorchDispatchMode):
    """Raises on every operator whose result's shape or value the host must wait for."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        if name in SYNCING_OPS or name.startswith("unique"):
            raise AssertionError(f"{name} waits for the device")
        if name in ("index", "index_put", "index_put_"):
            indices = [index for index in args[1] if index is not None]
            if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
                raise AssertionError("a boolean index waits for the device")
        return func(*args, **(kwargs or {}))


def inputs_on(device: str) -> tuple[SamplingState, torch.Tensor, torch.Tensor]:
    logits = random_logits(len(SAMPLINGS), VOCAB).to(device)
    slots = torch.arange(len(SAMPLINGS), device=device)
    return make_state(VOCAB, device=device), logits, slots


def run_everything(state: SamplingState, logits: torch.Tensor, slots: torch.Tensor) -> None:
    num_rows = len(SAMPLINGS)
    state.admit([admitted(slot, s, output=(7, 8)) for slot, s in enumerate(SAMPLINGS)])
    for rows in ([0], [1], [2, 3], list(range(num_rows))):
        host_slots = np.array(rows, dtype=np.int32)
        sampled = state.sample(logits[: len(rows)], host_slots, host_slots * 0 + 4)
        state.remember(slots[: len(rows)], sampled.token_ids)
        state.resolve(sampled.token_ids - 100, slots[: len(rows)])
    prompt_logprobs(lambda rows: rows, logits, slots, 3, logits.shape[1])


@pytest.fixture
def _raising_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("a tensor was read by the host")

    # Uploads fill a staging buffer through numpy before anything reaches the device.
    for name in SYNCING_METHODS:
        if name != "numpy":
            monkeypatch.setattr(torch.Tensor, name, refuse)


@pytest.mark.usefixtures("_raising_methods")
def test_no_value_is_read_and_no_data_dependent_operator_runs() -> None:
    inputs = inputs_on("cpu")
    with NoSync():
        run_everything(*inputs)


def test_the_path_runs_without_any_data_at_all() -> None:
    # On the meta device there are no values: whatever needed one would raise.
    run_everything(*inputs_on("meta"))


def test_the_guard_notices_what_it_is_there_for() -> None:
    values = torch.arange(3.0)
    with NoSync():
        for read in (
            lambda: values[values > 1],
            lambda: bool(values[0] > 1),
            lambda: values.nonzero(),
            lambda: values[0].item(),
        ):
            with pytest.raises(AssertionError):
                read()


def test_greedy_rows_need_neither_softmax_nor_sort_nor_upload(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            ran.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    state = make_state(VOCAB)
    state.admit([admitted(slot, SAMPLINGS[0]) for slot in range(4)])
    with Recorder():
        state.sample(random_logits(4, VOCAB), np.arange(4, dtype=np.int32), np.full(4, 2, np.int32))
    sampling_ops = [name for name in ran if name not in ("randn", "mul")]
    assert sampling_ops[0] == "max"
    assert set(sampling_ops[1:]) <= {"isnan", "ne"}


def test_penalty_state_is_allocated_by_the_first_request_that_needs_it() -> None:
    state = make_state(VOCAB)
    state.admit([admitted(0, SamplingParams())])
    assert state._penalties.output_counts.numel() == 0
    state.admit([admitted(1, SamplingParams(frequency_penalty=0.1))])
    assert state._penalties.output_counts.shape == (64, VOCAB)
