"""Which members of a family fused kernels cover on NVIDIA GPUs, and which of their layers are then
multiplied as a checkpoint stores them. Needs no Triton: surveys ask, too."""

from collections.abc import Iterable

import torch
from torch import nn

from workers.layers.formats.layer import FormattedLayer, LinearLayer
from workers.layers.gated_mlp import GatedMLP
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.products import KERNEL_DTYPES
from workers.models.gemma_family import GemmaSpec
from workers.models.grouped_attention import GroupedQueryAttention
from workers.models.llama_family import LlamaFamilySpec


def has_fused_llama(spec: LlamaFamilySpec, dtype: torch.dtype) -> bool:
    """Whether the kernels cover a member: heads of 2**n that rotate whole, no bias of an MLP and,
    unless experts follow it, none of the output projection; experts of 16 bits."""
    if spec.mixture is not None and dtype not in KERNEL_DTYPES:
        return False
    is_whole = spec.rope.rotary_dim == spec.head_dim
    is_power = spec.head_dim & (spec.head_dim - 1) == 0
    has_bias = spec.has_mlp_bias or (spec.has_o_bias and spec.mixture is None)
    return is_whole and is_power and not has_bias


def has_fused_gemma(spec: GemmaSpec) -> bool:
    """Whether the kernels cover a member: heads of 2**n."""
    return spec.head_dim & (spec.head_dim - 1) == 0


def grouped_layers_as_stored(
    modules: Iterable[nn.Module],
) -> frozenset[LinearLayer | FormattedLayer]:
    """Of a model with grouped-query attention. modules: of it."""
    layers: list[LinearLayer | FormattedLayer] = []
    for one in modules:
        match one:
            case GroupedQueryAttention():
                layers += [one.qkv_proj, one.o_proj]
            case GatedMLP():
                layers += [one.gate_up_proj, one.down_proj]
            case MixtureOfExperts():
                layers.append(one.experts)
    return frozenset(layers)
