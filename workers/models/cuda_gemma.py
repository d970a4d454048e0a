"""Gemma 2 and 3 on NVIDIA GPUs: the parameters of GemmaForCausalLM, run by fused kernels.

A join is one kernel: the norm of a block's output, the residual addition and the norm before the
next block. Needs Triton.
"""

from dataclasses import dataclass

import torch

from workers.errors import ConfigError
from workers.layers.cuda.logit_cap import cap_logits_
from workers.layers.cuda.norm import rms_norm
from workers.layers.cuda.sandwich_norm import NormScale, add_sandwich_norm_
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.gemm.matrix import PartialProducts
from workers.layers.norm import RMSNorm
from workers.models.cuda_decoder import DecoderWays, LayerJoins
from workers.models.cuda_stream import FusedStreamCausalLM
from workers.models.gemma import GemmaDecoderLayer, GemmaForCausalLM
from workers.parallel.group import TPGroup


def _scale_of(norm: RMSNorm) -> NormScale:
    return NormScale(norm.scale, norm.eps)


@dataclass(frozen=True, slots=True)
class _Begin:
    embedding: VocabParallelEmbedding
    norm: NormScale

    def __call__(self, input_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual: torch.Tensor = self.embedding(input_ids)
        return residual, rms_norm(residual, self.norm.scale, self.norm.eps)


@dataclass(frozen=True, slots=True)
class _SandwichJoin:
    """after: norm of the block's output. before: of the next block."""

    tp: TPGroup
    after: NormScale
    before: NormScale

    def __call__(
        self, gemm: PartialProducts, x: torch.Tensor, residual: torch.Tensor
    ) -> torch.Tensor:
        return add_sandwich_norm_(self.tp.all_reduce(gemm(x)), residual, self.after, self.before)


def _chosen_rows(residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Of a stream that every rank keeps whole."""
    return residual.index_select(0, rows)


class CudaGemmaForCausalLM(GemmaForCausalLM, FusedStreamCausalLM):
    """GemmaForCausalLM over fused kernels. Ranks add their products up by collectives: the norm of
    a sum cannot begin before all of it is there."""

    def decoder_ways(self) -> DecoderWays:
        if self._shard.is_deterministic and self._shard.tp.size > 2:
            raise ConfigError(
                f"deterministic: collectives of {self._shard.tp.size} ranks add up in an order "
                "that depends on the step; set tp_size to 1 or 2, or leave deterministic out"
            )
        tp, norms = self._shard.tp, [_scale_of(norm) for norm in self._norms]
        layers = [layer for layer in self._decoder_layers if isinstance(layer, GemmaDecoderLayer)]
        joins = [
            LayerJoins(
                _SandwichJoin(
                    tp,
                    _scale_of(layer.post_attention_layernorm),
                    _scale_of(layer.pre_feedforward_layernorm),
                ),
                _SandwichJoin(tp, _scale_of(layer.post_feedforward_layernorm), next_norm),
            )
            for layer, next_norm in zip(layers, norms[1:], strict=True)
        ]
        return DecoderWays(_Begin(self.model.embed_tokens, norms[0]), joins, _chosen_rows)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return FusedStreamCausalLM.compute_logits(self, hidden)

    def local_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = super().local_logits(hidden)
        return logits if self._logit_cap is None else cap_logits_(logits, self._logit_cap)
