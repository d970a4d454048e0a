"""The banks of a model's sites, by what each is."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from workers.adapters.bank import SiteBank
from workers.adapters.embedding_bank import EmbeddingBank
from workers.adapters.embedding_site import EmbeddingSite
from workers.adapters.expert_bank import ExpertBank
from workers.adapters.expert_site import ExpertsSite
from workers.adapters.sites import AnySite, Site
from workers.adapters.worn import Bank


@dataclass(frozen=True, slots=True)
class Banks:
    """Of one rank. embedding: None where adapters do not change it. experts: of the layers whose
    experts they change."""

    projections: Sequence[SiteBank]
    embedding: EmbeddingBank | None
    experts: Sequence[ExpertBank]

    @classmethod
    def of(
        cls,
        sites: Sequence[AnySite],
        num_slots: int,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "Banks":
        shape = num_slots, max_rank, dtype, device
        projections = [SiteBank(site, *shape) for site in sites if isinstance(site, Site)]
        embeddings = [EmbeddingBank(x, *shape) for x in sites if isinstance(x, EmbeddingSite)]
        experts = [ExpertBank(site, *shape) for site in sites if isinstance(site, ExpertsSite)]
        return cls(projections, next(iter(embeddings), None), experts)

    def all(self) -> list[Bank]:
        embedding = () if self.embedding is None else (self.embedding,)
        return [*embedding, *self.projections, *self.experts]
