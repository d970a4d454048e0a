"""Attention over paged KV memory: tensors and kernels. Knows no request, no Ray, no HTTP."""

from attention.config import AttentionConfig, AttentionHeads, LayerAttentionConfig
from attention.forward_batch import ForwardBatch, ForwardMode
from attention.layer import RadixAttention

__all__ = [
    "AttentionConfig",
    "AttentionHeads",
    "ForwardBatch",
    "ForwardMode",
    "LayerAttentionConfig",
    "RadixAttention",
]
