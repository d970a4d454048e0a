"""How programs of a kernel wait for the same programs on the other ranks, on the device.

Every program has one flag a rank in each rank's peer memory. It raises its own on all ranks and
waits until all have raised theirs here, which it then lowers again. Raising releases and seeing
acquires at system scope: what a rank's stream wrote before, all ranks can read after it.
A flag may be raised again only after another meeting, elsewhere, of the same ranks: whoever uses
this takes two places by turns. Programs are started in order, so that more of them than fit on the
device do no harm. Source of the memory order: PTX ISA, "Memory Consistency Model".
"""

import triton
import triton.language as tl

MAX_PROGRAMS = 264
"""Of one kernel: two on each multiprocessor of the largest Hopper GPUs."""
MAX_RANKS = 8
FLAG_BYTES = 4
FLAGS_BYTES = MAX_PROGRAMS * MAX_RANKS * FLAG_BYTES
"""Of one meeting place."""
TIMEOUT_NS = 300_000_000_000
"""A rank that waits longer for another one ends with an error of its device."""

_MEET = """
{
    .reg .pred is_absent;
    .reg .pred is_early;
    .reg .pred is_raised;
    .reg .b32 thread;
    .reg .b32 one;
    .reg .b32 seen;
    .reg .b64 begin;
    .reg .b64 now;
    mov.u32 thread, %tid.x;
    setp.ge.u32 is_absent, thread, $3;
    @is_absent bra met;
    mov.u32 one, 1;
    st.release.sys.global.u32 [$1], one;
    mov.u64 begin, %globaltimer;
wait:
    ld.acquire.sys.global.u32 seen, [$2];
    setp.eq.u32 is_raised, seen, 1;
    @is_raised bra lower;
    mov.u64 now, %globaltimer;
    sub.u64 now, now, begin;
    setp.lt.u64 is_early, now, $4;
    @is_early bra wait;
    trap;
lower:
    mov.u32 one, 0;
    st.relaxed.sys.global.u32 [$2], one;
met:
    mov.u32 $0, 0;
}
"""


def _run_meet(  # noqa: PLR0913
    bases: tl.tensor,
    own: tl.tensor,
    flags_offset: tl.tensor,
    timeout_ns: tl.tensor,
    RANK: tl.constexpr,  # noqa: N803
    NUM_RANKS: tl.constexpr,  # noqa: N803
    BLOCK_RANKS: tl.constexpr,  # noqa: N803
    ROW_BYTES: tl.constexpr,  # noqa: N803
    FLAG: tl.constexpr,  # noqa: N803
) -> None:
    """Return once this program of every rank has come here.

    bases: int64 (BLOCK_RANKS,), where peer memory of each rank begins; own: of this rank.
    """
    ranks = tl.arange(0, BLOCK_RANKS)
    row = flags_offset + tl.program_id(0).to(tl.int64) * ROW_BYTES
    theirs = bases + row + RANK * FLAG
    mine = own + row + ranks.to(tl.int64) * FLAG
    num_ranks = tl.full((BLOCK_RANKS,), NUM_RANKS, dtype=tl.int32)
    timeout = tl.zeros((BLOCK_RANKS,), dtype=tl.int64) + timeout_ns
    tl.inline_asm_elementwise(
        MEET,
        "=r,l,l,r,l",
        [theirs, mine, num_ranks, timeout],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
    tl.debug_barrier()


MEET = tl.constexpr(_MEET)
meet = triton.jit(_run_meet)
