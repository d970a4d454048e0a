"""Which experts stay as a checkpoint stores them: all of a layer in one form that products take."""

from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from workers.layers.formats.format import Cut, WeightFormat
from workers.layers.formats.mxfp4 import Mxfp4
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.formats.scaled import FP8, Scaled
from workers.layers.formats.scaling import PerBlock
from workers.layers.kept.experts import Stack
from workers.layers.kept.fp8 import BLOCK
from workers.layers.kept.stacks import Fp4Stack, Fp8Stack
from workers.layers.moe.spec import MixtureSpec
from workers.parallel.expert_group import ExpertShare

GATE_UP, DOWN = "gate_up_proj", "down_proj"
KEPT_DTYPES = (torch.bfloat16,)


class StoredExperts(Protocol):
    """A layer of experts before it has weights. gate_up, down: of their shapes."""

    spec: MixtureSpec
    share: ExpertShare
    gate_up: nn.Parameter
    down: nn.Parameter

    def module_cuts(self) -> Mapping[str, Cut]: ...


def kept_stacks(
    experts: StoredExperts, prefix: str, recipe: WeightRecipe, device: torch.device
) -> dict[str, Stack] | None:
    """Stacks for the layer's matrices, to be filled; None where its experts are of several formats
    or of one, or of sizes, that products do not take."""
    shapes = {GATE_UP: experts.gate_up.shape, DOWN: experts.down.shape}
    if experts.spec.names.is_stacked:
        formats = {recipe.format_of(f"{prefix}experts.{name}") for name in shapes}
        if formats != {Mxfp4()}:
            return None
        return {name: Fp4Stack(*_sizes(shape), device) for name, shape in shapes.items()}
    if experts.share.num_columns % BLOCK or experts.gate_up.shape[2] % BLOCK:
        return None
    # Experts that all tokens share are cut into pieces that need not be whole blocks.
    if experts.spec.shared is not None:
        return None
    if not all(_is_kept(recipe.format_of(prefix + name)) for name in experts.module_cuts()):
        return None
    return {name: Fp8Stack(*_sizes(shape), device) for name, shape in shapes.items()}


def _sizes(shape: torch.Size) -> tuple[int, int, int]:
    num_matrices, rows, columns = shape
    return num_matrices, rows, columns


def _is_kept(one: WeightFormat) -> bool:
    if not isinstance(one, Scaled):
        return False
    return (one.dtype, one.scaling) == (FP8, PerBlock(BLOCK, BLOCK))


def stack_of(module: nn.Module) -> Stack:
    """Raises TypeError for what is no stack."""
    if not isinstance(module, Fp4Stack | Fp8Stack):
        raise TypeError(f"{type(module).__name__} is no stack of experts")
    return module
