"""Copies between host and device that wait for nothing: many arrays in one upload, pinned memory.

Knows arrays and tensors only.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_ALIGNMENT_BYTES = 8


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on device, by one copy of one buffer that the host does not wait for.

    The tensors are views of that buffer: equal shapes and dtypes as the arrays.
    """
    starts = _aligned_starts([array.nbytes for array in arrays])
    is_pinned = device.type == "cuda"
    buffer = torch.empty(starts[-1], dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    staging = buffer.numpy()
    for start, array in zip(starts, arrays, strict=False):
        staging[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view("u1")
    on_device = buffer.to(device, non_blocking=True)
    return [
        on_device[start : start + array.nbytes].view(_torch_dtype(array)).view(array.shape)
        for start, array in zip(starts, arrays, strict=False)
    ]


def start_download(tensor: Tensor) -> Tensor:
    """A host copy of tensor whose values may be read once the device's stream has passed here."""
    if tensor.device.type != "cuda":
        return tensor.detach()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)


def _aligned_starts(sizes: Sequence[int]) -> list[int]:
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES)
    return starts


def _torch_dtype(array: npt.NDArray[Any]) -> torch.dtype:
    return _TORCH_DTYPES[array.dtype]


# By dtype: numpy works a dtype's name out anew each time.
_TORCH_DTYPES = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
}
