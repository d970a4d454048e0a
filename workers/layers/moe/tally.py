"""How many tokens a model's experts got, counted where they are chosen. Knows no router."""

from collections.abc import Sequence

import torch

from workers.layers.moe.mixture import MixtureOfExperts


class ExpertTally:
    """tokens: int64 (mixtures, num_experts), in the order of the layers, since the start: each
    token counts for every expert that it takes. Pieces of shared experts are not counted; rows that
    fill up a graph's batch are. From here on the mixtures add to it, on their device and within
    graphs; nothing waits for it.
    """

    def __init__(self, mixtures: Sequence[MixtureOfExperts], device: torch.device) -> None:
        num_experts = mixtures[0].experts.spec.num_experts
        self.tokens = torch.zeros((len(mixtures), num_experts), dtype=torch.int64, device=device)
        for mixture, own in zip(mixtures, self.tokens, strict=True):
            mixture.tally = own
