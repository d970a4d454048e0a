"""What goes into a model's forward pass beside its batch, and what comes out.

The batch says where tokens stand in their sequences and in memory; here is what they are, and where
a model that rotates by other numbers counts them. Knows no step and no model.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class PlacedEmbeddings:
    """Embeddings that stand in place of those of the tokens' ids.

    places: int64 (m,), each of another token. states: (m, hidden_size).
    """

    places: torch.Tensor
    states: torch.Tensor


@dataclass(frozen=True, slots=True)
class TokenInputs:
    """The new tokens of a step, laid out row after row.

    ids: int64 (num_tokens,). positions: int64 (num_tokens,) or (3, num_tokens), by which the model
    rotates: time, height and width where a token has three. embeddings, and three rows, come to
    models that have a media encoder only, in steps with tokens that need them.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    embeddings: PlacedEmbeddings | None = None


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """hidden: final states, of every token or of the rows asked for, (n, hidden_size).

    taps: the residual stream (num_tokens, hidden_size) behind each layer that CausalLM.tap_layers
    named, in the layers' order, of every token.
    """

    hidden: torch.Tensor
    taps: tuple[torch.Tensor, ...] = ()
