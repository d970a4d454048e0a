"""Recipes of compressed-tensors, as llm-compressor writes them: groups of modules, each with a
scheme, and a list of modules that stay as they are.
"""

from collections.abc import Mapping
from typing import Any

import torch

from workers.layers.formats.format import WeightFormat
from workers.layers.formats.mxfp4 import GROUP_SIZE, Mxfp4
from workers.layers.formats.packed import Packed
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import EVERY_MODULE, FormatRule, WeightRecipe
from workers.layers.formats.scaled import FP8, Scaled
from workers.layers.formats.scaling import PerBlock, PerChannel, PerTensor, Scaling
from workers.loading.quantization.patterns import by_name_or_expression
from workers.loading.quantization.stated import (
    block_of,
    group_size_of,
    mapping,
    one_of,
    refuse,
    strings,
)

NAME = "compressed-tensors"
SUPPORTED = (
    "float-quantized and naive-quantized FP8 (tensor, channel, block), int-quantized INT8 (tensor, "
    "channel), pack-quantized INT4 and INT8 (channel, group), mxfp4-pack-quantized"
)
_LINEAR = "Linear"


def recipe_of(stated: Mapping[str, Any]) -> WeightRecipe:
    """Raises ModelLoadError for a scheme that is not known."""
    one_of(stated, "quantization_status", (None, "compressed", "frozen"), NAME)
    sparsity = stated.get("sparsity_config")
    if sparsity and mapping(sparsity, "sparsity_config").get("format") not in (None, "dense"):
        raise refuse(NAME, f"sparsity_config {sparsity!r}", "dense weights")
    ignored = by_name_or_expression(strings(stated.get("ignore"), "ignore"))
    groups = mapping(stated.get("config_groups"), "config_groups")
    rules = [_rule(mapping(group, name), stated) for name, group in groups.items()]
    # A group that speaks of modules by name goes before one of all linear modules.
    rules.sort(key=lambda rule: EVERY_MODULE in rule.patterns)
    return WeightRecipe(NAME, (FormatRule(ignored, PLAIN), *rules))


def _rule(group: Mapping[str, Any], stated: Mapping[str, Any]) -> FormatRule:
    targets = strings(group.get("targets"), "targets")
    named = by_name_or_expression(target for target in targets if target != _LINEAR)
    patterns = (*named, EVERY_MODULE) if _LINEAR in targets else named
    stored_as = group.get("format") or stated.get("format")
    weights = mapping(group.get("weights"), "weights")
    return FormatRule(patterns, _format(str(stored_as), weights))


def _format(stored_as: str, weights: Mapping[str, Any]) -> WeightFormat:
    kind = weights.get("type", "int"), weights.get("num_bits", 8)
    if stored_as in ("float-quantized", "naive-quantized") and kind == ("float", 8):
        _check_symmetric(weights)
        return Scaled(FP8, _scaling(weights, has_blocks=True))
    if stored_as in ("int-quantized", "naive-quantized") and kind == ("int", 8):
        _check_symmetric(weights)
        return Scaled(torch.int8, _scaling(weights, has_blocks=False))
    if stored_as == "pack-quantized" and kind in (("int", 4), ("int", 8)):
        return _packed(weights)
    if stored_as == "mxfp4-pack-quantized" and kind == ("float", 4):
        one_of(weights, "group_size", (GROUP_SIZE,), NAME)
        return Mxfp4()
    raise refuse(NAME, f"format={stored_as!r} of {kind[0]} {kind[1]} bits", SUPPORTED)


def _check_symmetric(weights: Mapping[str, Any]) -> None:
    one_of(weights, "symmetric", (True, None), NAME)
    one_of(weights, "dynamic", (False, None), NAME)


def _scaling(weights: Mapping[str, Any], has_blocks: bool) -> Scaling:
    strategy = weights.get("strategy")
    if strategy == "tensor":
        return PerTensor()
    if strategy == "channel":
        return PerChannel()
    blocks = weights.get("block_structure")
    block = block_of(blocks)
    if strategy == "block" and has_blocks and block is not None:
        return PerBlock(*block)
    raise refuse(NAME, f"strategy={strategy!r} and block_structure={blocks!r}", SUPPORTED)


def _packed(weights: Mapping[str, Any]) -> Packed:
    strategy = one_of(weights, "strategy", ("channel", "group"), NAME)
    actorder = one_of(weights, "actorder", (None, False, "weight", "static", "group"), NAME)
    return Packed(
        bits=int(weights.get("num_bits", 8)),
        group_size=-1 if strategy == "channel" else group_size_of(weights, NAME),
        is_symmetric=one_of(weights, "symmetric", (None, True, False), NAME) is not False,
        has_act_order=actorder == "group",
    )
