"""A stand-in for a model's body, so that calling the model runs its head alone.

The head of a family is more than a matrix: Gemma2 caps its logits, Cohere scales them. Running the
family's own code keeps all of that.
"""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput


class _BodyOutput(BaseModelOutput):
    """Final states and nothing else: what else a head reads of its body's output is None, as it is
    where a body was asked for no caches, no attentions and no images."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class GivenHiddenStates(nn.Module):
    """Gives back the states that it is given.

    Heads that call a body within their body (OPT's decoder) find a stand-in there as well.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        for name, part in body.named_children():
            if isinstance(part, PreTrainedModel):
                self.add_module(name, GivenHiddenStates(part))

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)
