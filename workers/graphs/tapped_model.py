"""A model whose graphed steps hand over what a drafter reads of them, within the graph: before its
logits are made, or beside them."""

from collections.abc import Sequence
from typing import Protocol

import torch

from attention.forward_batch import ForwardBatch
from attention.memory.slot_states import StateEntry
from workers.graphs.graphed_model import GraphedModel
from workers.layers.cuda.side_stream import SideStream, joined
from workers.models.token_inputs import ModelOutput, TokenInputs


class TakeTaps(Protocol):
    """Launches only. DeviceDrafter.behind_decode is one: who replays such graphs has nothing to
    launch behind them."""

    def __call__(self, batch: ForwardBatch, taps: Sequence[torch.Tensor], /) -> None:
        """taps: of each of the batch's tokens, (num_tokens, its size) each."""
        ...


class StaticTaps:
    """As TakeTaps, for a reader behind the replay: graphs share their memory, and what one leaves
    elsewhere, the next replay of any may overwrite.

    tensors: static, (max tokens of a step, its size) each; every replay fills their first rows.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = tuple(tensors)

    def __call__(self, batch: ForwardBatch, taps: Sequence[torch.Tensor], /) -> None:
        for tensor, states in zip(self.tensors, taps, strict=True):
            tensor[: len(states)].copy_(states)


class TappedModel:
    """As GraphedModel. take: called behind each pass. taps_final_states: with the final states, in
    place of ModelOutput.taps."""

    def __init__(self, model: GraphedModel, take: TakeTaps, taps_final_states: bool) -> None:
        self._model = model
        self._take = take
        self._taps_final_states = taps_final_states

    @property
    def state_entries(self) -> tuple[StateEntry, ...]:
        return self._model.state_entries

    def __call__(self, tokens: TokenInputs, batch: ForwardBatch, /) -> ModelOutput:
        output = self._model(tokens, batch)
        self._hand_over(batch, (output.hidden,) if self._taps_final_states else output.taps)
        return output

    def _hand_over(self, batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
        self._take(batch, taps)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.local_logits(hidden)

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self._model.whole_logits(local)


class ReadBesideLogits(TappedModel):
    """As TappedModel; what take launches runs on a stream of its own, beside the product by the
    vocabulary. local_logits is called once behind each pass, and take does not need its result.

    Taps belong to the model's stream, which has waited for the other one before anything can take
    their memory; take's own tensors belong to the other one. Neither may use what the other one
    writes, workspaces of products included: cuBLAS has one a stream, CublasLt here has one. Neither
    speaks with other ranks: two collectives at once would wait for each other, at best.
    """

    def __init__(
        self, model: GraphedModel, take: TakeTaps, taps_final_states: bool, side: SideStream
    ) -> None:
        super().__init__(model, take, taps_final_states)
        self._side = side
        self._untaken: tuple[ForwardBatch, Sequence[torch.Tensor]] | None = None

    def _hand_over(self, batch: ForwardBatch, taps: Sequence[torch.Tensor]) -> None:
        self._untaken = batch, taps

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        untaken, self._untaken = self._untaken, None
        if untaken is None:
            raise RuntimeError("logits are made once, behind a pass")
        with joined(self._side):
            with self._side.forked():
                self._take(*untaken)
            return super().local_logits(hidden)
