"""Memory for the masks of steps, used again: a megabyte for 64 rows, mapped and cleared anew in
every step, would cost more than some of its masks."""

from collections.abc import Container
from concurrent.futures import Future
from typing import Any

import numpy as np

from workers.constraints.matcher import MaskBits

ROW_GRANULE = 64
MAX_FREE_BUFFERS = 4


class MaskBuffer:
    """bits: int32 (num rows, num words) of the step that has it, with whatever a step before left
    in them. Nobody else may have it before its step has been read, writers are done and nobody
    waits for a mask in it."""

    def __init__(self, num_rows: int, num_words: int) -> None:
        self._memory = np.zeros((num_rows, num_words), dtype=np.int32)
        self._writers: list[Future[Any]] = []
        self.bits: MaskBits = self._memory

    @property
    def is_written_to(self) -> bool:
        return not all(writer.done() for writer in self._writers)

    def add_writer(self, writer: Future[Any]) -> None:
        """Of a request that has ended, too: it writes on."""
        self._writers.append(writer)

    def use_again(self, num_rows: int) -> bool:
        """Whether there is room for so many."""
        if self.is_written_to:
            raise RuntimeError("masks are being written to a buffer that is to be used again")
        self._writers.clear()
        self.bits = self._memory[:num_rows]
        return num_rows <= len(self._memory)


class MaskBuffers:
    """num_words: of a mask. Only the thread that drives the engine calls it."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._given: list[MaskBuffer] = []
        self._free: list[MaskBuffer] = []

    def begin_step(self, kept: Container[MaskBuffer]) -> None:
        """Nobody reads masks of earlier steps any more. kept: where masks are or will be that come
        with a later step."""
        still = [one for one in self._given if one.is_written_to or one in kept]
        self._free += [one for one in self._given if one not in still]
        del self._free[MAX_FREE_BUFFERS:]
        self._given = still

    def take(self, num_rows: int) -> MaskBuffer:
        """For the step that was begun."""
        buffer = self._free.pop() if self._free else None
        if buffer is None or not buffer.use_again(num_rows):
            buffer = MaskBuffer(-(-num_rows // ROW_GRANULE) * ROW_GRANULE, self._num_words)
            buffer.use_again(num_rows)
        self._given.append(buffer)
        return buffer
