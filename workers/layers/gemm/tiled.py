"""Triton GEMMs for some hundreds of tokens: tiles by tensor maps, programs that stay.

Each program takes tile after tile, so that the loads of the next overlap the stores of the last.
The tokens' blocks of one block of weights are neighbours in that order: the weights come from
memory once. Like skinny.py it asks for its first weights before it waits for its predecessor.
Knows no layer and makes no choice.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from workers.layers.cuda.launch import begin_dependent, dependent_launch
from workers.layers.gate import Gate
from workers.layers.gemm.configs import GemmConfig, tile_tokens
from workers.layers.gemm.skinny import activate, prefetch_row_lines
from workers.layers.new_tensor import NewTensor

_PREFETCH_BYTES = 1024


def _tiled(  # noqa: PLR0913
    x_map: tl.tensor,
    weight_map: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    k_per_split: tl.tensor,
    NUM_SPLITS: tl.constexpr,  # noqa: N803
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    token_blocks = tl.cdiv(num_tokens, BLOCK_TOKENS)
    num_tiles = tl.cdiv(out_features, BLOCK_ROWS) * token_blocks * NUM_SPLITS
    first = tl.program_id(0)
    if IS_DEPENDENT:
        early = first // token_blocks // NUM_SPLITS * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        early_rows = tl.minimum(early, out_features - 1).to(tl.int64)
        early_k = first // token_blocks % NUM_SPLITS * k_per_split
        prefetch_row_lines(weight, early_rows, early_k, in_features, PREFETCH_BYTES)
    begin_dependent(IS_DEPENDENT)
    for tile in tl.range(first, num_tiles, tl.num_programs(0), flatten=True):
        token = tile % token_blocks * BLOCK_TOKENS
        split = tile // token_blocks % NUM_SPLITS
        row = tile // token_blocks // NUM_SPLITS * BLOCK_ROWS
        first_k = split * k_per_split
        total = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
        for start in range(0, k_per_split, BLOCK_K):
            weights = weight_map.load([row, first_k + start])
            inputs = x_map.load([token, first_k + start])
            total = tl.dot(weights, inputs.T, total)
        tokens = token + tl.arange(0, BLOCK_TOKENS)
        rows = row + tl.arange(0, BLOCK_ROWS)
        target = out + (split * num_tokens + tokens[:, None]).to(tl.int64) * out_features
        is_real = (tokens[:, None] < num_tokens) & (rows[None, :] < out_features)
        tl.store(target + rows[None, :], tl.trans(total).to(out.dtype.element_ty), mask=is_real)


_tiled_kernel = triton.jit(_tiled, do_not_specialize=("num_tokens",))


def _gated_tiled(  # noqa: PLR0913
    x_map: tl.tensor,
    weight_map: tl.tensor,
    weight: tl.tensor,
    out: tl.tensor,
    num_tokens: tl.tensor,
    width: tl.tensor,
    in_features: tl.tensor,
    BLOCK_TOKENS: tl.constexpr,  # noqa: N803
    BLOCK_ROWS: tl.constexpr,  # noqa: N803
    BLOCK_K: tl.constexpr,  # noqa: N803
    PREFETCH_BYTES: tl.constexpr,  # noqa: N803
    IS_GELU: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """Rows [0, width) of weight are the gate's, the next width rows the up projection's."""
    token_blocks = tl.cdiv(num_tokens, BLOCK_TOKENS)
    num_tiles = tl.cdiv(width, BLOCK_ROWS) * token_blocks
    first = tl.program_id(0)
    if IS_DEPENDENT:
        early = first // token_blocks * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        early_rows = tl.minimum(early, width - 1).to(tl.int64)
        prefetch_row_lines(weight, early_rows, 0, in_features, PREFETCH_BYTES)
        prefetch_row_lines(weight, early_rows + width, 0, in_features, PREFETCH_BYTES)
    begin_dependent(IS_DEPENDENT)
    for tile in tl.range(first, num_tiles, tl.num_programs(0), flatten=True):
        token = tile % token_blocks * BLOCK_TOKENS
        row = tile // token_blocks * BLOCK_ROWS
        gate = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
        up = tl.zeros((BLOCK_ROWS, BLOCK_TOKENS), dtype=tl.float32)
        for start in range(0, in_features, BLOCK_K):
            inputs = x_map.load([token, start]).T
            gate = tl.dot(weight_map.load([row, start]), inputs, gate)
            up = tl.dot(weight_map.load([row + width, start]), inputs, up)
        tokens = token + tl.arange(0, BLOCK_TOKENS)
        rows = row + tl.arange(0, BLOCK_ROWS)
        result = activate(gate, up, IS_GELU, out.dtype.element_ty)
        is_real = (tokens[:, None] < num_tokens) & (rows[None, :] < width)
        target = out + tokens[:, None].to(tl.int64) * width + rows[None, :]
        tl.store(target, tl.trans(result), mask=is_real)


_gated_tiled_kernel = triton.jit(_gated_tiled, do_not_specialize=("num_tokens",))


def triton_tiled_gemm(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, new: NewTensor = torch.empty
) -> torch.Tensor:
    """x (n, in_features) @ weight (out_features, in_features).T -> (splits, n, out_features).

    As triton_gemm, for config.kind "tiled".
    """
    num_tokens, in_features = x.shape
    out_features = weight.shape[0]
    splits = config.num_splits
    out_dtype = x.dtype if splits == 1 else torch.float32
    out = new((splits, num_tokens, out_features), dtype=out_dtype, device=x.device)
    is_dependent = dependent_launch(x)
    tokens = tile_tokens(num_tokens)
    num_tiles = triton.cdiv(out_features, config.block_rows) * splits
    _tiled_kernel[(_num_programs(x, num_tiles * triton.cdiv(num_tokens, tokens)),)](
        TensorDescriptor.from_tensor(x, [tokens, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_rows, config.block_k]),
        weight,
        out,
        num_tokens,
        out_features,
        in_features,
        in_features // splits,
        NUM_SPLITS=splits,
        BLOCK_TOKENS=tokens,
        BLOCK_ROWS=config.block_rows,
        BLOCK_K=config.block_k,
        PREFETCH_BYTES=_PREFETCH_BYTES,
        IS_DEPENDENT=is_dependent,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        launch_pdl=is_dependent,
    )
    return out


def triton_gated_tiled_gemm(
    x: torch.Tensor, weight: torch.Tensor, config: GemmConfig, gate: Gate
) -> torch.Tensor:
    """gate(x @ gate.T) * (x @ up.T) -> (n, width), weight (2 * width, in_features) being both.

    As triton_gated_gemm, for config.kind "gated_tiled".
    """
    num_tokens, in_features = x.shape
    width = weight.shape[0] // 2
    out = torch.empty((num_tokens, width), dtype=x.dtype, device=x.device)
    is_dependent = dependent_launch(x)
    tokens = tile_tokens(num_tokens)
    num_tiles = triton.cdiv(width, config.block_rows) * triton.cdiv(num_tokens, tokens)
    _gated_tiled_kernel[(_num_programs(x, num_tiles),)](
        TensorDescriptor.from_tensor(x, [tokens, config.block_k]),
        TensorDescriptor.from_tensor(weight, [config.block_rows, config.block_k]),
        weight,
        out,
        num_tokens,
        width,
        in_features,
        BLOCK_TOKENS=tokens,
        BLOCK_ROWS=config.block_rows,
        BLOCK_K=config.block_k,
        PREFETCH_BYTES=_PREFETCH_BYTES,
        IS_GELU=gate == "gelu_tanh",
        IS_DEPENDENT=is_dependent,
        num_stages=config.num_stages,
        num_warps=config.num_warps,
        launch_pdl=is_dependent,
    )
    return out


@cache
def _num_multiprocessors(device_index: int) -> int:
    return int(torch.cuda.get_device_properties(device_index).multi_processor_count)


def _num_programs(x: torch.Tensor, num_tiles: int) -> int:
    return min(num_tiles, _num_multiprocessors(x.get_device()))
