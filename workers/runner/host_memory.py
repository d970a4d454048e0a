"""Physical memory behind tensors on the CPU given back to the system, their addresses kept.

What was there reads as zeros from then on, and takes memory again where it is written to. Linux
only: madvise(2) with MADV_DONTNEED on memory that is a process's own.
"""

import ctypes
import mmap
import os
import sys

import torch

IS_SUPPORTED = sys.platform == "linux"
_MADV_DONTNEED = 4


def give_back(storage: torch.UntypedStorage) -> None:
    """storage: on the CPU, of no file. Raises OSError where the system refuses."""
    start, num_bytes = storage.data_ptr(), storage.nbytes()
    if not num_bytes:
        return
    end = start + num_bytes
    first, last = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, end // mmap.PAGESIZE * mmap.PAGESIZE
    if first >= last:
        ctypes.memset(start, 0, num_bytes)
        return
    # Pages at either end have neighbours of somebody else's.
    ctypes.memset(start, 0, first - start)
    ctypes.memset(last, 0, end - last)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), _MADV_DONTNEED):
        number = ctypes.get_errno()
        raise OSError(number, f"memory cannot be given back: {os.strerror(number)}")
