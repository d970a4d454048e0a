"""How many processes of tests share the GPUs of a machine. Knows no torch."""

from dataclasses import dataclass

GIB = 1 << 30
CONTEXT_BYTES = GIB
"""Of one process, beside what torch allocates: CUDA's context and the kernels' code."""
HUNGRIEST_BYTES = 8 * GIB
"""What a process that keeps the engines of a module needs, its context included. Few do at a time:
tests of a module go to few processes."""
USUAL_BYTES = 9 * GIB // 2
"""What any other process is granted; most take 1 GiB."""
FREE_SHARE = 0.95


@dataclass(frozen=True, slots=True)
class Shares:
    """num_processes of tests at once; torch may use memory_share of the device's memory in each."""

    num_processes: int
    memory_share: float


def shares_of(free_bytes, total_bytes, num_cores, num_processes=None):
    """Shares of one GPU. num_processes: None takes as many as memory and cores allow.

    What processes may use adds up to more than there is, what they do use does not. Raises
    ValueError if they would have less than they need.
    """
    usable = int(free_bytes * FREE_SHARE)
    most = usable // USUAL_BYTES if usable >= HUNGRIEST_BYTES else 0
    wanted = min(most, num_cores) if num_processes is None else num_processes
    if not 1 <= wanted <= most:
        raise ValueError(
            f"{wanted} processes in {usable / GIB:.1f} GiB, of {USUAL_BYTES / GIB:.1f} GiB each "
            f"and {HUNGRIEST_BYTES // GIB} GiB at most: from 1 to {most} can run"
        )
    share_bytes = max(HUNGRIEST_BYTES, usable // wanted) - CONTEXT_BYTES
    return Shares(wanted, share_bytes / total_bytes)
