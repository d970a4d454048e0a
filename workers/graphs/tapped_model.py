"""A model whose graphed steps leave what a drafter reads of them in tensors of their own.

Graphs share their memory: what one leaves elsewhere, the next replay of any may overwrite.
"""

from collections.abc import Sequence

import torch

from attention.forward_batch import ForwardBatch
from attention.memory.slot_states import StateEntry
from workers.graphs.graphed_model import GraphedModel
from workers.models.token_inputs import ModelOutput, TokenInputs


class TappedModel:
    """As GraphedModel. taps: static, (max tokens of a step, its size) each; every replay fills
    their first rows. taps_final_states: with the final states, in place of ModelOutput.taps."""

    def __init__(
        self, model: GraphedModel, taps: Sequence[torch.Tensor], taps_final_states: bool
    ) -> None:
        self._model = model
        self._taps_final_states = taps_final_states
        self.taps = tuple(taps)

    @property
    def state_entries(self) -> tuple[StateEntry, ...]:
        return self._model.state_entries

    def __call__(self, tokens: TokenInputs, batch: ForwardBatch, /) -> ModelOutput:
        output = self._model(tokens, batch)
        made = (output.hidden,) if self._taps_final_states else output.taps
        for tap, states in zip(self.taps, made, strict=True):
            tap[: len(states)].copy_(states)
        return output

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._model.local_logits(hidden)

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self._model.whole_logits(local)
