"""Where a rank has the experts of its tokens, of which some have copies on other ranks."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from workers.parallel.expert_copies import ExpertHolders


@dataclass(frozen=True, slots=True)
class PlacesByTurns:
    """num_holders: int64 (ids,), of how many parts each expert or piece is. places: int64 (turns,
    ids), where it lies here if the turn is this rank's part's; else the id for elsewhere."""

    num_holders: torch.Tensor
    places: torch.Tensor

    @classmethod
    def of(
        cls, holders: ExpertHolders, part: int, places: torch.Tensor, elsewhere: int
    ) -> PlacesByTurns:
        """places: int64 (ids,), where each lies here, whoever's turn it is; pieces of shared
        experts come last and have one holder each."""
        num_turns = max(len(parts) for parts in holders.by_expert)
        num_pieces = len(places) - len(holders.by_expert)
        counts = [len(parts) for parts in holders.by_expert] + [1] * num_pieces
        is_turn = torch.zeros((num_turns, len(places)), dtype=torch.bool)
        is_turn[0, len(holders.by_expert) :] = True
        for expert, parts in enumerate(holders.by_expert):
            if part in parts:
                is_turn[parts.index(part), expert] = True
        by_turn = torch.where(is_turn.to(places.device), places, elsewhere)
        return cls(torch.tensor(counts, device=places.device), by_turn)

    def of_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """ids: int64 (n, k). The n-th token of a step has the n-th turn, on every rank alike."""
        tokens = torch.arange(len(ids), device=ids.device).unsqueeze(1)
        return self.places[tokens % self.num_holders[ids], ids]
