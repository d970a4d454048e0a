"""How the Triton kernels of this folder are launched: programmatic dependent launch where it works.

A kernel launched that way may start while its predecessor still runs. Every kernel here keeps two
rules that make it safe: it waits for its predecessor before it reads anything but weights or writes
anything at all, and it waits even if it needs nothing, so that completion stays transitive.
Source of the mechanism: CUDA programming guide, "Programmatic Dependent Launch", sm90 and newer.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_FIRST_MAJOR = 9


@cache
def _has_dependent_launch(device_index: int) -> bool:
    major, _ = torch.cuda.get_device_capability(device_index)
    return major >= _FIRST_MAJOR


def dependent_launch(tensor: torch.Tensor) -> bool:
    """Whether kernels on the tensor's device are launched as programmatic dependents."""
    return tensor.is_cuda and _has_dependent_launch(tensor.get_device())


def next_power_of_2(value: int) -> int:
    return 1 << max(0, value - 1).bit_length()


def _run_begin_dependent(IS_DEPENDENT: tl.constexpr) -> None:  # noqa: N803
    """Let the successor start, then wait for the predecessor's results."""
    if IS_DEPENDENT:
        gdc_launch_dependents()
        gdc_wait()


begin_dependent = triton.jit(_run_begin_dependent)


def _run_prefetch_lines(addresses: tl.tensor) -> None:
    """Ask for the 128-byte lines at int64 addresses to come to L2; waits for nothing."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


prefetch_lines = triton.jit(_run_prefetch_lines)


def _run_prefetch_chunks(addresses: tl.tensor, NUM_BYTES: tl.constexpr) -> None:  # noqa: N803
    """Ask the copy engine for NUM_BYTES from each int64 address to come to L2; waits for nothing.

    One instruction a thread, if there are as many addresses as threads. Needs sm90.
    """
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;",
        "=r,l,r",
        [addresses, tl.full(addresses.shape, NUM_BYTES, dtype=tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


prefetch_chunks = triton.jit(_run_prefetch_chunks)
