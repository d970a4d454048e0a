"""Which GPUs experts' products by warpgroups are for (fp4_warpgroups.py, fp8_warpgroups.py)."""

from attention.kernels.providers import probe_gluon
from workers.layers.gemm.device_limits import DeviceLimits

_COMPUTE_CAPABILITY = (9, 0)


def has_warpgroups(limits: DeviceLimits) -> bool:
    """Whether the kernels are for this GPU and this Triton."""
    return limits.compute_capability == _COMPUTE_CAPABILITY and probe_gluon().is_available
