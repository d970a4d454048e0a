"""One rank's share of an adapter in host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.adapters.expert_site import of_each_expert
from workers.adapters.folder import AdapterBytes
from workers.adapters.in_memory import TensorsInMemory
from workers.adapters.low_rank import LowRank
from workers.adapters.peft_config import PeftConfig
from workers.adapters.peft_weights import (
    ModulePair,
    StackedPair,
    check_fits,
    pairs_of,
    stack_in,
)
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.adapters.sites import AnySite
from workers.errors import AdapterError


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """pairs: as the sites' share_of has them."""

    ref: AdapterRef
    pairs: Mapping[str, LowRank]


class AdapterReader:
    """Reads the share of one rank. Any thread may call it."""

    def __init__(
        self, sites: Sequence[AnySite], info: AdapterInfo, dtype: torch.dtype, device: torch.device
    ) -> None:
        """device: that it will be copied to."""
        self._sites = tuple(sites)
        self._info = info
        self._dtype = dtype
        self._is_pinned = device.type == "cuda"

    def read(self, ref: AdapterRef) -> HostAdapter:
        """Raises AdapterError where the folder no longer holds what was loaded."""
        files = AdapterBytes.read(Path(ref.folder))
        if files.key != ref.key:
            raise AdapterError("its files have changed since it was loaded")
        tensors = TensorsInMemory(files.weights)
        pairs = pairs_of(PeftConfig.parse(files.config), tensors)
        check_fits(pairs, self._info)
        whole: dict[str, LowRank] = {}
        for module, pair in pairs.items():
            if isinstance(pair, StackedPair):
                found = stack_in(self._info, pair)
                whole |= of_each_expert(found, self._whole(tensors, module, found.pair))
            else:
                whole[module] = self._whole(tensors, module, pair)
        shares = (site.share_of(whole).items() for site in self._sites)
        return HostAdapter(
            ref, {key: one.copied(self._is_pinned) for share in shares for key, one in share}
        )

    def _whole(self, tensors: TensorsInMemory, module: str, pair: ModulePair) -> LowRank:
        """In the model's dtype, before anything is cut: what one rank refuses, all do."""
        a = tensors.read(pair.a_name).to(self._dtype)
        b = (tensors.read(pair.b_name).float() * pair.scale).to(self._dtype)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(
                f"{module} has values that are no finite numbers in {self._dtype}, or gets such by "
                f"its scale of {pair.scale:g}"
            )
        return LowRank(a, b)
