"""Recipes "awq" (AutoAWQ) and "gptq" (AutoGPTQ, GPTQModel)."""

from collections.abc import Mapping
from typing import Any

from workers.layers.formats.awq import Awq
from workers.layers.formats.gptq import Gptq
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import EVERY_MODULE, FormatRule, WeightRecipe
from workers.loading.quantization.patterns import by_component, stated_expression
from workers.loading.quantization.stated import group_size_of, mapping, one_of, refuse, strings

AWQ, GPTQ = "awq", "gptq"
AWQ_SUPPORTED = "4 bits, version gemm, with zeros"
_LEFT_OUT = "-:"


def awq_recipe_of(stated: Mapping[str, Any]) -> WeightRecipe:
    """Raises ModelLoadError for what is not known."""
    one_of(stated, "bits", (4,), AWQ)
    version = stated.get("version", "gemm")
    if str(version).lower() != "gemm":
        raise refuse(AWQ, f"version={version!r}", AWQ_SUPPORTED)
    one_of(stated, "zero_point", (True, None), AWQ)
    key = "modules_to_not_convert"
    left_out = FormatRule(by_component(strings(stated.get(key), key)), PLAIN)
    weight_format = Awq(group_size_of(stated, AWQ))
    return WeightRecipe(AWQ, (left_out, FormatRule((EVERY_MODULE,), weight_format)))


def gptq_recipe_of(stated: Mapping[str, Any]) -> WeightRecipe:
    """Raises ModelLoadError for what is not known."""
    version = one_of(stated, "checkpoint_format", (None, "gptq", "gptq_v2"), GPTQ)
    weight_format = Gptq(
        bits=one_of(stated, "bits", (2, 4, 8), GPTQ),
        group_size=group_size_of(stated, GPTQ),
        has_act_order=bool(stated.get("desc_act", False)),
        zero_offset=0 if version == "gptq_v2" else 1,
        is_symmetric=stated.get("sym") is True,
    )
    exceptions = mapping(stated.get("dynamic") or {}, "dynamic")
    for name in exceptions:
        if not name.startswith(_LEFT_OUT):
            raise refuse(GPTQ, f"dynamic settings of {name!r}", "modules left out ('-:')")
    left_out = tuple(stated_expression(name.removeprefix(_LEFT_OUT)) for name in exceptions)
    rules = FormatRule(left_out, PLAIN), FormatRule((EVERY_MODULE,), weight_format)
    return WeightRecipe(GPTQ, rules)
