"""What one program of a kernel may use on a GPU, and which of its generation's ways there are.

Knows no kernel. Source of the limits: CUDA programming guide, "Compute Capabilities".
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from functools import cache

import torch

from attention.capability import ComputeCapability

_DEPENDENT_LAUNCH_MAJOR = 9
_WARPGROUP_MAJORS = (9, 10)


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """shared_bytes: of shared memory, as the device allows one program to ask for."""

    compute_capability: ComputeCapability
    num_multiprocessors: int
    shared_bytes: int

    @property
    def has_dependent_launch(self) -> bool:
        """Whether a kernel can start while its predecessor ends (griddepcontrol: from sm90 on)."""
        return self.compute_capability[0] >= _DEPENDENT_LAUNCH_MAJOR

    @property
    def multiplies_from_shared_memory(self) -> bool:
        """Whether products of 64 rows and more read both operands there (sm90, sm100, sm103)."""
        return self.compute_capability[0] in _WARPGROUP_MAJORS


def gpu_limits(device: torch.device) -> GpuLimits:
    """Of a CUDA device, by way of Triton. Initialises CUDA."""
    return _limits(torch.cuda.current_device() if device.index is None else device.index)


@cache
def _limits(device_index: int) -> GpuLimits:
    properties = torch.cuda.get_device_properties(device_index)
    # What Triton itself holds a kernel against before it launches it.
    driver = importlib.import_module("triton.runtime").driver
    shared_bytes = driver.active.utils.get_device_properties(device_index)["max_shared_mem"]
    capability = (properties.major, properties.minor)
    return GpuLimits(capability, properties.multi_processor_count, shared_bytes)
