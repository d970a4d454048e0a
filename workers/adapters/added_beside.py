"""What adapters add to a layer's product, computed on a stream of its own beside that product.

The product leaves partial products to the kernel that reads them, which sums them up (PartialGemm).
What adapters add is one part more: nothing is joined by a launch of its own.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from workers.adapters.adapted_products import AddAdapters, AddedBehind, StepGroups
from workers.layers.cuda.adapter_products import AdapterMatrices
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.new_tensor import NewTensor

MAX_TOKENS_BESIDE = 256
"""Up to as many a product mostly waits for its weights. Beyond, it has no time left over, and a
part more is as large as the product's result. Not measured."""


class SideStream(Protocol):
    def forked(self) -> AbstractContextManager[None]:
        """What is launched within follows all that was launched before, and runs beside all that is
        launched later, up to join."""

    def join(self) -> None:
        """What is launched from here on follows all of it."""


@dataclass(frozen=True, slots=True)
class CudaSideStream:
    """Within a captured step, too: forks and joins are events, which become a graph's edges."""

    stream: torch.cuda.Stream

    @classmethod
    def on(cls, device: torch.device) -> "CudaSideStream":
        # Before blocks of the product that wait for a place: these two launches follow each other.
        return cls(torch.cuda.Stream(device, priority=-1))  # type: ignore[no-untyped-call]

    @contextmanager
    def forked(self) -> Iterator[None]:
        self.stream.wait_stream(self._main)
        with torch.cuda.stream(self.stream):
            yield

    def join(self) -> None:
        self._main.wait_stream(self.stream)

    @property
    def _main(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.stream.device)


class _OnePartMore:
    """NewTensor of the product's parts with one more behind them: whole, once it was called.

    begin is told of that part right before the product's launch."""

    def __init__(self, begin: Callable[[torch.Tensor], None]) -> None:
        self._begin = begin
        self.whole: torch.Tensor | None = None

    def __call__(
        self, size: tuple[int, ...], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        num_parts, *rest = size
        self.whole = torch.empty((num_parts + 1, *rest), dtype=dtype, device=device)
        self._begin(self.whole[num_parts])
        return self.whole[:num_parts]


@dataclass(frozen=True, slots=True)
class AddedBeside:
    """Both products of the adapters on the side stream, their sums in a part of their own.

    All tensors belong to the product's stream, which has waited for the other one before anything
    can take their memory: neither eager steps nor graphs need more. A result that others shall find
    where they say (into) has no room for a part: there only the first of both runs beside, and so
    nothing does for more than max_tokens.
    """

    products: PartialProducts
    matrices: AdapterMatrices
    step: StepGroups
    side: SideStream
    max_tokens: int = MAX_TOKENS_BESIDE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.max_tokens:
            return self._behind(x)
        shrunk, groups = self.matrices.new_shrunk(x), self.step.groups

        def begin(part: torch.Tensor) -> None:
            with self.side.forked():
                self.matrices.shrink(shrunk, x, groups, follows_own_stream=False)
                self.matrices.expand_alone(part, shrunk, groups)

        new = _OnePartMore(begin)
        try:
            self.products.into(new, x)
        finally:
            if new.whole is not None:
                self.side.join()
        assert new.whole is not None, "a product's tensor is made by what is given to make it"
        return new.whole

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.max_tokens:
            return self._behind.into(new, x)
        shrunk, groups = self.matrices.new_shrunk(x), self.step.groups
        with self.side.forked():
            self.matrices.shrink(shrunk, x, groups, follows_own_stream=False)
        try:
            parts = self.products.into(new, x)
        finally:
            self.side.join()
        self.matrices.expand(parts[0], shrunk, groups, follows_own_stream=False)
        return parts

    @property
    def _behind(self) -> AddedBehind:
        return AddedBehind(self.products, self.matrices, self.step)


def added_beside(device: torch.device) -> AddAdapters:
    """One side stream for all layers, whose products follow one another."""
    return partial(AddedBeside, side=CudaSideStream.on(device))
