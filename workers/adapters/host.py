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
                module: self._pair(*self._whole(tensors, module, pair), self._parts[module])
                for module, pair in pairs.items()
            },
        )

    def _whole(
        self, tensors: TensorsInMemory, module: str, pair: ModulePair
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """In the model's dtype, before anything is cut: what one rank refuses, all do."""
        a = tensors.read(pair.a_name).to(self._dtype)
        b = (tensors.read(pair.b_name).float() * pair.scale).to(self._dtype)
        if not (a.isfinite().all() and b.isfinite().all()):
            raise AdapterError(
                f"{module} has values that are no finite numbers in {self._dtype}, or gets such by "
                f"its scale of {pair.scale:g}"
            )
        return a, b

    def _pair(self, a: torch.Tensor, b: torch.Tensor, part: SitePart) -> HostPair:
        here = (
            one.clone(memory_format=torch.contiguous_format)
            for one in (a[:, part.cut.columns], b[part.cut.rows])
        )
        return HostPair(*(one.pin_memory() if self._is_pinned else one for one in here))
