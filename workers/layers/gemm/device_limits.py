"""What one program of a kernel may use on a GPU, and which of its generation's ways there are.

Knows no kernel. Source of the limits: CUDA programming guide, "Compute Capabilities".
"""

from dataclasses import dataclass
from functools import cache

import torch
from triton.runtime import driver

_COPY_ENGINE_MAJOR = 9
_RESERVED_BYTES = 3 << 10
"""Of shared memory: the driver's own (1 KiB a program) and a compiler's barriers."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """shared_bytes: of shared memory for one program's tiles."""

    compute_capability: tuple[int, int]
    shared_bytes: int

    @property
    def has_copy_engine(self) -> bool:
        """Tensor maps, bulk prefetches and programmatic dependent launch: from sm90 on."""
        return self.compute_capability[0] >= _COPY_ENGINE_MAJOR

    @classmethod
    def within(cls, compute_capability: tuple[int, int], most_bytes: int) -> "DeviceLimits":
        """most_bytes: of shared memory, as the device allows a program to ask for."""
        return cls(compute_capability, most_bytes - _RESERVED_BYTES)

    @classmethod
    def of(cls, device: torch.device) -> "DeviceLimits":
        """Of a CUDA device. Initialises CUDA."""
        return _limits(device.index if device.index is not None else torch.cuda.current_device())


@cache
def _limits(device_index: int) -> DeviceLimits:
    # What Triton itself holds a kernel against before it launches it.
    most_bytes = driver.active.utils.get_device_properties(device_index)["max_shared_mem"]
    capability = torch.cuda.get_device_capability(device_index)
    return DeviceLimits.within(capability, most_bytes)


HOPPER = DeviceLimits.within((9, 0), 227 << 10)
"""H100 and H200."""
