"""What a step must cost: its weights and its KV cache read once, its products computed once.

From a model's config alone; weights that a step does not need, such as a mixture's other experts,
are counted as if it did. Knows no engine.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from attention.config import AttentionConfig, LayerAttentionConfig
from attention.roofline import AttentionCost, HardwareLimits, attention_step_cost

Lengths = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepShape:
    """Rows of a step. seq_lens (bs,): keys of each row, new ones included. extend_seq_lens (bs,):
    new tokens. Every row gets a next token."""

    seq_lens: Lengths
    extend_seq_lens: Lengths


@dataclass(frozen=True, slots=True)
class StepFloor:
    """Seconds that attention and the products with weights take at best, one after the other."""

    attention_s: float
    gemm_s: float

    @property
    def step_s(self) -> float:
        return self.attention_s + self.gemm_s


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Weights by how often a step uses them. body_weights: elements that every new token is
    multiplied with. head_weights: elements that every sampled row is multiplied with."""

    body_weights: int
    head_weights: int
    bytes_per_weight: int
    attention: AttentionConfig

    def gemm_cost(self, shape: StepShape) -> AttentionCost:
        """Bytes and operations of a step's products with weights."""
        num_tokens, num_rows = int(shape.extend_seq_lens.sum()), len(shape.seq_lens)
        weights = self.body_weights + self.head_weights
        flops = 2 * (self.body_weights * num_tokens + self.head_weights * num_rows)
        return AttentionCost(weights * self.bytes_per_weight, flops)

    def floor(self, shape: StepShape, limits: HardwareLimits) -> StepFloor:
        attention = attention_step_cost(self.attention, shape.seq_lens, shape.extend_seq_lens)
        gemm = self.gemm_cost(shape)
        return StepFloor(
            limits.minimum_seconds(attention.bytes_read, attention.flops),
            limits.minimum_seconds(gemm.bytes_read, gemm.flops),
        )


def model_cost(config: PreTrainedConfig, dtype: torch.dtype) -> ModelCost:
    """Counted on a model without memory: linear layers, the output one among them apart."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    head = model.get_output_embeddings()
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear) and m is not head]
    return ModelCost(
        body_weights=sum(module.weight.numel() for module in linear),
        head_weights=0 if head is None else head.weight.numel(),
        bytes_per_weight=dtype.itemsize,
        attention=_attention_config(config, dtype),
    )


def _attention_config(config: PreTrainedConfig, dtype: torch.dtype) -> AttentionConfig:
    """All layers over all keys: a window makes the floor too high, never too low."""
    text = config.get_text_config()
    query_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return AttentionConfig(
        num_layers=text.num_hidden_layers,
        tp_q_head_num=query_heads,
        tp_k_head_num=getattr(text, "num_key_value_heads", None) or query_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        max_context_len=text.max_position_embeddings,
        page_size=1,
        dtype=dtype,
        kv_dtype=dtype,
        device=torch.device("meta"),
        layers=(LayerAttentionConfig(),) * text.num_hidden_layers,
    )
