"""Qwen3-Next natively, cut over tensor-parallel ranks: layers that attend, and layers of the gated
delta rule, which keep a state by slot.

Module names are Hugging Face's, so that checkpoint names fall out of module paths. Knows no KV
memory: attention goes through RadixAttention, states through RowStates.
"""

from dataclasses import dataclass

import torch
from torch import nn

from attention import ForwardBatch
from attention.memory.slot_states import SlotStates
from workers.layers.delta.net import GatedDeltaNet
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.norm import RMSNorm, UnitOffsetRMSNorm
from workers.layers.rotary import RotaryEmbedding
from workers.layers.sharding import ShardContext
from workers.models.feed_forward import feed_forward
from workers.models.gated_attention import GatedAttention
from workers.models.grouped_attention import geometry_of
from workers.models.qwen3_next_family import Qwen3NextSpec
from workers.models.row_states import RowStates, row_states
from workers.models.segmented import TokenPlaces
from workers.models.stream_decoder import StreamCausalLM
from workers.models.token_inputs import TokenInputs


@dataclass(frozen=True, slots=True)
class StatePlaces(TokenPlaces):
    """And of each row. states: of the step."""

    states: RowStates


class Qwen3NextDecoderLayer(nn.Module):
    """Attention or the delta rule, and feed-forward, around one residual stream.

    entry: of the layer's state, in the order of such layers; None where it attends.
    """

    def __init__(
        self, spec: Qwen3NextSpec, layer_id: int, rotary: RotaryEmbedding, shard: ShardContext
    ) -> None:
        super().__init__()
        self.self_attn: GatedAttention
        self.linear_attn: GatedDeltaNet
        num_attending = sum(other < layer_id for other in spec.attending)
        self.entry: int | None = None
        if layer_id in spec.attending:
            self.self_attn = GatedAttention(spec, num_attending, rotary, shard)
        else:
            self.entry = layer_id - num_attending
            self.linear_attn = GatedDeltaNet(spec.delta, spec.hidden_size, spec.rms_norm_eps, shard)
        self.mlp = feed_forward(spec, layer_id, shard)
        self.input_layernorm = UnitOffsetRMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        self.post_attention_layernorm = UnitOffsetRMSNorm(
            spec.hidden_size, spec.rms_norm_eps, shard
        )

    def mixed(self, hidden: torch.Tensor, places: StatePlaces, batch: ForwardBatch) -> torch.Tensor:
        """hidden: normalised input (n, hidden_size) -> what the output projection takes."""
        if self.entry is None:
            return self.self_attn.attended(hidden, places.positions, batch)
        delta = self.linear_attn
        tokens, gate = delta.projected(hidden)
        return delta.gated(places.states.run(self.entry, tokens, delta.run_rows), gate)

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """As StreamLayer.finish."""
        project = self.self_attn.o_proj if self.entry is None else self.linear_attn.out_proj
        hidden = self.post_attention_layernorm.add_and_norm_(project(attended), residual)
        return next_norm.add_and_norm_(self.mlp(hidden), residual)


class Qwen3NextModel(nn.Module):
    """Embedding, layers and final norm: what checkpoints call `model`."""

    def __init__(self, spec: Qwen3NextSpec, num_positions: int, shard: ShardContext) -> None:
        super().__init__()
        rotary = RotaryEmbedding(spec.rope, num_positions, shard.device)
        self.embed_tokens = VocabParallelEmbedding(spec.vocab_size, spec.hidden_size, shard)
        layers = [Qwen3NextDecoderLayer(spec, i, rotary, shard) for i in range(spec.num_layers)]
        self.layers = nn.ModuleList(layers)
        self.norm = UnitOffsetRMSNorm(spec.hidden_size, spec.rms_norm_eps, shard)
        # Once more in plain tuples: registering them again would give the modules second names.
        self.decoder_layers = tuple(layers)
        # norms[i] precedes layer i, the last one follows the last layer.
        self.norms: tuple[RMSNorm, ...] = (*(layer.input_layernorm for layer in layers), self.norm)


class Qwen3NextForCausalLM(StreamCausalLM):
    """The model with its language-model head.

    num_positions: longest context the rotary table covers, in tokens.
    """

    def __init__(self, spec: Qwen3NextSpec, num_positions: int, shard: ShardContext) -> None:
        body = Qwen3NextModel(spec, num_positions, shard)
        super().__init__(body, spec, shard, geometry_of(spec, shard))
        self._layers = body.decoder_layers
        self.state_entries = tuple(
            layer.linear_attn.state_entry for layer in self._layers if layer.entry is not None
        )
        self._states: SlotStates | None = None

    def keep_states(self, states: SlotStates) -> None:
        self._states = states

    def places(self, tokens: TokenInputs, batch: ForwardBatch) -> StatePlaces:
        if self._states is None:
            raise RuntimeError("keep_states must run before the first step")
        return StatePlaces(tokens.positions, batch.locs_by_account, row_states(self._states, batch))

    def attended(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        if not isinstance(places, StatePlaces):
            raise TypeError("a layer that keeps a state needs the states of the step")
        return self._layers[layer].mixed(hidden, places, batch)

    def is_redundant_weight(self, name: str) -> bool:
        """Layers for multi-token prediction take no part in plain decoding."""
        return name.startswith("mtp.") or super().is_redundant_weight(name)
