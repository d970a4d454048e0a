"""The memory that FlashInfer's wrappers plan and compute in, one set for all of a backend's.

A plan is made by the host in page-locked memory, uploaded, and read by every layer of the step. The
host is ahead of the device: memory of a plan that is on its way is not written again, so that plans
take page-locked buffers by turns. Knows no batch and no layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from attention.kernels.flash_infer import share_workspace, upload_from
from attention.kernels.gpu_limits import gpu_limits

_PLAN_BYTES = 8 << 20  # what the package gives each wrapper
_BUFFERS_PER_KIND = 4
_MIN_BYTES = 32 << 20
_PROGRAMS_PER_MULTIPROCESSOR = 2
_FLOAT_BYTES = 4
_TILE_ROWS = 128


class Mark(Protocol):
    """A point on the device's stream. torch.cuda.Event is one."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _PastMark:
    """For devices whose work is done when its call returns."""

    def record(self) -> None:
        """Nothing runs behind the caller's back."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class UploadBuffers:
    """Page-locked memory by turns; take waits where the host is a whole turn ahead of the device.

    new_mark: for each buffer, a mark behind its last upload.
    """

    def __init__(self, num_buffers: int, is_pinned: bool, new_mark: Callable[[], Mark]) -> None:
        self._buffers = [
            torch.empty(_PLAN_BYTES, dtype=torch.uint8, pin_memory=is_pinned)
            for _ in range(num_buffers)
        ]
        self._marks: list[Mark | None] = [None] * num_buffers
        self._new_mark = new_mark
        self._next = 0

    def upload(self, send: Callable[[torch.Tensor], None]) -> None:
        """send writes the buffer and starts copying it to the device, on the current stream."""
        index, self._next = self._next, (self._next + 1) % len(self._buffers)
        mark = self._marks[index]
        if mark is None:
            mark = self._marks[index] = self._new_mark()
        elif not mark.query():
            mark.synchronize()
        send(self._buffers[index])
        mark.record()


class FlashInferWorkspace:
    """num_kinds: of layers that are planned apart. num_bytes: what kernels of eager steps need."""

    def __init__(self, num_kinds: int, num_bytes: int, device: torch.device) -> None:
        self._device = device
        self.buffer = self._zeros(num_bytes)
        self._plans = [
            torch.empty(_PLAN_BYTES, dtype=torch.uint8, device=device) for _ in range(num_kinds)
        ]
        is_cuda = device.type == "cuda"
        new_mark: Callable[[], Mark] = torch.cuda.Event if is_cuda else _PastMark
        self._uploads = UploadBuffers(_BUFFERS_PER_KIND * num_kinds, is_cuda, new_mark)

    def _zeros(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(max(num_bytes, _MIN_BYTES), dtype=torch.uint8, device=self._device)

    def reserve(self, num_bytes: int) -> None:
        """For wrappers that are made from now on; those before keep what they have."""
        if num_bytes > len(self.buffer):
            self.buffer = self._zeros(num_bytes)

    def adopt(self, wrapper: Any, kind: int) -> Any:
        """A new wrapper over buffer, whose plans go where those of its kind go. One plan of a kind
        is in use at a time: steps run one after the other, and each makes its plans anew."""
        share_workspace(wrapper, self._plans[kind])
        return wrapper

    def plan(self, wrapper: Any, *arguments: Any, **named: Any) -> None:
        """wrapper.plan, without waiting for the device."""

        def send(page_locked: torch.Tensor) -> None:
            upload_from(wrapper, page_locked)
            wrapper.plan(*arguments, **named)

        self._uploads.upload(send)


def eager_bytes(device: torch.device, group: int, head_dim: int) -> int:
    """What parts of keys take whose results are joined, of heads in groups of so many: as many
    tiles of queries as the device has room for at a time, in float32, with their log-sum-exp.

    FlashInfer's PrefillPlan (scheduler.cuh) counts a tile once for every query head of its group.
    """
    num_programs = _PROGRAMS_PER_MULTIPROCESSOR * gpu_limits(device).num_multiprocessors
    return num_programs * _TILE_ROWS * group * (head_dim + 1) * _FLOAT_BYTES


def graph_bytes(
    device: torch.device, max_bs: int, q_heads: int, kv_heads: int, head_dim: int
) -> int:
    """As eager_bytes, of decode steps of max_bs rows in a graph, which always split keys: as many
    tiles as there may be, a partly filled one for each row."""
    group = q_heads // kv_heads
    tile_rows = _decode_tile_rows(group, head_dim)
    num_programs = _PROGRAMS_PER_MULTIPROCESSOR * gpu_limits(device).num_multiprocessors
    tiles = max(num_programs // kv_heads, -(-max_bs * group // tile_rows) + max_bs - 1)
    return tiles * tile_rows * q_heads * (head_dim + 1) * _FLOAT_BYTES


def _decode_tile_rows(group: int, head_dim: int) -> int:
    """Rows of a tile, which hold the heads of a group (FA2DetermineCtaTileQ in utils.cuh)."""
    if group > 64 and head_dim < 256:
        return _TILE_ROWS
    return 64 if group > 16 else 16
