"""Scales of an FP8 KV cache, as published checkpoints carry them beside the weights.

Names: ModelOpt writes `self_attn.k_proj.k_scale`, llm-compressor `self_attn.k_scale` or, earlier,
`self_attn.k_proj.output_scale`, vLLM saves `self_attn.attn.k_scale`; v alike; `self_attn.kv_scale`
stands for both. Scales of queries and probabilities are known and left unread: queries are rounded
with scale 1 here. Knows no model and no pool.
"""

import math
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

import torch

from workers.errors import ModelLoadError
from workers.loading.checkpoint import SafetensorsCheckpoint

_SCALE = re.compile(
    r"layers\.(?P<layer>\d+)\.self_attn\."
    r"(?:(?:(?:attn|k_proj|v_proj|qkv_proj)\.)?(?P<kind>k|v|kv|q|prob|prob_output)_scale"
    r"|(?P<proj>[kv])_proj\.output_scale)$"
)
_CACHED = ("k", "v", "kv")


class KVScale(NamedTuple):
    """One layer's: what is cached as x stands for x * scale."""

    k: float
    v: float


class _ScaleName(NamedTuple):
    layer_id: int
    kind: str


def _parse(name: str) -> _ScaleName | None:
    match = _SCALE.search(name)
    if match is None:
        return None
    return _ScaleName(int(match["layer"]), match["kind"] or match["proj"])


def is_kv_scale(name: str) -> bool:
    """Whether a checkpoint tensor is an attention scale and no weight."""
    return _parse(name) is not None


def read_kv_scales(checkpoint: SafetensorsCheckpoint, num_layers: int) -> tuple[KVScale, ...]:
    """A scale for each layer, or none at all where the checkpoint has none.

    Raises ModelLoadError where some layers have scales and others have none, or a scale is no
    single positive number.
    """
    found = dict(_read_all(checkpoint, [name for name in checkpoint.names if is_kv_scale(name)]))
    if not found:
        return ()
    scales = []
    for layer_id in range(num_layers):
        both = found.get(_ScaleName(layer_id, "kv"))
        k = found.get(_ScaleName(layer_id, "k"), both)
        v = found.get(_ScaleName(layer_id, "v"), both)
        if k is None or v is None:
            raise ModelLoadError(
                f"the checkpoint has KV cache scales, but layer {layer_id} lacks one"
            )
        scales.append(KVScale(k, v))
    return tuple(scales)


def _read_all(
    checkpoint: SafetensorsCheckpoint, names: Collection[str]
) -> Iterator[tuple[_ScaleName, float]]:
    with checkpoint.opened(names) as tensors:
        for name, tensor in tensors.items():
            parsed = _parse(name)
            if parsed is not None and parsed.kind in _CACHED:
                if math.prod(tensor.shape) != 1:
                    raise ModelLoadError(
                        f"{name} has shape {tensor.shape}; one scale for the whole tensor is "
                        "supported, none by head or channel"
                    )
                yield parsed, _positive(name, tensor[()])


def _positive(name: str, tensor: torch.Tensor) -> float:
    scale = float(tensor.item())
    if not (math.isfinite(scale) and scale > 0.0):
        raise ModelLoadError(f"{name} is {scale}; a scale must be a positive number")
    return scale
