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
from typing import NamedTuple

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
    gate_rows,
    place_rows,
    sum_rows,
)
from workers.layers.quantised.fp8_rounding import Rounded

_BLOCK_ROWS = 128
_LAYOUT_WORDS = 5
"""Of 32 bits, of an expert's layout of scales."""
_WORKSPACE_BYTES = 1 << 17
"""Tensor maps that multiprocessors write anew for each expert: fewer than 7 of 128 bytes each."""

GroupedMM = Callable[..., None]
"""fp8_blockwise_scaled_grouped_mm(output, 5 buffers of pointers, a, b, scales of both, strides of
a, b and output, layouts of both scales, problem sizes, first rows, workspace)."""


def _describe(  # noqa: PLR0913
    counts: tl.tensor,
    first_rows: tl.tensor,
    sizes: tl.tensor,
    strides: tl.tensor,
    WIDTH: tl.constexpr,  # noqa: N803
    HIDDEN_SIZE: tl.constexpr,  # noqa: N803
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One program; EXPERTS has a lane more than there are experts."""
    begin_dependent(IS_DEPENDENT)
    experts = tl.arange(0, EXPERTS)
    is_expert = experts < NUM_EXPERTS
    count = tl.load(counts + experts, mask=is_expert, other=0)
    # The lane behind the last expert counts nothing: it has the sum.
    first = tl.cumsum(count, axis=0) - count
    tl.store(first_rows + experts, first, mask=experts <= NUM_EXPERTS)
    for product in tl.static_range(2):
        num_rows = 2 * WIDTH if product == 0 else HIDDEN_SIZE
        num_columns = HIDDEN_SIZE if product == 0 else WIDTH
        at = sizes + (product * NUM_EXPERTS + experts) * 3
        tl.store(at, count, mask=is_expert)
        tl.store(at + 1, num_rows, mask=is_expert)
        tl.store(at + 2, num_columns, mask=is_expert)
        stride_at = strides + 2 * product * NUM_EXPERTS + experts
        tl.store(stride_at, num_columns, mask=is_expert)
        tl.store(stride_at + NUM_EXPERTS, num_rows, mask=is_expert)


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
        first_rows, one, two = _described(chosen.counts, down)
        rows, _ = place_rows(hidden, chosen, _BLOCK_ROWS, down.num_matrices, by_row=True)
        both = _multiplied(multiply, rows, gate_up, first_rows, one, hidden.dtype)
        activated = gate_rows(both, first_rows, experts.gating)
        products = _multiplied(multiply, activated, down, first_rows, two, hidden.dtype)
        return sum_rows(products, chosen, first_rows).unsqueeze(0)


class _Problems(NamedTuple):
    """A product of each expert. sizes: int32 (experts, 3), its rows, output and input columns;
    depths, widths: int64 (experts,), elements from row to row of the input and of the output."""

    sizes: torch.Tensor
    depths: torch.Tensor
    widths: torch.Tensor


def _multiplied(
    multiply: GroupedMM,
    rows: Rounded,
    stack: Fp8Stack,
    first_rows: torch.Tensor,
    problems: _Problems,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Each expert's rows times its matrix, (rows, stack.rows); what lies behind the experts' rows
    is not written."""
    num, device = stack.num_matrices, first_rows.device
    out = torch.empty((rows.values.shape[0], stack.rows), dtype=dtype, device=device)
    pointers = torch.empty((5, num), dtype=torch.int64, device=device)
    layouts = torch.empty((2, num, _LAYOUT_WORDS), dtype=torch.int32, device=device)
    workspace = torch.empty(_WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    multiply(
        out,
        *pointers,
        rows.values,
        stack.values.transpose(1, 2),
        rows.scales,
        stack.scales.transpose(1, 2),
        problems.depths,
        problems.depths,
        problems.widths,
        *layouts,
        problems.sizes,
        first_rows[:num],
        workspace,
    )
    return out


def _described(counts: torch.Tensor, down: Fp8Stack) -> tuple[torch.Tensor, _Problems, _Problems]:
    """int32 (experts + 1,), where each expert's rows begin and where the last one's end; and both
    products."""
    num, device = down.num_matrices, counts.device
    first_rows = torch.empty(num + 1, dtype=torch.int32, device=device)
    sizes = torch.empty((2, num, 3), dtype=torch.int32, device=device)
    strides = torch.empty((2, 2, num), dtype=torch.int64, device=device)
    is_dependent = dependent_launch(counts)
    _describe_kernel[(1,)](
        counts,
        first_rows,
        sizes,
        strides,
        WIDTH=down.columns,
        HIDDEN_SIZE=down.rows,
        NUM_EXPERTS=num,
        EXPERTS=next_power_of_2(num + 1),
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    one, two = (_Problems(sizes[i], strides[i, 0], strides[i, 1]) for i in range(2))
    return first_rows, one, two


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
