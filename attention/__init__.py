"""Attention over paged KV memory: tensors and kernels. Knows no request, no Ray, no HTTP."""

from attention.config import AttentionConfig, AttentionHeads, LayerAttentionConfig
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.latent_inputs import LatentTokens, UpProjections
from attention.latent_layer import LatentAttention
from attention.layer import RadixAttention
from attention.memory.layout import LatentEntry

__all__ = [
    "AttentionConfig",
    "AttentionHeads",
    "ForwardBatch",
    "ForwardMode",
    "LatentAttention",
    "LatentEntry",
    "LatentTokens",
    "LayerAttentionConfig",
    "RadixAttention",
    "UpProjections",
]
