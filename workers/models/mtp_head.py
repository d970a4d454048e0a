"""The layer for multi-token prediction that checkpoints have behind their last one (DeepSeek-V3's
report, 2024, section 2.2), as a head: it reads a token and the target's final state before it.

Module names are those of checkpoints. Knows no file and no step. The layer is one of the target's
own kind, whatever it attends by.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from attention import ForwardBatch, LayerAttentionConfig
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from workers.layers.norm import RMSNorm
from workers.layers.replicated import ReplicatedLinear
from workers.layers.rotary import InterleavedRotaryEmbedding, RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.base import AttentionGeometry
from workers.models.deepseek import DeepseekDecoderLayer
from workers.models.deepseek_family import DeepseekSpec
from workers.models.feed_forward import experts_obstacle
from workers.models.llama import LlamaDecoderLayer
from workers.models.llama_family import LlamaFamilySpec
from workers.models.pair_states import StatesBefore
from workers.models.stream_decoder import StreamAttention
from workers.models.token_inputs import TokenInputs


class KeepingAttention(StreamAttention, Protocol):
    """That keeps what it attends to without attending, too."""

    def keep(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """As GroupedQueryAttention.keep."""
        ...


class DecoderLayer(Protocol):
    """As StreamLayer, with its modules by name."""

    self_attn: KeepingAttention
    mlp: nn.Module
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """As StreamLayer.finish."""


def llama_layer(spec: LlamaFamilySpec, num_positions: int, shard: ShardContext) -> nn.Module:
    """One more layer of a target of the Llama family, a mixture where it has any."""
    own = replace(spec, layers=spec.layers[-1:], dense_layers=frozenset())
    return LlamaDecoderLayer(own, 0, RotaryEmbedding(spec.rope, num_positions, shard.device), shard)


def deepseek_layer(spec: DeepseekSpec, num_positions: int, shard: ShardContext) -> nn.Module:
    """The same of a target of DeepSeek's family."""
    rotary_class = InterleavedRotaryEmbedding if spec.is_interleaved else RotaryEmbedding
    rotary = rotary_class(spec.rope, num_positions, shard.device)
    own = replace(spec, num_layers=1, dense_layers=frozenset())
    return DeepseekDecoderLayer(own, 0, rotary, shard)


class SharedHead(nn.Module):
    """What checkpoints call so: the norm behind the layer, and a head that is the target's."""

    def __init__(self, norm: RMSNorm, head: ParallelLMHead) -> None:
        super().__init__()
        self.norm = norm
        self.head = head


class MtpHead(nn.Module):
    """geometry: of its one layer. States are the target's final ones, normalised, as its own are.

    layer: of the target's kind. eps: of its norms.
    """

    def __init__(
        self,
        layer: nn.Module,
        target: AttentionGeometry,
        sizes: tuple[int, int],
        eps: float,
        shard: ShardContext,
    ) -> None:
        """sizes: of the vocabulary and of a state."""
        super().__init__()
        vocab_size, size = sizes
        self.geometry = replace(target, layers=(LayerAttentionConfig(),))
        self.embed_tokens = VocabParallelEmbedding(vocab_size, size, shard)
        self.enorm = RMSNorm(size, eps, shard)
        self.hnorm = RMSNorm(size, eps, shard)
        self.eh_proj = ReplicatedLinear(2 * size, size, False, shard)
        # In a tuple, and its modules by their own names: checkpoints have no name for the layer.
        self._layer = (layer,)
        for name, module in layer.named_children():
            self.add_module(name, module)
        self.shared_head = SharedHead(
            RMSNorm(size, eps, shard), ParallelLMHead(vocab_size, size, shard)
        )

    def capture_obstacle(self) -> str:
        """As PairHead.capture_obstacle."""
        return experts_obstacle(self)

    def fuse(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """As PairHead.fuse: one state, as it is."""
        (state,) = taps
        return state

    def forward(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As PairHead.__call__."""
        stream, layer = self._stream(ids, states), self._decoder_layer
        normed = layer.input_layernorm(stream)
        attended = layer.self_attn.attended(normed, forward_batch.positions, forward_batch)
        return layer.finish(attended, stream, self.shared_head.norm)

    def read(
        self,
        tokens: TokenInputs,
        before: StatesBefore,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """As PairHead.read."""
        layer = self._decoder_layer
        normed = layer.input_layernorm(self._stream(tokens.ids, before.gathered()))
        layer.self_attn.keep(normed, tokens.positions, cache_indices, pool)

    @property
    def _decoder_layer(self) -> DecoderLayer:
        return self._layer[0]  # type: ignore[return-value]

    def _stream(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """What goes into the layer, (n, hidden_size)."""
        pair = torch.cat((self.enorm(self.embed_tokens(ids)), self.hnorm(states)), dim=-1)
        stream: torch.Tensor = self.eh_proj(pair)
        return stream

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As PairHead.logits."""
        logits: torch.Tensor = self.shared_head.head(states)
        return logits

    def draft(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As PairHead.draft."""
        made = self(ids, states, forward_batch)
        return self.named(self.shared_head.head.likeliest(made)), made

    @property
    def names(self) -> None:
        """As PairHead.names: they are."""

    def named(self, columns: torch.Tensor) -> torch.Tensor:
        """As PairHead.named: they are."""
        return columns
