"""What a kernel or an operator is for, by its name. Knows the names only.

Names: Tessera's own Triton kernels are called as their functions; FlashAttention's templates carry
"flash" or "fmha"; cuBLAS is nvjet, gemm, gemv, cutlass, xmma, or splitKreduce behind one of them.
"""

from enum import StrEnum


class Group(StrEnum):
    """Parts of a step. IDLE: the device waits for the host."""

    ATTENTION = "attention"
    GEMM = "GEMM"
    OTHER = "other kernels"
    IDLE = "idle"


_ATTENTION = ("flash", "fmha", "attention", "_attend_", "_plan_chunks")
_GEMM = ("gemm", "gemv", "nvjet", "cutlass", "xmma", "splitk", "_skinny", "_tiled", "_gated")

_CPU_GEMM = frozenset({"aten::mm", "aten::addmm", "aten::_addmm_activation", "mkldnn::linear"})


def group_of_kernel(name: str) -> Group:
    """A device kernel's group. Attention first: its templates are built of cutlass too."""
    lowered = name.lower()
    if any(part in lowered for part in _ATTENTION):
        return Group.ATTENTION
    return Group.GEMM if any(part in lowered for part in _GEMM) else Group.OTHER


def is_cpu_gemm(name: str) -> bool:
    """Whether an operator is a product of a matrix of weights: attention's are batched ones."""
    return name in _CPU_GEMM
