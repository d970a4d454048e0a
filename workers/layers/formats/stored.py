"""One checkpoint module's weight on one rank, while it is being read."""

import threading
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.format import Cut, Shape, WeightFormat
from workers.layers.kept.weight import KeptWeight
from workers.layers.sharding import TensorSource, WeightSlot, copy_slice


class StoredWeight:
    """The slices of a module's tensors that a rank holds. Memory is taken as they come.

    module: its name in the checkpoint. Parts may be loaded by several threads, each part by one.
    Raises ConfigError for a module of a shape, or a cut, that the format does not have.
    """

    def __init__(
        self, module: str, weight_format: WeightFormat, cut: Cut, device: torch.device
    ) -> None:
        self.format = weight_format
        self.cut = cut
        self._module = module
        self._device = device
        try:
            self._stored = weight_format.tensors(cut.whole)
            # A cut that falls inside of a block is refused before anything is read.
            self._slices = {part: weight_format.slices(part, cut) for part in self._stored}
        except ConfigError as error:
            raise ConfigError(f"{module}, {weight_format.title}: {error}") from error
        self.tensors: dict[str, torch.Tensor] = {}

    def shapes(self) -> Mapping[str, Shape]:
        """Of the whole tensors, by part."""
        return {part: stored.shape for part, stored in self._stored.items()}

    def dtypes(self, part: str) -> tuple[torch.dtype, ...]:
        """That the part may have in a checkpoint."""
        return self._stored[part].dtypes

    def load(self, part: str, source: TensorSource) -> None:
        """source: the whole tensor; axes of size 1 may be missing or more than are wanted."""
        slices, dtype = self._slices[part], self._stored[part].dtypes[0]
        shape = [index.stop - index.start for index in slices]
        target = torch.empty(shape, dtype=dtype, device=self._device)
        if source.shape == self._stored[part].shape:
            copy_slice(target, source, *slices)
        else:
            whole = source[tuple(slice(0, size) for size in source.shape)]
            target.copy_(whole.reshape(self._stored[part].shape)[slices])
        self.tensors[part] = target

    def filled(self, part: str, generator: torch.Generator) -> torch.Tensor:
        """A dummy of the whole tensor, on the generator's device."""
        stored = self._stored[part]
        tensor = torch.empty(stored.shape, dtype=stored.dtypes[0], device=generator.device)
        stored.fill(tensor, generator)
        return tensor

    def dequantised(self) -> torch.Tensor:
        """(cut.num_rows, cut.num_columns) float32, when all parts are there. Raises ModelLoadError
        for tensors that stand for no matrix, or for one that is not finite."""
        try:
            weight = self.format.dequantise(self.tensors, self.cut)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._module}, {self.format.title}: {error}") from error
        check_finite(weight, self._module)
        return weight

    def kept(self) -> KeptWeight | None:
        """As WeightFormat.kept, when all parts are there. Raises as dequantised."""
        try:
            weight = self.format.kept(self.tensors, self.cut)
        except ModelLoadError as error:
            raise ModelLoadError(f"{self._module}, {self.format.title}: {error}") from error
        if weight is not None and not weight.is_finite():
            raise _not_finite(self._module)
        return weight

    def release(self) -> None:
        """Give back the memory of the tensors, of which something was made on this thread's stream.

        Each lies in the pool of the stream that it was read on, which may write there at once: this
        thread's must have read them by then.
        """
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self.tensors.clear()


def check_finite(weight: torch.Tensor, name: str) -> None:
    """Raise ModelLoadError for a scale or a value that is infinite or no number."""
    if not torch.isfinite(weight).all():
        raise _not_finite(name)


def _not_finite(name: str) -> ModelLoadError:
    return ModelLoadError(f"{name} has scales or values that are not finite")


class Arrivals:
    """Counts what is awaited; whoever brings the last is told."""

    def __init__(self, num_awaited: int) -> None:
        self._left = num_awaited
        self._lock = threading.Lock()

    def is_last(self) -> bool:
        with self._lock:
            self._left -= 1
            return self._left == 0


class Settling(Protocol):
    """What is being read until the last of its parts has come."""

    def settle(self) -> None:
        """Called behind every part that is in place."""


@dataclass(frozen=True, slots=True)
class StoredSlot(WeightSlot):
    """Where a tensor goes of which the weight is made later: bit by bit, and copied."""

    stored: Settling

    def map(self, tensor: TensorSource) -> bool:
        return False

    def settle(self) -> None:
        self.stored.settle()

    @property
    @abstractmethod
    def format_title(self) -> str:
        """As WeightFormat.title."""

    @property
    def keeps_dtype(self) -> bool:
        return True
