"""Recipes of quantised checkpoints, and what each says of a tiny model's modules."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tests.fakes.quantised_checkpoints import FP8, Quantiser, awq, by_scale, gptq, mxfp4, packed
from tests.fakes.tiny_models import TinyModel

_HEADS = {"num_key_value_heads": 4, "head_dim": 8}
TINY = TinyModel("llama", {**_HEADS, "intermediate_size": 128, "num_hidden_layers": 2})
WIDE = TinyModel(
    "llama",
    {
        **{"num_key_value_heads": 8, "head_dim": 32},
        **{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 1},
    },
)
"""Of several blocks of 128 x 128 either way."""
COMPRESSED = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
FLOAT8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int"}
INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
SYMMETRIC_INT4 = {"num_bits": 4, "type": "int"}
MODELOPT = {"quant_method": "modelopt", "ignore": ["lm_head"]}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False}


def scheme(stored_as: str, *groups: dict[str, Any], ignore: tuple[str, ...] = ()) -> dict[str, Any]:
    """A recipe of compressed-tensors; groups: fields of a group's weights, and its targets."""
    return COMPRESSED | {
        "format": stored_as,
        "ignore": ["lm_head", *ignore],
        "config_groups": {
            f"group_{index}": {
                "targets": group.pop("targets", ["Linear"]),
                "format": group.pop("format", stored_as),
                "weights": group,
            }
            for index, group in enumerate(groups)
        },
    }


def of_all(quantise: Quantiser) -> Callable[[str], Quantiser | None]:
    return lambda module: quantise


def of_mixed(module: str) -> Quantiser | None:
    """The first layer as it was, k_proj apart from its kin, the rest by block."""
    if ".layers.0." in module:
        return None
    if module.endswith("mlp.down_proj"):
        return packed(32)
    return by_scale(FP8, (0, 0)) if "k_proj" in module else by_scale(FP8, (1, 0))


@dataclass(frozen=True)
class Case:
    """A recipe and what it says of each module of a model."""

    config: dict[str, Any]
    quantiser_of: Callable[[str], Quantiser | None]
    tiny: TinyModel = TINY


_FLOAT_CASES = {
    "fp8 tensor (ModelOpt)": Case(MODELOPT | {"quant_algo": "FP8"}, of_all(by_scale(FP8, None))),
    "fp8 channel (ModelOpt)": Case(
        MODELOPT | {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, of_all(by_scale(FP8, (1, 0)))
    ),
    "fp8 blocks of 128 (ModelOpt)": Case(
        MODELOPT | {"quant_algo": "FP8_PB_WO"}, of_all(by_scale(FP8, (128, 128))), WIDE
    ),
    "fp8 tensor (AutoFP8)": Case({"quant_method": "fp8"}, of_all(by_scale(FP8, None))),
    "fp8 blocks (DeepSeek)": Case(
        {"quant_method": "fp8", "weight_block_size": [16, 32], "fmt": "e4m3"},
        of_all(by_scale(FP8, (16, 32), "weight_scale_inv")),
    ),
    "fp8 blocks of 128 (DeepSeek)": Case(
        {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"},
        of_all(by_scale(FP8, (128, 128), "weight_scale_inv")),
        WIDE,
    ),
    "fp8 blocks (compressed-tensors)": Case(
        scheme("float-quantized", {**FLOAT8, "strategy": "block", "block_structure": [16, 32]}),
        of_all(by_scale(FP8, (16, 32))),
    ),
    "mxfp4": Case(
        scheme("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}),
        of_all(mxfp4),
    ),
}
_INTEGER_CASES = {
    "int8 channel": Case(
        scheme("int-quantized", {**INT8, "strategy": "channel"}),
        of_all(by_scale(torch.int8, (1, 0))),
    ),
    "int8 tensor": Case(
        scheme("naive-quantized", {**INT8, "strategy": "tensor"}),
        of_all(by_scale(torch.int8, (0, 0))),
    ),
    "awq": Case({"quant_method": "awq", "bits": 4, "group_size": 32}, of_all(awq(32))),
    "gptq": Case(GPTQ, of_all(gptq(32, has_act_order=False))),
    "gptq act-order": Case(GPTQ | {"desc_act": True}, of_all(gptq(32, has_act_order=True))),
    "gptq channel": Case(GPTQ | {"group_size": -1}, of_all(gptq(-1, has_act_order=False))),
    "gptq second version": Case(
        GPTQ | {"checkpoint_format": "gptq_v2"},
        of_all(gptq(32, has_act_order=False, zero_offset=0)),
    ),
    "gptq 2 bits": Case(GPTQ | {"bits": 2}, of_all(gptq(32, has_act_order=False, bits=2))),
    "gptq 8 bits": Case(GPTQ | {"bits": 8}, of_all(gptq(32, has_act_order=False, bits=8))),
    "gptq 8 bits act-order": Case(
        GPTQ | {"bits": 8, "desc_act": True}, of_all(gptq(32, has_act_order=True, bits=8))
    ),
}
_PACKED_CASES = {
    "packed act-order": Case(
        scheme("pack-quantized", {**INT4, "actorder": "group"}),
        of_all(packed(32, has_act_order=True)),
    ),
    "packed, symmetric unless said": Case(
        scheme("pack-quantized", {**SYMMETRIC_INT4, "strategy": "group", "group_size": 32}),
        of_all(packed(32, is_symmetric=True)),
    ),
    "packed channel": Case(
        scheme("pack-quantized", {**SYMMETRIC_INT4, "symmetric": True, "strategy": "channel"}),
        of_all(packed(-1, is_symmetric=True)),
    ),
    "packed 8 bits": Case(
        scheme("pack-quantized", {**INT4, "num_bits": 8}), of_all(packed(32, bits=8))
    ),
    "packed 8 bits channel": Case(
        scheme("pack-quantized", {**INT8, "strategy": "channel"}),
        of_all(packed(-1, bits=8, is_symmetric=True)),
    ),
    "mixed": Case(
        scheme(
            "float-quantized",
            {**FLOAT8, "strategy": "channel"},
            {**INT4, "targets": ["re:.*down_proj$"], "format": "pack-quantized"},
            {**FLOAT8, "strategy": "tensor", "targets": ["re:.*[k]_proj$"]},
            ignore=("re:model\\.layers\\.0\\.",),
        ),
        of_mixed,
    ),
}
CASES = {**_FLOAT_CASES, **_INTEGER_CASES, **_PACKED_CASES}
