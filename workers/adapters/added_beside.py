"""What adapters add to a layer's product, computed on a stream of its own beside that product.

The product leaves partial products to the kernel that reads them, which sums them up (PartialGemm).
What adapters add is one part more: nothing is joined by a launch of its own.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial

import torch

from workers.adapters.adapted_products import AdapterWays, AddedBehind, StepGroups
from workers.layers.cuda.adapter_products import AdapterMatrices
from workers.layers.cuda.side_stream import CudaSideStream, SideStream, joined
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.new_tensor import NewTensor

MAX_TOKENS_BESIDE = 256
"""Up to as many a product mostly waits for its weights. Beyond, it has no time left over, and a
part more is as large as the product's result. Not measured."""


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
class ShrunkBeside:
    """The first product of the adapters on the side stream, the second one behind the product, into
    its first part: for results that have no room for a part more, as ranks sum them up, or find
    them where others say.

    All tensors belong to the product's stream, which has waited for the other one before anything
    can take their memory: neither eager steps nor graphs need more. For more than max_tokens
    nothing runs beside."""

    products: PartialProducts
    matrices: AdapterMatrices
    step: StepGroups
    side: SideStream
    max_tokens: int = MAX_TOKENS_BESIDE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.into(torch.empty, x)

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.max_tokens:
            return AddedBehind(self.products, self.matrices, self.step).into(new, x)
        shrunk, groups = self.matrices.new_shrunk(x), self.step.groups
        with self.side.forked():
            self.matrices.shrink(shrunk, x, groups, follows_own_stream=False)
        with joined(self.side):
            parts = self.products.into(new, x)
        self.matrices.expand(parts[0], shrunk, groups, follows_own_stream=False)
        return parts


@dataclass(frozen=True, slots=True)
class AddedBeside:
    """Both products of the adapters on the side stream, their sums in a part of their own. Memory
    and max_tokens: as ShrunkBeside, which is what into does."""

    products: PartialProducts
    matrices: AdapterMatrices
    step: StepGroups
    side: SideStream
    max_tokens: int = MAX_TOKENS_BESIDE

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[0] > self.max_tokens:
            return AddedBehind(self.products, self.matrices, self.step)(x)
        shrunk, groups = self.matrices.new_shrunk(x), self.step.groups

        def begin(part: torch.Tensor) -> None:
            behind.enter_context(joined(self.side))
            with self.side.forked():
                self.matrices.shrink(shrunk, x, groups, follows_own_stream=False)
                self.matrices.expand_alone(part, shrunk, groups)

        new = _OnePartMore(begin)
        with ExitStack() as behind:
            self.products.into(new, x)
        assert new.whole is not None, "a product's tensor is made by what is given to make it"
        return new.whole

    def into(self, new: NewTensor, x: torch.Tensor) -> torch.Tensor:
        return ShrunkBeside(
            self.products, self.matrices, self.step, self.side, self.max_tokens
        ).into(new, x)


def ways_beside(device: torch.device, num_ranks: int) -> AdapterWays:
    """One side stream for all layers, whose products follow one another."""
    side = CudaSideStream.on(device)
    own = partial(AddedBeside, side=side)
    return AdapterWays(own, own if num_ranks == 1 else partial(ShrunkBeside, side=side))
