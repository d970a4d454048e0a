"""The block drafter of DFlash (Chen et al., 2026, arXiv 2602.06036): Qwen3's layers, which see a
target's states as keys and values and propose a whole block of tokens in one pass.

Module names are those of its checkpoints. The embedding and the vocabulary's head are the target's.
Knows no file, no step and no target.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from attention import ForwardBatch
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.norm import RMSNorm
from workers.layers.replicated import ReplicatedLinear
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.grouped_attention import QKNormAttention, geometry_of
from workers.models.llama import LlamaDecoderLayer
from workers.models.llama_family import LlamaFamilySpec

VocabHead = Callable[[torch.Tensor], torch.Tensor]
"""Normalised states (n, hidden_size) -> logits (n, vocab_size)."""


@dataclass(frozen=True, slots=True)
class DFlashSpec:
    """layers: of the drafter; its vocabulary and hidden size are the target's. block_size: tokens
    of a block, the one it begins with included, which is known. mask_token_id: what stands for the
    others. tap_layers: behind which layers of the target states are taken, ascending."""

    layers: LlamaFamilySpec
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Borrowed:
    """What a drafter has of its target."""

    embed_tokens: VocabParallelEmbedding
    head: VocabHead


class DFlashModel(nn.Module):
    """A token that the target has read is, to every layer, the keys and values of its fused states;
    tokens of a block are read as any decoder reads tokens, but see the whole block."""

    def __init__(
        self, spec: DFlashSpec, num_positions: int, borrowed: Borrowed, shard: ShardContext
    ) -> None:
        """num_positions: longest context the rotary table covers, in tokens."""
        super().__init__()
        own = spec.layers
        size, eps = own.hidden_size, own.rms_norm_eps
        self.block_size, self.mask_token_id = spec.block_size, spec.mask_token_id
        self.geometry = geometry_of(own, shard)
        self.fc = ReplicatedLinear(len(spec.tap_layers) * size, size, False, shard)
        self.hidden_norm = RMSNorm(size, eps, shard)
        rotary = RotaryEmbedding(own.rope, num_positions, shard.device)
        layers = [LlamaDecoderLayer(own, index, rotary, shard) for index in range(len(own.layers))]
        self.layers = nn.ModuleList(layers)
        self.norm = RMSNorm(size, eps, shard)
        # In tuples: registering them again would give the modules second names.
        self._layers = tuple(layers)
        self._norms = (*(layer.input_layernorm for layer in layers), self.norm)
        self._borrowed = borrowed

    def keep(
        self,
        taps: Sequence[torch.Tensor],
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """As BlockDrafter.keep."""
        context = self.hidden_norm(self.fc(torch.cat(list(taps), dim=-1)))
        for index, layer in enumerate(self._layers):
            k, v = _keys_and_values(layer.self_attn, context, positions)
            pool.set_kv_buffer(index, cache_indices, k, v)

    def forward(self, ids: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """As BlockDrafter.__call__."""
        residual = self._borrowed.embed_tokens(ids)
        hidden: torch.Tensor = self._norms[0](residual)
        for index, layer in enumerate(self._layers):
            attended = layer.self_attn.attended(hidden, forward_batch.positions, forward_batch)
            hidden = layer.finish(attended, residual, self._norms[index + 1])
        return hidden

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As BlockDrafter.logits."""
        return self._borrowed.head(states)


def _keys_and_values(
    attention: nn.Module, context: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the layer keeps of states, (n, hidden_size): k, rotated, and v, (n, heads, head_dim)
    both. No query is made: nothing of the context is asked for drafts."""
    assert isinstance(attention, QKNormAttention), "a drafter normalises its heads"
    projection = attention.qkv_proj
    q_size, *sizes = projection.split_sizes
    bias = None if projection.bias is None else projection.bias[q_size:]
    made = functional.linear(context, projection.weight[q_size:], bias)
    heads = len(made), sizes[0] // attention.head_dim, attention.head_dim
    k, v = (part.view(heads) for part in torch.split(made, sizes, dim=-1))
    no_queries = k[:, :0]
    _, rotated = attention.rotary(positions, no_queries, attention.k_norm(k))
    return rotated, v
