"""What decode graphs ask of a model."""

from typing import Protocol

import torch

from attention.forward_batch import ForwardBatch
from attention.memory.slot_states import StateEntry
from workers.models.token_inputs import ModelOutput, TokenInputs


class GraphedModel(Protocol):
    """What of a CausalLM a captured step runs."""

    @property
    def state_entries(self) -> tuple[StateEntry, ...]: ...

    def __call__(self, tokens: TokenInputs, batch: ForwardBatch, /) -> ModelOutput: ...

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor: ...

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor: ...
