"""What a head reads beside the logits' product: once a pass, between fork and join."""

import gc
import weakref
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from attention.forward_batch import ForwardBatch
from tests.fakes.side_streams import EagerSide
from workers.graphs.tapped_model import ReadBesideLogits
from workers.models.token_inputs import ModelOutput, TokenInputs

TOKENS = TokenInputs(torch.tensor([3, 4]), torch.tensor([0, 1]))
BATCH = cast(ForwardBatch, object())


class Side(EagerSide):
    """At a join something is asked of what happened before it."""

    def __init__(self) -> None:
        super().__init__()
        self.taps: list[weakref.ref[torch.Tensor]] = []

    def join(self) -> None:
        gc.collect()
        assert all(one() is not None for one in self.taps), "their memory is another's already"
        super().join()


class Model:
    """Hands over two taps that nobody else keeps."""

    state_entries = ()

    def __init__(self, side: Side, failure: Exception | None = None) -> None:
        self._side, self._failure = side, failure

    def __call__(self, tokens: TokenInputs, batch: ForwardBatch, /) -> ModelOutput:
        taps = tuple(torch.full((2, 4), float(number)) for number in range(2))
        hidden = torch.ones(2, 4)
        self._side.events.append("pass")
        self._side.taps = [weakref.ref(one) for one in taps]
        return ModelOutput(hidden, taps)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        self._side.events.append("logits")
        if self._failure is not None:
            raise self._failure
        return hidden + 1

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return local


def beside(
    side: Side, takes_final: bool = False, failure: Exception | None = None
) -> tuple[ReadBesideLogits, list[list[float]]]:
    """And what is read: the first element of each tap."""
    read: list[list[float]] = []

    def take(batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
        assert batch is BATCH
        side.events.append("read")
        read.append([float(one[0, 0]) for one in taps])

    return ReadBesideLogits(Model(side, failure), take, takes_final, side), read


@pytest.mark.parametrize(("takes_final", "wanted"), [(False, [0.0, 1.0]), (True, [1.0])])
def test_each_pass_is_read_once_between_fork_and_join(
    takes_final: bool, wanted: list[float]
) -> None:
    side = Side()
    model, read = beside(side, takes_final)
    for _ in range(2):
        hidden = model(TOKENS, BATCH).hidden
        if takes_final:
            side.taps = []
        assert torch.equal(model.local_logits(hidden), torch.full((2, 4), 2.0))
    assert read == [wanted, wanted]
    assert side.events == ["pass", "fork", "read", "logits", "join"] * 2


@pytest.mark.parametrize("where", ["logits", "read"])
def test_it_is_joined_where_there_is_no_memory(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was launched reads taps whose memory is given away next."""
    side, failure = Side(), torch.OutOfMemoryError("no memory")
    model, _ = beside(side, failure=failure if where == "logits" else None)
    if where == "read":

        def without_memory(*_: object) -> None:
            raise failure

        monkeypatch.setattr(model, "_take", without_memory)
    hidden = model(TOKENS, BATCH).hidden
    with pytest.raises(torch.OutOfMemoryError):
        model.local_logits(hidden)
    assert side.events[-1] == "join"


def test_what_lost_a_capture_is_told() -> None:
    """A lost capture cannot be joined."""

    class Lost(Side):
        def join(self) -> None:
            raise RuntimeError("operation failed due to a previous error during capture")

    model, _ = beside(Lost(), failure=TypeError("the cause"))
    hidden = model(TOKENS, BATCH).hidden
    with pytest.raises(TypeError, match="the cause"):
        model.local_logits(hidden)
    model, _ = beside(Lost())
    with pytest.raises(RuntimeError, match="previous error"):
        model.local_logits(model(TOKENS, BATCH).hidden)


def test_logits_without_a_pass_are_refused() -> None:
    """They would be read with another pass' states."""
    side = Side()
    model, _ = beside(side)
    hidden: Any = model(TOKENS, BATCH).hidden
    model.local_logits(hidden)
    with pytest.raises(RuntimeError, match="once"):
        model.local_logits(hidden)
