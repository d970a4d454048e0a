"""The Llama family on NVIDIA GPUs: the parameters of LlamaForCausalLM, run by fused kernels.

A join is one kernel: the residual addition with the norm after it. Needs Triton.
"""

from dataclasses import dataclass
from functools import partial

import torch

from workers.layers.cuda.residual_stream import (
    Join,
    StreamWays,
    invariant_stream_ways,
    stream_ways,
)
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.norm import RMSNorm
from workers.models.cuda_decoder import DecoderWays, LayerJoins
from workers.models.cuda_stream import FusedStreamCausalLM
from workers.models.llama import LlamaDecoderLayer, LlamaForCausalLM


@dataclass(frozen=True, slots=True)
class _NormedJoin:
    """norm: of the next block."""

    join: Join
    norm: RMSNorm

    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return self.join(gemm, x, residual, self.norm)


def normed_joins(ways: StreamWays, mlp_norm: RMSNorm, next_norm: RMSNorm) -> LayerJoins:
    """Of a layer with a norm before its MLP, and of the norm before the next layer."""
    return LayerJoins(
        _NormedJoin(ways.after_attention, mlp_norm), _NormedJoin(ways.after_mlp, next_norm)
    )


class CudaLlamaForCausalLM(LlamaForCausalLM, FusedStreamCausalLM):
    """LlamaForCausalLM over fused kernels."""

    def decoder_ways(self) -> DecoderWays:
        make_ways = invariant_stream_ways if self._shard.is_deterministic else stream_ways
        ways = make_ways(self._shard.tp, self.model.embed_tokens)
        layers = [layer for layer in self._decoder_layers if isinstance(layer, LlamaDecoderLayer)]
        joins = [
            normed_joins(ways, layer.post_attention_layernorm, next_norm)
            for layer, next_norm in zip(layers, self._norms[1:], strict=True)
        ]
        return DecoderWays(partial(ways.begin, norm=self._norms[0]), joins, ways.select_rows)
