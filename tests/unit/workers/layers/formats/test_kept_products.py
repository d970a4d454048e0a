"""Layers that keep their weight are called as others are: a product, and parts of it."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from workers.layers.formats.layer import LinearLayer


class Doubling:
    """As KeptMultiply, of a weight that is twice the identity, in two parts."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x

    def parts(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x, x])


class Layer(LinearLayer):
    """Of no checkpoint."""

    def checkpoint_shapes(self) -> Any: ...

    def load_shard(self, *arguments: Any) -> Any: ...

    def weight_cuts(self, *arguments: Any) -> Any: ...


@pytest.mark.parametrize("bias", [None, torch.tensor([1.0, -2.0, 0.5])], ids=["plain", "bias"])
def test_a_bias_is_added_once(bias: torch.Tensor | None) -> None:
    layer = Layer()
    layer.keep(SimpleNamespace())  # type: ignore[arg-type]
    layer.multiply_kept_by(lambda weight: Doubling())
    x = torch.randn(4, 3)
    wanted = 2 * x if bias is None else 2 * x + bias
    torch.testing.assert_close(layer.product(x, bias), wanted)
    torch.testing.assert_close(layer.partial_products(x, bias).sum(0), wanted)
