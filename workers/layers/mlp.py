"""What stands behind a layer's attention, whatever it is made of. Knows no layer."""

from typing import Protocol

import torch


class Mlp(Protocol):
    """A feed-forward block: GatedMLP, or MixtureOfExperts. A module under checkpoints' names."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """(n, hidden_size) -> (n, hidden_size), whole on every rank. May overwrite nothing of x."""
