"""Decoders around one residual stream on NVIDIA GPUs, by fused kernels: what all have in common.

A layer ends with two joins of a block's output with the stream. What a join is, members say: it
sums up the partial products of the GEMM before it, over ranks too, and includes the next block's
norm. How a layer comes to its attention is its own. Needs Triton.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from attention import ForwardBatch
from workers.layers.cuda.residual_stream import SelectRows
from workers.layers.embedding import TiedLMHead
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.matrix import PartialGemm, PartialProducts
from workers.layers.new_tensor import NewTensor
from workers.layers.sharding import ShardContext
from workers.models.base import AttentionGeometry
from workers.models.cuda_mlps import FusedMlp
from workers.models.segmented import AttentionInputs, SegmentedCausalLM, TokenPlaces
from workers.models.stream_decoder import StreamBody, StreamCausalLM, StreamSpec


class LayerJoin(Protocol):
    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        """What gemm(x), summed over ranks, adds to residual goes there, in place -> the next
        block's normalised input (n, hidden_size), valid up to the next join."""


@dataclass(frozen=True, slots=True)
class LayerJoins:
    """Of one layer."""

    after_attention: LayerJoin
    after_mlp: LayerJoin


@dataclass(frozen=True, slots=True)
class DecoderWays:
    """How the stream runs. begin: token ids int64 (n,) -> its beginning and the first layer's
    normalised input. joins: by layer. select_rows: as the way that joins keep the stream says."""

    begin: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
    joins: Sequence[LayerJoins]
    select_rows: SelectRows


@dataclass(frozen=True, slots=True)
class FusedLayer(ABC):
    """One decoder layer. o: the output projection."""

    o: PartialProducts
    mlp: FusedMlp
    joins: LayerJoins

    @abstractmethod
    def attention_inputs(
        self, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        """hidden: normalised input (n, hidden_size)."""

    @abstractmethod
    def attend(self, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        """(n, heads * v_head_dim)."""

    def attended(
        self, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        """hidden: normalised input -> attention's output (n, heads * v_head_dim)."""
        return self.attend(self.attention_inputs(hidden, places, torch.empty), batch)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, row by row -> the next layer's normalised input.

        residual: the stream (n, hidden_size), in place.
        """
        hidden = self.joins.after_attention(self.o, attended, residual)
        return self.joins.after_mlp(self.mlp.last, self.mlp.inner(hidden), residual)


class FusedCausalLM(StreamCausalLM, SegmentedCausalLM):
    """StreamCausalLM over fused kernels. prepare must run before the first step, and says what
    _layers, _head, _ways and _chooser are."""

    def __init__(
        self,
        body: StreamBody,
        spec: StreamSpec,
        shard: ShardContext,
        geometry: AttentionGeometry,
    ) -> None:
        super().__init__(body, spec, shard, geometry)
        self._shard = shard
        self._layers: Sequence[FusedLayer] = ()
        self._head: PartialGemm | None = None
        self._ways: DecoderWays | None = None
        self._chooser: GemmChooser | None = None
        self.vocab_shard = None if shard.tp.size == 1 else body.embed_tokens.rows

    @abstractmethod
    def decoder_ways(self) -> DecoderWays:
        """Called once, with the weights there. A collective of the ranks."""

    def whole_stream(self, residual: torch.Tensor) -> torch.Tensor:
        """Several ranks may keep some rows of it each."""
        if self._shard.tp.size == 1:
            return super().whole_stream(residual)
        rows = torch.arange(len(residual), device=residual.device)
        return self._prepared_ways().select_rows(residual, rows)

    def prepare_while_idle(self) -> bool:
        """GEMMs that there was no time to measure, one timing at a time."""
        return self._chooser is not None and self._chooser.measure_next()

    def unlike_layers(self) -> frozenset[int]:
        kinds = [type(layer.mlp) for layer in self._layers]
        return frozenset(map(kinds.index, kinds))

    def begin(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._prepared_ways().begin(input_ids)

    def attention_inputs(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        return self._layers[layer].attention_inputs(hidden, places, new)

    def attend(self, layer: int, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        return self._layers[layer].attend(inputs, batch)

    def attended(
        self, layer: int, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        return self._layers[layer].attended(hidden, places, batch)

    def finish(self, layer: int, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return self._layers[layer].finish(attended, residual)

    def finish_rows(
        self, attended: torch.Tensor, residual: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        if rows.shape[0] == 0:
            return residual[:0]
        selected = self._prepared_ways().select_rows(residual, rows)
        return self._layers[-1].finish(attended.index_select(0, rows), selected)

    def _prepared_ways(self) -> DecoderWays:
        if self._ways is None:
            raise RuntimeError("prepare must run before the first step")
        return self._ways

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """In the model's dtype: whoever needs float32 converts the rows that need it."""
        return self.whole_logits(self.local_logits(hidden))

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._head is None:
            raise RuntimeError("prepare must run before the first step")
        return self._head(hidden)[0]

    def whole_logits(self, local: torch.Tensor) -> torch.Tensor:
        return self._shard.tp.all_gather_last_dim(local)[:, : self.vocab_size]

    def _head_weight(self) -> torch.Tensor:
        is_tied = isinstance(self.lm_head, TiedLMHead)
        owner = self.model.embed_tokens if is_tied else self.lm_head
        return owner.get_parameter("weight")
