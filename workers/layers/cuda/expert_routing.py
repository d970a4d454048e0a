"""Which experts a step's tokens go to, and the blocks of rows that share one.

choose scores every token; group sorts (token, expert) pairs by expert without sorting: a pair's
rank among those of its expert comes from an atomic counter, so that the order within an expert may
differ from run to run, which no row's product depends on. Knows no weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from workers.layers.cuda.launch import begin_dependent, dependent_launch, next_power_of_2

_PAIRS_PER_PROGRAM = 64
_COUNTERS_AT_A_TIME = 1024


@dataclass(frozen=True, slots=True)
class Chosen:
    """Experts of n tokens, k each. weights: float32 (n, k), ids: int32 (n, k). ranks: int32 (n, k),
    a pair's place among those of its expert; counts: int32 (num_experts,), pairs of each."""

    weights: torch.Tensor
    ids: torch.Tensor
    ranks: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True, slots=True)
class ExpertPlaces:
    """Where a rank has the experts that may be chosen. places: int64 (num_routed + num_shared,),
    below num_kept, or num_kept itself for those of other ranks."""

    places: torch.Tensor
    num_kept: int


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """Pairs by expert, in blocks of at most block_rows pairs of one expert each.

    pairs: int32 (n * k,), token * k + choice. blocks: int32 (3, max_blocks): expert, first place in
    pairs, number of pairs. num_blocks: int32 (1,), how many of them mean something. num_placed:
    int32 (1,), pairs that they have, the first ones: what lies behind them means nothing, and need
    be no pair. counters: int32 (max_blocks * counters a block,), zeros, for one kernel behind.
    """

    pairs: torch.Tensor
    blocks: torch.Tensor
    num_blocks: torch.Tensor
    num_placed: torch.Tensor
    block_rows: int
    counters: torch.Tensor

    @property
    def max_blocks(self) -> int:
        return self.blocks.shape[1]


def _choose(  # noqa: PLR0913
    logits: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    ids: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    num_tokens: tl.tensor,
    factor: tl.tensor,
    NUM_ROUTED: tl.constexpr,  # noqa: N803
    NUM_SHARED: tl.constexpr,  # noqa: N803
    NUM_CHOSEN: tl.constexpr,  # noqa: N803
    IS_NORMED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
    LANES: tl.constexpr,  # noqa: N803
    NUM_KEPT: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """One token a program. NUM_KEPT: 0 where ids are the experts', not places. Pairs of other ranks
    are not counted: they have no block, so that whatever lies at their rank is read by nobody."""
    begin_dependent(IS_DEPENDENT)
    token = tl.program_id(0)
    experts = tl.arange(0, BLOCK)
    row = logits + token.to(tl.int64) * NUM_ROUTED + experts
    scores = tl.load(row, mask=experts < NUM_ROUTED, other=float("-inf"))
    odds = tl.exp(scores - tl.max(scores, axis=0))
    odds = odds / tl.sum(odds, axis=0)
    at = token * (NUM_CHOSEN + NUM_SHARED)
    lanes = tl.arange(0, LANES)
    kept = tl.zeros((LANES,), dtype=tl.float32)
    for choice in tl.static_range(NUM_CHOSEN):
        # Of scores that are no numbers any lane may be the largest: no expert is beyond the last.
        expert = tl.minimum(tl.argmax(odds, axis=0), NUM_ROUTED - 1)
        if IS_NORMED:
            kept = tl.where(lanes == choice, tl.max(odds, axis=0), kept)
        else:
            tl.store(weights + at + choice, tl.max(odds, axis=0) * factor)
        if NUM_KEPT > 0:
            place = tl.load(places + expert).to(tl.int32)
            is_here = place < NUM_KEPT
            tl.store(ids + at + choice, place)
            rank = tl.atomic_add(counts + place, 1, mask=is_here)
            tl.store(ranks + at + choice, tl.where(is_here, rank, 0))
        else:
            tl.store(ids + at + choice, expert)
            tl.store(ranks + at + choice, tl.atomic_add(counts + expert, 1))
        odds = tl.where(experts == expert, -1.0, odds)
    if IS_NORMED:
        kept = kept / tl.sum(kept, axis=0) * factor
        tl.store(weights + at + lanes, kept, mask=lanes < NUM_CHOSEN)
    for shared in tl.static_range(NUM_SHARED):
        tl.store(weights + at + NUM_CHOSEN + shared, 1.0)
        piece = NUM_ROUTED + shared
        is_here = True
        if NUM_KEPT > 0:
            piece = tl.load(places + piece).to(tl.int32)
            is_here = piece < NUM_KEPT
        tl.store(ids + at + NUM_CHOSEN + shared, piece)
        tl.store(ranks + at + NUM_CHOSEN + shared, tl.where(is_here, token, 0))
        tl.store(counts + piece, num_tokens, mask=is_here & (token == 0))


# Numbers that differ from step to step make no kernels of their own.
_choose_kernel = triton.jit(_choose, do_not_specialize=["num_tokens"])


def choose_by_softmax(
    logits: torch.Tensor,
    num_chosen: int,
    num_shared: int,
    factor: float,
    is_normed: bool = False,
    here: ExpertPlaces | None = None,
) -> Chosen:
    """logits: float32 (n, num_routed), contiguous. The likeliest num_chosen of each token, the
    lowest id among equals, weighted by factor times their probability, is_normed: as a share of
    their sum; after them num_shared experts that every token goes to with weight 1. here: ids are
    its places, of which the one behind the last kept is counted as 0 pairs."""
    num_tokens, num_routed = logits.shape
    width = num_chosen + num_shared
    weights = torch.empty((num_tokens, width), dtype=torch.float32, device=logits.device)
    ids, ranks = torch.empty((2, num_tokens, width), dtype=torch.int32, device=logits.device)
    num_counted = num_routed + num_shared if here is None else here.num_kept + 1
    counts = torch.zeros(num_counted, dtype=torch.int32, device=logits.device)
    is_dependent = dependent_launch(logits)
    _choose_kernel[(num_tokens,)](
        logits,
        counts if here is None else here.places,
        weights,
        ids,
        ranks,
        counts,
        num_tokens,
        factor,
        NUM_ROUTED=num_routed,
        NUM_SHARED=num_shared,
        NUM_CHOSEN=num_chosen,
        IS_NORMED=is_normed,
        BLOCK=next_power_of_2(num_routed),
        LANES=next_power_of_2(num_chosen),
        NUM_KEPT=0 if here is None else here.num_kept,
        IS_DEPENDENT=is_dependent,
        num_warps=1,
        launch_pdl=is_dependent,
    )
    return Chosen(weights, ids, ranks, counts)


def _count(
    ids: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    num_pairs: tl.tensor,
    PAIRS: tl.constexpr,  # noqa: N803
) -> None:
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_real = pair < num_pairs
    expert = tl.load(ids + pair, mask=is_real, other=0)
    tl.store(ranks + pair, tl.atomic_add(counts + expert, 1, mask=is_real), mask=is_real)


_count_kernel = triton.jit(_count, do_not_specialize=["num_pairs"])


def counted(weights: torch.Tensor, ids: torch.Tensor, num_experts: int) -> Chosen:
    """What somebody else chose: weights float32, ids int32 (n, k), both contiguous."""
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    ranks = torch.empty_like(ids)
    num_pairs = ids.numel()
    grid = (triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM),)
    _count_kernel[grid](ids, ranks, counts, num_pairs, PAIRS=_PAIRS_PER_PROGRAM, num_warps=2)
    return Chosen(weights, ids, ranks, counts)


def _run_write_blocks(
    count: tl.tensor,
    first: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    max_blocks: tl.tensor,
    NUM_HERE: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
) -> None:
    """As ExpertBlocks has them, num_placed behind num_blocks. count, first: pairs of each expert
    and those before; experts from NUM_HERE on have no blocks."""
    experts = tl.arange(0, EXPERTS)
    own_blocks = tl.where(experts < NUM_HERE, (count + ROWS - 1) // ROWS, 0)
    block = tl.cumsum(own_blocks, axis=0) - own_blocks
    tl.store(num_blocks, tl.sum(own_blocks, axis=0))
    tl.store(num_blocks + 1, tl.sum(tl.where(experts < NUM_HERE, count, 0), axis=0))
    for turn in range(tl.max(own_blocks, axis=0)):
        is_there = turn < own_blocks
        at = blocks + block + turn
        tl.store(at, experts, mask=is_there)
        tl.store(at + max_blocks, first + turn * ROWS, mask=is_there)
        rows = tl.minimum(count - turn * ROWS, ROWS)
        tl.store(at + 2 * max_blocks, rows, mask=is_there)


write_blocks = triton.jit(_run_write_blocks)


def _group(  # noqa: PLR0913
    ids: tl.tensor,
    ranks: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    blocks: tl.tensor,
    num_blocks: tl.tensor,
    num_pairs: tl.tensor,
    max_blocks: tl.tensor,
    num_counters: tl.tensor,
    NUM_EXPERTS: tl.constexpr,  # noqa: N803
    NUM_ELSEWHERE: tl.constexpr,  # noqa: N803
    EXPERTS: tl.constexpr,  # noqa: N803
    PAIRS: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COUNTERS: tl.constexpr,  # noqa: N803
    IS_DEPENDENT: tl.constexpr,  # noqa: N803
) -> None:
    """PAIRS pairs a program; the first one writes the blocks too, and zeros, COUNTERS at a time,
    behind num_blocks and num_placed."""
    begin_dependent(IS_DEPENDENT)
    experts = tl.arange(0, EXPERTS)
    count = tl.load(counts + experts, mask=experts < NUM_EXPERTS, other=0)
    first = tl.cumsum(count, axis=0) - count
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_real = pair < num_pairs
    expert = tl.load(ids + pair, mask=is_real, other=0)
    is_own = expert[:, None] == experts[None, :]
    place = tl.sum(tl.where(is_own, first[None, :], 0), axis=1)
    place += tl.load(ranks + pair, mask=is_real, other=0)
    tl.store(pairs + place, pair, mask=is_real)
    if tl.program_id(0) == 0:
        NUM_HERE: tl.constexpr = NUM_EXPERTS - NUM_ELSEWHERE  # noqa: N806
        write_blocks(count, first, blocks, num_blocks, max_blocks, NUM_HERE, EXPERTS, ROWS)
        if COUNTERS > 0:
            for start in range(0, num_counters, COUNTERS):
                counter = start + tl.arange(0, COUNTERS)
                tl.store(num_blocks + 2 + counter, 0, mask=counter < num_counters)


_group_kernel = triton.jit(_group, do_not_specialize=["num_pairs", "max_blocks", "num_counters"])


def max_blocks_of(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """How many blocks any choice may need."""
    return min(num_pairs, num_pairs // block_rows + num_experts)


def pairs_here(chosen: Chosen, num_parts: int) -> int:
    """How many pairs are of a rank's experts, on average, where num_parts share them out."""
    return -(-chosen.ids.numel() // num_parts)


def group(
    chosen: Chosen, block_rows: int, num_elsewhere: int = 0, counters_a_block: int = 0
) -> ExpertBlocks:
    """The pairs by expert. num_elsewhere: the last so many experts have no blocks: other ranks
    have them. Counters are zeroed in every step: whatever a step that failed has left in them."""
    ids, num_experts = chosen.ids, chosen.counts.shape[0]
    num_pairs, device = ids.numel(), ids.device
    max_blocks = max_blocks_of(num_pairs, num_experts, block_rows)
    pairs = torch.empty(num_pairs, dtype=torch.int32, device=device)
    blocks = torch.empty((3, max_blocks), dtype=torch.int32, device=device)
    num_counters = max_blocks * counters_a_block
    sizes = torch.empty(2 + num_counters, dtype=torch.int32, device=device)
    is_dependent = dependent_launch(ids)
    _group_kernel[(triton.cdiv(num_pairs, _PAIRS_PER_PROGRAM),)](
        ids,
        chosen.ranks,
        chosen.counts,
        pairs,
        blocks,
        sizes,
        num_pairs,
        max_blocks,
        num_counters,
        NUM_EXPERTS=num_experts,
        NUM_ELSEWHERE=num_elsewhere,
        EXPERTS=next_power_of_2(num_experts),
        PAIRS=_PAIRS_PER_PROGRAM,
        ROWS=block_rows,
        COUNTERS=_COUNTERS_AT_A_TIME if num_counters > 0 else 0,
        IS_DEPENDENT=is_dependent,
        num_warps=4,
        launch_pdl=is_dependent,
    )
    return ExpertBlocks(pairs, blocks, sizes[:1], sizes[1:2], block_rows, sizes[2:])
