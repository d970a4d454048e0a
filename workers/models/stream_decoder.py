"""A decoder around one residual stream: what Llama, Gemma, DeepSeek and their kin have in common.

A step is begin, then for each layer attended and finish. Members bring a body of layers, which say
what they do with the stream. Knows neither a kind of attention nor KV memory.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import nn

from attention import ForwardBatch
from workers.layers.embedding import ParallelLMHead, TiedLMHead, VocabParallelEmbedding
from workers.layers.mlp import Mlp
from workers.layers.norm import RMSNorm
from workers.layers.sharding import ShardContext
from workers.models.base import AttentionGeometry, NativeCausalLM
from workers.models.feed_forward import experts_obstacle
from workers.models.segmented import TokenPlaces
from workers.models.token_inputs import ModelOutput, TokenInputs


class StreamSpec(Protocol):
    """What a family's spec says of the model."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def has_tied_embeddings(self) -> bool: ...


class StreamAttention(Protocol):
    """One layer's attention."""

    def attended(
        self, hidden: torch.Tensor, positions: torch.Tensor, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """hidden: normalised input (n, hidden_size) -> what the output projection takes,
        (n, heads * v_head_dim). positions: int64 (n,)."""


class StreamLayer(Protocol):
    """One decoder layer."""

    @property
    def self_attn(self) -> StreamAttention: ...
    @property
    def mlp(self) -> Mlp: ...

    def finish(
        self, attended: torch.Tensor, residual: torch.Tensor, next_norm: RMSNorm
    ) -> torch.Tensor:
        """What follows the layer's attention -> next_norm of the stream after the layer.

        attended: (n, heads * v_head_dim). residual: the stream (n, hidden_size), in place.
        """


class StreamBody(Protocol):
    """Embedding, layers and final norm: what checkpoints call `model`. A module.

    norms: norms[i] precedes layer i, the last one follows the last layer.
    """

    @property
    def embed_tokens(self) -> VocabParallelEmbedding: ...
    @property
    def decoder_layers(self) -> Sequence[StreamLayer]: ...
    @property
    def norms(self) -> tuple[RMSNorm, ...]: ...


class StreamCausalLM(NativeCausalLM):
    """A body with its language-model head."""

    def __init__(
        self,
        body: StreamBody,
        spec: StreamSpec,
        shard: ShardContext,
        geometry: AttentionGeometry,
    ) -> None:
        super().__init__()
        self.vocab_size = spec.vocab_size
        self.model = body
        self.geometry = geometry
        self._last = len(body.decoder_layers) - 1
        self._tapped_layers: frozenset[int] = frozenset()
        self._decoder_layers, self._norms = body.decoder_layers, body.norms
        self.lm_head: nn.Module = (
            TiedLMHead(body.embed_tokens)
            if spec.has_tied_embeddings
            else ParallelLMHead(spec.vocab_size, spec.hidden_size, shard)
        )
        self.tied_weights = (
            {"lm_head.weight": "model.embed_tokens.weight"} if spec.has_tied_embeddings else {}
        )

    def forward(self, tokens: TokenInputs, forward_batch: ForwardBatch) -> ModelOutput:
        taps: list[torch.Tensor] = []
        attended, residual = self._up_to_last(tokens, forward_batch, taps)
        return ModelOutput(self.finish(self._last, attended, residual), tuple(taps))

    def forward_rows(
        self, tokens: TokenInputs, forward_batch: ForwardBatch, rows: torch.Tensor
    ) -> ModelOutput:
        """What the last layer keeps of tokens is for everybody, the rest of it is for rows only."""
        taps: list[torch.Tensor] = []
        attended, residual = self._up_to_last(tokens, forward_batch, taps)
        return ModelOutput(self.finish_rows(attended, residual, rows), tuple(taps))

    def _up_to_last(
        self, tokens: TokenInputs, forward_batch: ForwardBatch, taps: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The last layer's attention output and the stream that it joins. taps: filled."""
        places = self.places(tokens, forward_batch)
        residual, hidden = self.begin(tokens.ids)
        for layer in range(self._last):
            # In one expression: no name keeps the attention's output while the next one runs.
            hidden = self.finish(
                layer, self.attended(layer, hidden, places, forward_batch), residual
            )
            if layer in self._tapped_layers:
                taps.append(self.whole_stream(residual))
        return self.attended(self._last, hidden, places, forward_batch), residual

    def places(self, tokens: TokenInputs, batch: ForwardBatch) -> TokenPlaces:
        """Of a step's tokens."""
        return TokenPlaces(tokens.positions, batch.locs_by_account)

    def tap_layers(self, layer_ids: Sequence[int]) -> None:
        unknown = sorted(set(layer_ids) - set(range(self._last)))
        if unknown:
            raise ValueError(f"layers {unknown} are not in [0, {self._last})")
        self._tapped_layers = frozenset(layer_ids)

    def whole_stream(self, residual: torch.Tensor) -> torch.Tensor:
        """The stream as it is here, of every token (n, hidden_size), which no layer writes to."""
        return residual.clone()

    def input_embedding(self) -> nn.Parameter:
        return self.model.embed_tokens.weight

    def begin(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The residual stream and the first layer's normalised input, both (n, hidden_size)."""
        residual = self.model.embed_tokens(input_ids)
        return residual, self._norms[0](residual)

    def attended(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        """hidden: a layer's normalised input -> its attention's output (n, heads * v_head_dim)."""
        attention = self._decoder_layers[layer].self_attn
        return attention.attended(hidden, places.positions, batch)

    def finish(self, layer: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of a layer -> the next one's normalised input, or the final states.

        residual: the stream (n, hidden_size), in place.
        """
        return self._decoder_layers[layer].finish(attended, residual, self._norms[layer + 1])

    def finish_rows(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """finish, of the last layer and for rows int64 (m,) only -> (m, hidden_size)."""
        return self.finish(
            self._last, attended.index_select(0, rows), residual.index_select(0, rows)
        )

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.lm_head(hidden)
        return logits

    def capture_obstacle(self, max_context_len: int) -> str:
        return experts_obstacle(self)

    def is_redundant_weight(self, name: str) -> bool:
        return name.endswith("rotary_emb.inv_freq")
