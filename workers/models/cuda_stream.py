"""Decoders around one residual stream on NVIDIA GPUs, run by fused kernels.

A layer is four GEMMs, or two and a mixture of experts, whose partial products the kernel after each
sums up, the rotation with the KV write, attention, two joins of a block's output with the stream
and, where the GEMM before it does not do it, the activation. What a join is, members say: it
includes the next block's norm, and with several ranks the sums over them. Knows no KV pages beyond
the tensors they live in. Needs Triton.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from attention import ForwardBatch
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.errors import ConfigError
from workers.layers.cuda.residual_stream import SelectRows
from workers.layers.embedding import TiedLMHead
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.invariant import InvariantGemmChooser
from workers.layers.gemm.matrix import (
    BiasedProducts,
    GatedGemm,
    PartialGemm,
    PartialProducts,
    partial_gemms,
)
from workers.layers.gemm.step_products import chain_seconds
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.new_tensor import NewTensor
from workers.layers.sharding import ShardContext
from workers.models.cuda_attention import LayerAttention, layer_attention
from workers.models.cuda_mlps import DenseMlp, FusedMlp, fused_mlps
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
class _FusedLayer:
    """One decoder layer."""

    qkv: PartialGemm
    attention: LayerAttention
    o: PartialProducts
    mlp: FusedMlp
    joins: LayerJoins

    @property
    def products(self) -> tuple[PartialGemm | GatedGemm, ...]:
        """In the order that a step runs them in; none where they are not all GEMMs."""
        if not (isinstance(self.mlp, DenseMlp) and isinstance(self.o, PartialGemm)):
            return ()
        return (self.qkv, self.o, self.mlp.gate_up, self.mlp.last)

    def attention_inputs(
        self, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        """hidden: normalised input (n, hidden_size)."""
        return self.attention.rotate(self.qkv(hidden), places, new)

    def attended(
        self, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        """hidden: normalised input -> attention's output (n, heads * head_dim)."""
        if self.attention.takes_projected(batch):
            return self.attention.attend_projected(self.qkv(hidden), batch)
        return self.attention.attend(self.attention_inputs(hidden, places, torch.empty), batch)

    def finish(self, attended: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """The rest of the layer, row by row -> the next layer's normalised input.

        residual: the stream (n, hidden_size), in place.
        """
        hidden = self.joins.after_attention(self.o, attended, residual)
        return self.joins.after_mlp(self.mlp.last, self.mlp.inner(hidden), residual)


class FusedStreamCausalLM(StreamCausalLM, SegmentedCausalLM):
    """StreamCausalLM over fused kernels. prepare must run before the first step."""

    def __init__(self, body: StreamBody, spec: StreamSpec, shard: ShardContext) -> None:
        super().__init__(body, spec, shard)
        # The number of rows that experts get decides their tiles.
        is_dense = not any(isinstance(x.mlp, MixtureOfExperts) for x in body.decoder_layers)
        self.has_invariant_products = is_dense
        self._shard = shard
        self._layers: list[_FusedLayer] = []
        self._head: PartialGemm | None = None
        self._ways: DecoderWays | None = None
        self._chooser: GemmChooser | None = None
        self.vocab_shard = None if shard.tp.size == 1 else body.embed_tokens.rows

    @abstractmethod
    def decoder_ways(self) -> DecoderWays:
        """Called once, with the weights there. A collective of the ranks."""

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        choosers = InvariantGemmChooser if self._shard.is_deterministic else GemmChooser
        self._chooser = chooser = choosers.for_device(self._shard.device)
        # A rank's partial products are summed up before other ranks' are added.
        is_alone = self._shard.tp.size == 1
        self._ways = ways = self.decoder_ways()
        layers = self._decoder_layers
        qkv = partial_gemms(chooser, [x.self_attn.qkv_proj.weight for x in layers], True)
        o = partial_gemms(chooser, [x.self_attn.o_proj.weight for x in layers], is_alone)
        mlps = fused_mlps(chooser, [x.mlp for x in layers], is_alone)
        self._layers = [
            _FusedLayer(
                qkv=qkv[index],
                attention=layer_attention(layer.self_attn, token_to_kv_pool, self._shard.dtype),
                o=self._with_bias(o[index], layer.self_attn.o_proj.bias),
                mlp=mlps[index],
                joins=ways.joins[index],
            )
            for index, layer in enumerate(layers)
        ]
        head_weight = _head_weight(self.model.embed_tokens, self.lm_head)
        (self._head,) = partial_gemms(chooser, [head_weight], False)

    def _with_bias(self, gemm: PartialGemm, bias: torch.Tensor | None) -> PartialProducts:
        """A bias is one of the sum over ranks: the first rank adds it."""
        return gemm if bias is None or self._shard.tp.rank else BiasedProducts(gemm, bias)

    def tap_layers(self, layer_ids: Sequence[int]) -> None:
        if self._shard.tp.size > 1:
            raise ConfigError("ranks keep parts of the stream each, which no drafter can read")
        super().tap_layers(layer_ids)

    def prepare_while_idle(self) -> bool:
        """GEMMs that there was no time to measure, one timing at a time."""
        return self._chooser is not None and self._chooser.measure_next()

    @torch.inference_mode()
    def product_seconds(self, num_tokens: Sequence[int]) -> tuple[float, ...]:
        layer, embedding = self._layers[0], self.model.embed_tokens.weight
        if not all(one.products for one in self._layers):
            return ()
        widths = {matrix: matrix.weight.shape[1] for matrix in layer.products}
        inputs = {
            width: torch.randn(
                (max(num_tokens), width), dtype=embedding.dtype, device=embedding.device
            )
            for width in widths.values()
        }

        def chain(n: int) -> None:
            for matrix, width in widths.items():
                matrix(inputs[width][:n])

        seconds = chain_seconds(chain, num_tokens)
        return tuple(len(self._layers) * one for one in seconds)

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
        return self._layers[layer].attention.attend(inputs, batch)

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


def _head_weight(embedding: nn.Module, head: nn.Module) -> torch.Tensor:
    owner = embedding if isinstance(head, TiedLMHead) else head
    return owner.get_parameter("weight")
