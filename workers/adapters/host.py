"""One rank's share of an adapter in host memory."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from workers.adapters.folder import content_key
from workers.adapters.peft_weights import ModulePair, check_fits, open_adapter
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.adapters.sites import Site, SitePart
from workers.errors import AdapterError

_Read = Callable[[str, tuple[slice, slice]], torch.Tensor]


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
        folder = Path(ref.folder)
        if content_key(folder) != ref.key:
            raise AdapterError("its files have changed since it was loaded")
        with open_adapter(folder, "pt") as file:
            check_fits(file.pairs, self._info)
            pairs = {
                module: self._pair(file.read, pair, self._parts[module])
                for module, pair in file.pairs.items()
            }
        return HostAdapter(ref, pairs)

    def _pair(self, read: _Read, pair: ModulePair, part: SitePart) -> HostPair:
        every = slice(0, pair.rank)
        a = read(pair.a_name, (every, part.cut.columns))
        b = read(pair.b_name, (part.cut.rows, every))
        pair_here = a.to(self._dtype, copy=True), (b.float() * pair.scale).to(self._dtype)
        if self._is_pinned:
            return HostPair(*(one.pin_memory() for one in pair_here))
        return HostPair(*pair_here)
