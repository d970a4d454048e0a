"""The head of EAGLE-3 (Li et al., 2025): one decoder layer over tokens and a target's states.

Module names are those of its checkpoints, as EAGLE's own repository and SpecForge write them. Knows
no file, no step and no target.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import nn

from attention import ForwardBatch
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.embedding import FormattedLMHead, VocabParallelEmbedding
from workers.layers.formats.layer import LinearLayer
from workers.layers.gated_mlp import GatedMLP
from workers.layers.norm import RMSNorm
from workers.layers.replicated import ReplicatedLinear
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.grouped_attention import GroupedQueryAttention, geometry_of
from workers.models.llama_family import LlamaFamilySpec
from workers.models.pair_states import StatesBefore
from workers.models.token_inputs import TokenInputs

NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class EagleSpec:
    """layer: of the head, of one layer; its vocabulary is the target's. target_hidden_size: of the
    states that are fused. draft_vocab_size: how many tokens the head can propose."""

    layer: LlamaFamilySpec
    target_hidden_size: int
    draft_vocab_size: int


def kernel_obstacle(spec: LlamaFamilySpec) -> str:
    """Why fused kernels do not cover a head of such a layer; "" where they do."""
    if spec.rope.rotary_dim != spec.head_dim:
        return f"{spec.rope.rotary_dim} of a head's {spec.head_dim} elements are rotated"
    if spec.head_dim & (spec.head_dim - 1):
        return f"heads of {spec.head_dim} elements are no power of two"
    return ""


class PairAttention(GroupedQueryAttention):
    """Over a token's embedding and a state, side by side."""

    num_input_states = 2


class EagleLayer(nn.Module):
    """What checkpoints call `midlayer`. The residual stream is the state's."""

    attention_class: ClassVar[type[PairAttention]] = PairAttention

    def __init__(self, spec: LlamaFamilySpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        size, eps = spec.hidden_size, spec.rms_norm_eps
        rotary = RotaryEmbedding(spec.rope, num_positions, shard.device)
        self.self_attn = self.attention_class(spec, spec.layers[0], 0, rotary, shard)
        self.mlp = GatedMLP(size, spec.intermediate_size, spec.has_mlp_bias, shard)
        self.input_layernorm = RMSNorm(size, eps, shard)
        self.hidden_norm = RMSNorm(size, eps, shard)
        self.post_attention_layernorm = RMSNorm(size, eps, shard)

    def inputs(self, embedded: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """embedded, states (n, hidden_size) -> what attention takes, (n, 2 * hidden_size)."""
        return torch.cat((self.input_layernorm(embedded), self.hidden_norm(states)), dim=-1)

    def forward(
        self,
        inputs: torch.Tensor,
        states: torch.Tensor,
        positions: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """inputs: of the states, (n, hidden_size) -> the stream behind the layer, alike."""
        attended = self.self_attn.attended(inputs, positions, forward_batch)
        stream = states + self.self_attn.o_proj(attended)
        out: torch.Tensor = stream + self.mlp(self.post_attention_layernorm(stream))
        return out


class EagleHead(nn.Module):
    """target_ids: int64 (draft_vocab_size,), the target's id of each token that may be proposed."""

    layer_class: ClassVar[type[EagleLayer]] = EagleLayer

    def __init__(self, spec: EagleSpec, num_positions: int, shard: ShardContext) -> None:
        """num_positions: longest context the rotary table covers, in tokens."""
        super().__init__()
        size = spec.layer.hidden_size
        self.geometry = geometry_of(spec.layer, shard)
        self.embed_tokens = VocabParallelEmbedding(spec.layer.vocab_size, size, shard)
        self.fc = ReplicatedLinear(NUM_TAPS * spec.target_hidden_size, size, False, shard)
        self.midlayer = self.layer_class(spec.layer, num_positions, shard)
        self.norm = RMSNorm(size, spec.layer.rms_norm_eps, shard)
        self.lm_head = FormattedLMHead(spec.draft_vocab_size, size, shard)
        ids = torch.arange(spec.draft_vocab_size, device=shard.device)
        self.target_ids = nn.Buffer(ids, persistent=False)

    def layers_as_stored(self) -> frozenset[LinearLayer]:
        """Which layers' products can be made with what a checkpoint stores: all of them."""
        return frozenset(one for one in self.modules() if isinstance(one, LinearLayer))

    def capture_obstacle(self) -> str:
        """As PairHead.capture_obstacle."""
        return ""

    def fuse(self, taps: Sequence[torch.Tensor]) -> torch.Tensor:
        """NUM_TAPS states of the target, each (n, target_hidden_size) -> (n, hidden_size)."""
        fused: torch.Tensor = self.fc(torch.cat(list(taps), dim=-1))
        return fused

    def read(
        self,
        tokens: TokenInputs,
        before: StatesBefore,
        cache_indices: torch.Tensor,
        pool: TokenToKVPool,
    ) -> None:
        """As PairHead.read."""
        inputs = self.pair_inputs(tokens.ids, before)
        self.midlayer.self_attn.keep(inputs, tokens.positions, cache_indices, pool)

    def pair_inputs(self, ids: torch.Tensor, before: StatesBefore) -> torch.Tensor:
        """Of the layer's attention, (n, 2 * hidden_size)."""
        return self.midlayer.inputs(self.embed_tokens(ids), before.gathered())

    def pass_inputs(self, ids: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        """The same of what a pass reads."""
        return self.pair_inputs(ids, StatesBefore(states))

    def forward(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """As PairHead.__call__."""
        inputs = self.pass_inputs(ids, states)
        made: torch.Tensor = self.midlayer(inputs, states, forward_batch.positions, forward_batch)
        return made

    def normed(self, states: torch.Tensor) -> torch.Tensor:
        """What logits are made of: states (n, hidden_size), alike."""
        normed: torch.Tensor = self.norm(states)
        return normed

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """As PairHead.logits."""
        logits: torch.Tensor = self.lm_head(self.normed(states))
        return logits

    def draft(
        self, ids: torch.Tensor, states: torch.Tensor, forward_batch: ForwardBatch
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As PairHead.draft."""
        made = self(ids, states, forward_batch)
        return self.named(self.lm_head.likeliest(self.normed(made))), made

    @property
    def names(self) -> torch.Tensor:
        """As PairHead.names."""
        return self.target_ids

    def named(self, columns: torch.Tensor) -> torch.Tensor:
        """As PairHead.named."""
        return self.target_ids[columns]
