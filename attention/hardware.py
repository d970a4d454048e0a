"""What devices can do at best, measured once, by the name their driver gives them.

One table for everything that compares a time with a limit. A device that is not in it has no
limits here: a data sheet's figures are not reached, and a ratio against them would say little.
"""

from __future__ import annotations

from attention.preferences import DeviceFacts
from attention.roofline import HardwareLimits

H200 = HardwareLimits(bytes_per_s=4.38e12, flops_per_s=690e12)
"""Read rate and dense bf16 rate as measured on one, see docs/performance.md."""

MEASURED_LIMITS: dict[str, HardwareLimits] = {"NVIDIA H200": H200}
"""By exact name: a part of a GPU (MIG) and a variant with less power or memory are others."""


def measured_limits(device: DeviceFacts) -> HardwareLimits | None:
    """None for a device that nobody measured, CPUs too."""
    return MEASURED_LIMITS.get(device.name)
