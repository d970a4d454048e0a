"""Decoders with grouped-query attention on NVIDIA GPUs, run by fused kernels.

A layer is four GEMMs, or two and a mixture of experts, whose partial products the kernel after each
sums up, the rotation with the KV write, attention, two joins (cuda_decoder.py) and, where the GEMM
before it does not do it, the activation. Knows no KV pages beyond the tensors they live in. Needs
Triton.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from attention import ForwardBatch
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from workers.layers.formats.layer import FormattedLayer, LinearLayer
from workers.layers.gated_mlp import GatedMLP
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.invariant import InvariantGemmChooser
from workers.layers.gemm.matrix import (
    BiasedProducts,
    PartialGemm,
    PartialProducts,
    partial_gemms,
)
from workers.layers.gemm.step_products import chain_seconds
from workers.layers.mlp import Mlp
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.product import KeptProduct
from workers.layers.quantised.products import GatedProducts, LinearProducts, linear_products
from workers.layers.sharding import ShardContext
from workers.models.base import AttentionGeometry
from workers.models.cuda_attention import LayerAttention, layer_attention
from workers.models.cuda_decoder import FusedCausalLM, FusedLayer
from workers.models.cuda_mlps import (
    DenseMlp,
    FusedMixture,
    FusedMlp,
    fused_mlps,
    unfused_mlps,
)
from workers.models.fused_members import grouped_layers_as_stored
from workers.models.grouped_attention import GroupedQueryAttention
from workers.models.segmented import AttentionInputs, TokenPlaces
from workers.models.stream_decoder import StreamBody, StreamSpec


@dataclass(frozen=True, slots=True)
class LayerAdapters:
    """How a model's layers come to add adapters. products: of a layer, from its own. mixture: of a
    mixture of experts and whether its parts are summed up; None where nothing is added to it.
    embedded: adds to the embedding (n, hidden_size) of ids int64 (n,), in place; None where nothing
    is."""

    products: Callable[[LinearLayer, PartialProducts], PartialProducts]
    mixture: Callable[[MixtureOfExperts, bool], PartialProducts | None]
    embedded: Callable[[torch.Tensor, torch.Tensor], None] | None = None


@dataclass(frozen=True, slots=True)
class _GroupedLayer(FusedLayer):
    """qkv: the joined projection."""

    qkv: PartialProducts
    attention: LayerAttention

    @property
    def products(self) -> tuple[LinearProducts | GatedProducts, ...]:
        """In the order that a step runs them in; none where they are not all GEMMs."""
        qkv, o, mlp = self.qkv, self.o, self.mlp
        kinds = PartialGemm, KeptProduct
        if not (isinstance(qkv, kinds) and isinstance(o, kinds)):
            return ()
        return (qkv, o, mlp.gate_up, mlp.last) if isinstance(mlp, DenseMlp) else ()

    def attention_inputs(
        self, hidden: torch.Tensor, places: TokenPlaces, new: NewTensor
    ) -> AttentionInputs:
        return self.attention.rotate(self.qkv(hidden), places, new)

    def attend(self, inputs: AttentionInputs, batch: ForwardBatch) -> torch.Tensor:
        return self.attention.attend(inputs, batch)

    def attended(
        self, hidden: torch.Tensor, places: TokenPlaces, batch: ForwardBatch
    ) -> torch.Tensor:
        if self.attention.takes_projected(batch):
            return self.attention.attend_projected(self.qkv(hidden), batch)
        return self.attend(self.attention_inputs(hidden, places, torch.empty), batch)


class FusedStreamCausalLM(FusedCausalLM):
    """FusedCausalLM of layers with grouped-query attention."""

    _layers: Sequence[_GroupedLayer]
    _adapted_layers: Sequence[_GroupedLayer] = ()
    _adapters: LayerAdapters | None = None
    _is_adapted = False

    def __init__(
        self,
        body: StreamBody,
        spec: StreamSpec,
        shard: ShardContext,
        geometry: AttentionGeometry,
    ) -> None:
        super().__init__(body, spec, shard, geometry)
        # The number of rows that experts get decides their tiles.
        is_dense = not any(isinstance(x.mlp, MixtureOfExperts) for x in body.decoder_layers)
        self.has_invariant_products = is_dense

    def layers_as_stored(self) -> frozenset[LinearLayer | FormattedLayer]:
        return grouped_layers_as_stored(self.modules())

    def prepare(self, req_to_token_pool: ReqToTokenPool, token_to_kv_pool: TokenToKVPool) -> None:
        choosers = InvariantGemmChooser if self._shard.is_deterministic else GemmChooser
        self._chooser = chooser = choosers.for_device(self._shard.device)
        # A rank's partial products are summed up before other ranks' are added.
        is_alone = self._shard.tp.size == 1
        self._ways = ways = self.decoder_ways()
        attentions = self._attentions()
        qkv = linear_products(chooser, [x.qkv_proj for x in attentions], True)
        o = linear_products(chooser, [x.o_proj for x in attentions], is_alone)
        mlps = fused_mlps(chooser, [x.mlp for x in self._decoder_layers], is_alone)
        self._layers = [
            _GroupedLayer(
                o=self._with_bias(o[index], attention.o_proj.bias),
                mlp=mlps[index],
                joins=joins,
                qkv=qkv[index],
                attention=layer_attention(attention, token_to_kv_pool, self._shard.dtype),
            )
            for index, (attention, joins) in enumerate(zip(attentions, ways.joins, strict=True))
        ]
        (self._head,) = partial_gemms(chooser, [self._head_weight()], False)
        if self._adapters is not None:
            self._adapted_layers = self._make_adapted(chooser, self._adapters)

    def expect_adapters(self, adapters: LayerAdapters) -> None:
        """Before prepare: some steps will run over layers that adapters add to."""
        self._adapters = adapters

    def begin(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self._adapters.embedded if self._is_adapted and self._adapters else None
        if embedded is None:
            return super().begin(input_ids)
        residual: torch.Tensor = self.model.embed_tokens(input_ids)
        embedded(residual, input_ids)
        return residual, self._norms[0](residual)

    @contextmanager
    def adapted(self) -> Iterator[None]:
        """What runs within runs over those layers."""
        plain, self._layers = self._layers, self._adapted_layers
        self._is_adapted = True
        try:
            yield
        finally:
            self._layers, self._is_adapted = plain, False

    def _make_adapted(self, chooser: GemmChooser, adapters: LayerAdapters) -> list[_GroupedLayer]:
        dense = [x.mlp for x in self._decoder_layers if isinstance(x.mlp, GatedMLP)]
        is_alone = self._shard.tp.size == 1
        adapt = adapters.products
        unfused = unfused_mlps(chooser, dense, adapt, is_alone) if dense else []
        mlps: dict[Mlp, FusedMlp] = dict(zip(dense, unfused, strict=True))
        for mixture in (x.mlp for x in self._decoder_layers if isinstance(x.mlp, MixtureOfExperts)):
            products = adapters.mixture(mixture, not is_alone)
            if products is not None:
                mlps[mixture] = FusedMixture(products)
        made = []
        for layer, module in zip(self._layers, self._decoder_layers, strict=True):
            attention = module.self_attn
            assert isinstance(attention, GroupedQueryAttention)
            mlp = mlps.get(module.mlp, layer.mlp)
            qkv, o = adapt(attention.qkv_proj, layer.qkv), adapt(attention.o_proj, layer.o)
            made.append(replace(layer, qkv=qkv, o=o, mlp=mlp))
        return made

    def _attentions(self) -> list[GroupedQueryAttention]:
        attentions = [x.self_attn for x in self._decoder_layers]
        return [one for one in attentions if isinstance(one, GroupedQueryAttention)]

    def _with_bias(self, gemm: LinearProducts, bias: torch.Tensor | None) -> PartialProducts:
        """A bias is one of the sum over ranks: the first rank adds it."""
        return gemm if bias is None or self._shard.tp.rank else BiasedProducts(gemm, bias)

    @torch.inference_mode()
    def product_seconds(self, num_tokens: Sequence[int]) -> tuple[float, ...]:
        layer, embedding = self._layers[0], self.model.embed_tokens.weight
        if not all(one.products for one in self._layers):
            return ()
        widths = {matrix: matrix.in_features for matrix in layer.products}
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
