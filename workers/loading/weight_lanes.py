"""How a checkpoint's tensors get from the page cache to a device: one way for each kind of device.

A way serves one thread at a time; several of them load in parallel. Knows no model and no file.
"""

from typing import Protocol

import torch

from workers.layers.sharding import MAX_PIECE_ELEMENTS, TensorSource, WeightSlot

MAX_LANES = 8


class WeightLane(Protocol):
    """Fills one slot after another. What load returned from is in place."""

    def load(self, slot: WeightSlot, tensor: TensorSource) -> None: ...


class HostLane:
    """Straight from the mapped file into parameters in host memory."""

    def load(self, slot: WeightSlot, tensor: TensorSource) -> None:
        slot.load(tensor)


class MappedLane:
    """Parameters in host memory are the file's own pages, where they lie there as they are wanted.

    All processes that map a file share its pages; what is merged or converted is each one's own.
    For files that nobody writes to: a file that shrinks would end the process that maps it.
    """

    def load(self, slot: WeightSlot, tensor: TensorSource) -> None:
        if not slot.map(tensor):
            slot.load(tensor)


class PinnedLane:
    """Through page-locked memory to a CUDA device, on a stream of its own.

    The driver reads page-locked memory without a copy of its own, and while one lane waits for its
    copy, others fill their buffers. Host memory: MAX_PIECE_ELEMENTS of the parameters' dtype.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._buffer = torch.empty(MAX_PIECE_ELEMENTS, dtype=dtype, pin_memory=True)
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def load(self, slot: WeightSlot, tensor: TensorSource) -> None:
        with torch.cuda.stream(self._stream):
            staged = StagedBits if slot.keeps_dtype else StagedTensor
            slot.load(staged(tensor, self._buffer))
        self._stream.synchronize()


class StagedTensor:
    """A TensorSource whose slices lie in buffer (flat, of the parameters' dtype), converted to it.

    A slice is good until the next one is taken; whoever takes it must have copied it by then. One
    that exceeds the buffer is handed on as it is.
    """

    def __init__(self, tensor: TensorSource, buffer: torch.Tensor) -> None:
        self._tensor = tensor
        self._buffer = buffer

    @property
    def shape(self) -> tuple[int, ...]:
        return self._tensor.shape

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor:
        part = self._tensor[index]
        if part.numel() > self._buffer.numel():
            return part
        staged = self._buffer[: part.numel()].view(part.shape)
        if part.dtype == staged.dtype and part.element_size() == torch.int16.itemsize:
            # numpy copies on this thread alone and without the interpreter's lock; torch would
            # start a team of threads for each of the lanes.
            staged.view(torch.int16).numpy()[...] = part.view(torch.int16).numpy()
            return staged
        return staged.copy_(part)


class StagedBits(StagedTensor):
    """The same without a conversion: slices of any dtype, bit by bit."""

    def __getitem__(self, index: tuple[slice, ...], /) -> torch.Tensor:
        part = self._tensor[index]
        if part.nbytes > self._buffer.nbytes:
            return part
        staged = self._buffer.view(torch.uint8)[: part.nbytes].view(part.dtype).view(part.shape)
        return staged.copy_(part)


def make_lanes(dtype: torch.dtype, device: torch.device, num_lanes: int) -> list[WeightLane]:
    """num_lanes ways to device for parameters of dtype."""
    if device.type != "cuda":
        return [HostLane() for _ in range(num_lanes)]
    return [PinnedLane(dtype, device) for _ in range(num_lanes)]


def make_lanes_from_copy(
    dtype: torch.dtype, device: torch.device, num_lanes: int
) -> list[WeightLane]:
    """As make_lanes, from files that are never written again."""
    if device.type != "cuda":
        return [MappedLane() for _ in range(num_lanes)]
    return make_lanes(dtype, device, num_lanes)
