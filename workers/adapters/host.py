"""One rank's share of an adapter in host memory."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.adapters.folder import AdapterBytes
from workers.adapters.in_memory import TensorsInMemory
from workers.adapters.peft_config import PeftConfig
from workers.adapters.peft_weights import ModulePair, check_fits, pairs_of
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.adapters.sites import Site, SitePart
from workers.errors import AdapterError


@dataclass(frozen=True, slots=True)
class HostPair:
    """a (rank, in_features), b (out_features, rank): of a rank, in the model's dtype. The scale is
    in b."""

    a: torch.Tensor
    b: torch.Tensor

    @property
    def rank(self) -> int:
        return self.a.shape[0]


@dataclass(frozen=True, slots=True)
class HostAdapter:
    """pairs: of the modules that it changes, by name."""

    ref: AdapterRef
    pairs: Mapping[str, HostPair]

    @property
    def num_bytes(self) -> int:
        return sum(pair.a.nbytes + pair.b.nbytes for pair in self.pairs.values())


class AdapterReader:
    """Reads the share of one rank. Any thread may call it."""

    def __init__(
        self, sites: Sequence[Site], info: AdapterInfo, dtype: torch.dtype, device: torch.device
    ) -> None:
        """device: that it will be copied to."""
        self._parts = {part.module: part for site in sites for part in site.parts}
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
        return HostAdapter(
            ref,
            {
                module: self._pair(tensors, pair, self._parts[module])
                for module, pair in pairs.items()
            },
        )

    def _pair(self, tensors: TensorsInMemory, pair: ModulePair, part: SitePart) -> HostPair:
        a = tensors.read(pair.a_name)[:, part.cut.columns]
        b = tensors.read(pair.b_name)[part.cut.rows]
        pair_here = a.to(self._dtype, copy=True), (b.float() * pair.scale).to(self._dtype)
        if self._is_pinned:
            return HostPair(*(one.pin_memory() for one in pair_here))
        return HostPair(*pair_here)
