"""Recipes "fp8": DeepSeek's and Qwen's with a scale a block, AutoFP8's with one a tensor."""

from collections.abc import Mapping
from typing import Any

from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import EVERY_MODULE, FormatRule, WeightRecipe
from workers.layers.formats.scaled import FP8, Scaled
from workers.layers.formats.scaling import PerBlock, PerTensor
from workers.loading.quantization.patterns import by_component
from workers.loading.quantization.stated import block_of, one_of, refuse, strings

NAME = "fp8"
SUPPORTED = "e4m3 with weight_block_size [rows, columns], or without one and a scale a tensor"


def recipe_of(stated: Mapping[str, Any]) -> WeightRecipe:
    """Raises ModelLoadError for what is not known."""
    one_of(stated, "fmt", (None, "e4m3"), NAME)
    blocks = stated.get("weight_block_size")
    if blocks is None:
        weight_format = Scaled(FP8, PerTensor())
    elif (block := block_of(blocks)) is not None:
        weight_format = Scaled(FP8, PerBlock(*block), "weight_scale_inv")
    else:
        raise refuse(NAME, f"weight_block_size={blocks!r}", SUPPORTED)
    ignored = [
        name
        for key in ("modules_to_not_convert", "ignored_layers")
        for name in strings(stated.get(key), key)
    ]
    rules = FormatRule(by_component(ignored), PLAIN), FormatRule((EVERY_MODULE,), weight_format)
    return WeightRecipe(NAME, rules)
