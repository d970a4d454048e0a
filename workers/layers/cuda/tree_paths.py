"""Who stands before whom in a step's trees: a launch for each question, a program for each row."""

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import next_power_of_2
from workers.speculation.step_trees import LinedUp, StepTrees

_ROWS_A_PROGRAM = 128


def _hold_path(  # noqa: PLR0913
    sampled: tl.tensor,
    ids: tl.tensor,
    parents: tl.tensor,
    starts: tl.tensor,
    cache_indices: tl.tensor,
    run_lens: tl.tensor,
    sources: tl.tensor,
    samples: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """From the root on, the draft that is what was drawn behind the token before it."""
    row, tokens = tl.program_id(0), tl.arange(0, BLOCK)
    first = tl.load(starts + row)
    is_token = tokens < tl.load(starts + row + 1) - first
    own = first + tokens
    drawn = tl.load(sampled + own, mask=is_token, other=0).to(tl.int64)
    token_ids = tl.load(ids + own, mask=is_token, other=0)
    before = (tl.load(parents + own, mask=is_token, other=0) - first).to(tl.int32)
    places = tl.load(cache_indices + own, mask=is_token, other=0)
    source, line = places, drawn
    node = tl.zeros((), tl.int32)
    run_len = tl.zeros((), tl.int32)
    while node < BLOCK:
        is_node = tokens == node
        sample = tl.sum(tl.where(is_node, drawn, 0), 0)
        place = tl.sum(tl.where(is_node, places, 0), 0)
        is_next = tokens == run_len
        source, line = tl.where(is_next, place, source), tl.where(is_next, sample, line)
        run_len += 1
        # A root stands behind itself, every other token behind one before it.
        is_right = is_token & (before == node) & (tokens > node) & (token_ids == sample)
        node = tl.min(tl.where(is_right, tokens, BLOCK), 0)
    tl.store(run_lens + row, run_len.to(tl.int64))
    tl.store(sources + own, source, mask=is_token)
    tl.store(samples + own, line, mask=is_token)


_hold_path_kernel = triton.jit(
    _hold_path, do_not_specialize_on_alignment=("sampled", "ids", "parents", "starts")
)


def hold_paths(
    trees: StepTrees, sampled: torch.Tensor, ids: torch.Tensor, cache_indices: torch.Tensor
) -> LinedUp:
    """workers.speculation.tree_kernels.HoldPaths. sampled: int32 or int64."""
    num_rows = len(trees.num_new)
    run_lens = torch.empty(num_rows, dtype=torch.int64, device=ids.device)
    sources, samples = torch.empty((2, len(ids)), dtype=torch.int64, device=ids.device)
    _hold_path_kernel[(num_rows,)](
        sampled,
        ids,
        trees.parents,
        trees.starts,
        cache_indices,
        run_lens,
        sources,
        samples,
        BLOCK=next_power_of_2(int(trees.num_new.max())),
        num_warps=1,
    )
    return LinedUp(run_lens, sources, samples)


def _mark_ancestors(
    parents: tl.tensor,
    cells: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """Upwards from all tokens of the row at once, until all are at their roots."""
    first, tokens = tl.program_id(0) * num_tokens, tl.arange(0, BLOCK)
    is_token, above = tokens < num_tokens, tokens
    sees = (tokens[:, None] == tokens[None, :]).to(tl.uint8)
    is_under_way = tl.full((), 1, tl.int32)
    while is_under_way > 0:
        parent = tl.load(parents + first + above, mask=is_token, other=0).to(tl.int32) - first
        parent = tl.where(is_token, parent, tokens)
        is_under_way = tl.max((parent != above).to(tl.int32), 0)
        above = parent
        sees = tl.where(above[:, None] == tokens[None, :], 1, sees).to(tl.uint8)
    at = (first + tokens)[:, None] * num_tokens + tokens[None, :]
    tl.store(cells + at, sees, mask=is_token[:, None] & is_token[None, :])


_mark_ancestors_kernel = triton.jit(_mark_ancestors, do_not_specialize=("num_tokens",))


def mark_ancestors(parents: torch.Tensor, num_tokens: int, cells: torch.Tensor) -> None:
    """As workers.graphs.decode_step.DecodeStepKernels has it."""
    _mark_ancestors_kernel[(len(parents) // num_tokens,)](
        parents,
        cells.view(torch.uint8),
        num_tokens,
        BLOCK=next_power_of_2(num_tokens),
        num_warps=1 if num_tokens <= 16 else 4,
    )


def _find_before(  # noqa: PLR0913
    positions: tl.tensor,
    places: tl.tensor,
    slots: tl.tensor,
    parents: tl.tensor,
    cache_indices: tl.tensor,
    table: tl.tensor,
    positions_before: tl.tensor,
    indices_before: tl.tensor,
    table_stride: tl.tensor,
    num_tokens: tl.tensor,
    BLOCK: tl.constexpr,  # noqa: N803
) -> None:
    """A block of tokens a program."""
    own = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_token = own < num_tokens
    position = tl.load(positions + own, mask=is_token, other=1)
    tl.store(positions_before + own, tl.maximum(position - 1, 0), mask=is_token)
    parent = tl.load(parents + own, mask=is_token, other=0)
    place = tl.maximum(tl.load(places + own, mask=is_token, other=1) - 1, 0)
    slot = tl.load(slots + own, mask=is_token, other=0)
    of_slot = tl.load(table + slot * table_stride + place, mask=is_token, other=0).to(tl.int64)
    of_parent = tl.load(cache_indices + parent, mask=is_token, other=0)
    tl.store(indices_before + own, tl.where(parent == own, of_slot, of_parent), mask=is_token)


_find_before_kernel = triton.jit(
    _find_before,
    do_not_specialize=("num_tokens",),
    do_not_specialize_on_alignment=("positions", "places", "slots", "parents", "cache_indices"),
)


def find_before(
    trees: StepTrees,
    positions: torch.Tensor,
    places: torch.Tensor,
    slots: torch.Tensor,
    cache_indices: torch.Tensor,
    table: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """workers.speculation.tree_kernels.FindBefore."""
    num_tokens = len(positions)
    before, indices = torch.empty((2, num_tokens), dtype=torch.int64, device=table.device)
    _find_before_kernel[(triton.cdiv(num_tokens, _ROWS_A_PROGRAM),)](
        positions,
        places,
        slots,
        trees.parents,
        cache_indices,
        table,
        before,
        indices,
        table.stride(0),
        num_tokens,
        BLOCK=_ROWS_A_PROGRAM,
        num_warps=4,
    )
    return before, indices
