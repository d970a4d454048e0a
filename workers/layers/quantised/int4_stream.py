"""Packed four-bit weights times one row of x by programs that stay, on sm90 by Gluon.

Launches int4_stream_kernel.py, which multiplies as int4_mma.py does. Knows no layer.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from workers.layers.cuda.launch import dependent_launch
from workers.layers.gate import Gate
from workers.layers.kept.int4 import Int4Groups
from workers.layers.new_tensor import NewTensor
from workers.layers.quantised.gemv import new_output
from workers.layers.quantised.int4_mma import ALIGNMENT_BYTES
from workers.layers.quantised.int4_stream_shape import StreamShape
from workers.layers.quantised.skinny_shape import StreamedShape

_FEWEST_STAGES = 2
_TILE_ROWS = 16
_GROUP_ROWS = 8
"""Rows of a tile are twice as many: neighbours, or gates and their up projections."""


def stream_shape(
    kept: Int4Groups, shape: StreamedShape, is_gated: bool, num_programs: int
) -> StreamShape:
    """Raises ValueError of weights that have no whole block of rows, or no whole tiles, of blocks
    that are no whole tiles, and of a ring without room for a step beside the one multiplied."""
    if shape.num_stages < _FEWEST_STAGES or shape.block_rows % _TILE_ROWS or not shape.block_rows:
        raise ValueError(
            f"a ring of {shape.num_stages} steps of {shape.block_rows} rows: "
            f"{_FEWEST_STAGES} steps or more of a multiple of {_TILE_ROWS} are asked for"
        )
    warps = shape.block_k // kept.turn
    steps = kept.in_features // shape.block_k
    tiles = shape.block_rows // _TILE_ROWS
    tile_step = _GROUP_ROWS if is_gated else _TILE_ROWS
    limit = kept.out_features // 2 if is_gated else kept.out_features
    if limit % _GROUP_ROWS or limit < tiles * tile_step:
        raise ValueError(f"{limit} output features are no whole tiles of {tile_step}")
    blocks = -(-limit // (tiles * tile_step))
    most_steps = -(-blocks // num_programs) * steps
    return StreamShape(
        rows=kept.out_features,
        columns=kept.in_features,
        turn=kept.turn,
        halves=kept.group_size // (kept.turn // 2),
        warps=warps,
        steps=steps,
        tiles=tiles,
        tile_step=tile_step,
        further=limit if is_gated else _GROUP_ROWS,
        limit=limit,
        blocks=blocks,
        stages=min(shape.num_stages, most_steps + 1),
        early=shape.early_steps,
    )


def int4_stream(
    x: torch.Tensor,
    kept: Int4Groups,
    shape: StreamedShape,
    new: NewTensor = torch.empty,
    gate: Gate | None = None,
) -> torch.Tensor:
    """As int4_mma, of one split. Raises ValueError as new_output and stream_shape do, and for
    tensors that do not begin at a multiple of 16 bytes."""
    weight = kept.words, kept.zeros, kept.scales
    if any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in (x, *weight)):
        raise ValueError("x and weights have to begin where 16 bytes are copied at once")
    out = new_output(x, kept.out_features, shape, gate, new)
    properties = torch.cuda.get_device_properties(x.device)
    num_programs = shape.programs * properties.multi_processor_count
    compiled_for = stream_shape(kept, shape, gate is not None, num_programs)
    is_dependent = dependent_launch(x)
    _kernel()[(num_programs,)](
        x,
        *weight,
        out,
        shape=compiled_for,
        IS_GELU=gate == "gelu_tanh",
        IS_DEPENDENT=is_dependent,
        num_warps=compiled_for.warps,
        maxnreg=shape.max_registers,
        launch_pdl=is_dependent,
    )
    return out


def _kernel() -> Any:
    """Not imported before it is asked for: another Triton may have no such Gluon."""
    return importlib.import_module("workers.layers.quantised.int4_stream_kernel").int4_stream_kernel
