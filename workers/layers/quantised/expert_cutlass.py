"""Products with FP8 experts of many rows by sglang-kernel's CUTLASS kernel, one launch a product.

Its kernel takes tiles of 128 rows by 128 columns of all experts, from sm90 on; how many rows an
expert has is read on the GPU. What it is given follows sglang-kernel 0.4.3's
csrc/moe/fp8_blockwise_moe_kernel.cu: pointers and layouts of scales are written by itself into
buffers that it is handed.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.errors import ConfigError
from workers.layers.cuda.expert_routing import Chosen
from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2
from workers.layers.kept.experts import KeptExperts
from workers.layers.kept.stacks import Fp8Stack
from workers.layers.quantised.expert_fp8 import fp8_stack
from workers.layers.quantised.expert_rows import (
    ExpertSpans,
    gate_rows,
    place_rows,
    span_of,
    sum_rows,
)
from workers.layers.quantised.fp8_rounding import Rounded

_LAYOUT_WORDS = 5
"""Of 32 bits, of an expert's layout of scales."""
_WORKSPACE_BYTES = 1 << 17
"""Tensor maps that multiprocessors write anew for each expert: fewer than 7 of 128 bytes each."""

GroupedMM = Callable[..., None]
"""fp8_blockwise_scaled_grouped_mm(output, 5 buffers of pointers, a, b, scales of both, strides of
a, b and output, layouts of both scales, problem sizes, first rows, workspace)."""


def _describe(
    counts: tl.tensor,
    sizes: tl.tensor,
    strides: tl.tensor,
    num_rows: tl.tensor,
    num_columns: tl.tensor,
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One program. num_rows, num_columns: of an expert's matrix."""
    begin_dependent(IS_DEPENDENT)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < NUM_EXPERTS
    count = tl.load(counts + experts, mask=is_expert, other=0)
    tl.store(sizes + experts * 3, count, mask=is_expert)
    tl.store(sizes + experts * 3 + 1, num_rows, mask=is_expert)
    tl.store(sizes + experts * 3 + 2, num_columns, mask=is_expert)
    tl.store(strides + experts, num_columns, mask=is_expert)
    tl.store(strides + NUM_EXPERTS + experts, num_rows, mask=is_expert)


_describe_kernel = triton.jit(_describe)


@dataclass(frozen=True, slots=True)
class GroupedCutlass:
    """Of Fp8Stacks without biases, x in bfloat16 or float16."""

    def products(
        self, hidden: torch.Tensor, chosen: Chosen, experts: KeptExperts, num_parts: int
    ) -> torch.Tensor:
        """As ExpertWay.products, summed up: (1, n, hidden_size). num_parts is not asked: what is
        counted beyond the experts is left out. Raises ValueError of experts with biases and
        ConfigError where sglang-kernel is missing."""
        if experts.gate_up_bias is not None or experts.down_bias is not None:
            raise ValueError("products in FP8 add no bias")
        multiply = load_grouped_mm()
        gate_up, down = fp8_stack(experts.gate_up), fp8_stack(experts.down)
        spans = span_of(chosen.counts, down.num_matrices)
        rows = place_rows(hidden, chosen, spans, by_row=True)
        both = _multiplied(multiply, rows, gate_up, spans, chosen.counts, hidden.dtype)
        activated = gate_rows(both, spans, experts.gating)
        products = _multiplied(multiply, activated, down, spans, chosen.counts, hidden.dtype)
        return sum_rows(products, chosen, spans).unsqueeze(0)


def _multiplied(
    multiply: GroupedMM,
    rows: Rounded,
    stack: Fp8Stack,
    spans: ExpertSpans,
    counts: torch.Tensor,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each expert's rows times its matrix, (rows, stack.rows); what lies behind the experts' rows
    is not written."""
    num, device = spans.num_experts, counts.device
    out = torch.empty((rows.values.shape[0], stack.rows), dtype=dtype, device=device)
    pointers = torch.empty((5, num), dtype=torch.int64, device=device)
    layouts = torch.empty((2, num, _LAYOUT_WORDS), dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    sizes, (depths, widths) = _described(counts, stack)
    multiply(
        out,
        *pointers,
        rows.values,
        stack.values.transpose(1, 2),
        rows.scales,
        stack.scales.transpose(1, 2),
        depths,
        depths,
        widths,
        *layouts,
        sizes,
        spans.first_rows[:num],
        workspace,
    )
    return out


def _described(counts: torch.Tensor, stack: Fp8Stack) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each expert: int32 (experts, 3), its rows, output and input columns; int64 (2, experts),
    elements from row to row of the input and of the output."""
    num, device = stack.num_matrices, counts.device
    sizes = torch.empty((num, 3), dtype=torch.int32, device=device)
    strides = torch.empty((2, num), dtype=torch.int64, device=device)
    is_dependent = dependent_launch(counts)
    _describe_kernel[(1,)](
        counts,
        sizes,
        strides,
        stack.rows,
        stack.columns,
        NUM_EXPERTS=num,
        EXPERTS=next_power_of_2(num),
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return sizes, strides


def load_grouped_mm() -> GroupedMM:
    """sglang-kernel's. Raises ConfigError where it is missing or does not load."""
    try:
        multiply: GroupedMM = importlib.import_module("sgl_kernel").fp8_blockwise_scaled_grouped_mm
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise ConfigError(
            f"products of many rows with FP8 experts need sglang-kernel: {error}; pip install "
            "'tessera[cuda]', or set engine.quantized_products to dequantize"
        ) from error
    return multiply
