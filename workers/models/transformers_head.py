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

    Heads that call a body within their body (OPT's decoder) find a stand-in there as well, and what
    they read of the body beside that (Falcon-H1's multiplier) is the body's own.
    """

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        for name, part in body.named_children():
            if isinstance(part, PreTrainedModel):
                self.add_module(name, GivenHiddenStates(part))
        # In a tuple it is no part of this module: its parameters are not these.
        self._stands_for = (body,)

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> _BodyOutput:
        return _BodyOutput(last_hidden_state=inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "_stands_for":  # not set yet
                raise
            return getattr(self._stands_for[0], name)


def logits_of(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """hidden (n, hidden), final states of the body that a GivenHiddenStates stands for in head
    -> logits (n, vocab_size), in the dtype that the head computes them in."""
    logits: torch.Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits
    return logits.squeeze(0)
