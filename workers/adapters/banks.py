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
from workers.errors import ConfigError

NOT_FUSED = "max_loras: on GPUs models of fused layers take adapters, no others"


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

    @property
    def num_bytes(self) -> int:
        """On the device, of all slots, the one that is no adapter's included."""
        banks = self.all()
        values = [value for bank in banks for value in vars(bank).values()]
        values += [bank.ranks.on_device for bank in banks]
        return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))

    def check_on_gpu(self, tp_size: int) -> None:
        """Raises ConfigError for what steps of a GPU do not take so far."""
        if self.embedding is not None and tp_size > 1:
            raise ConfigError("lora_embeddings: on GPUs of one rank, tp_size has to be 1")
        if any(bank.site.experts.is_kept for bank in self.experts):
            raise ConfigError(
                "lora_experts: the experts are kept as they are stored; set quantized_products to "
                "dequantize"
            )
