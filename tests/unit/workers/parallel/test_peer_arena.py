"""Parts of peer memory: apart from each other, the same on every rank, never more than there is."""

import pytest
import torch

from workers.parallel.peer_memory import PeerArena, PeerMemory


def arena_of(num_bytes: int) -> PeerArena:
    buffers = tuple(torch.zeros(num_bytes, dtype=torch.uint8) for _ in range(2))
    return PeerArena(PeerMemory(0, buffers, torch.zeros(2, dtype=torch.int64)))


def test_parts_do_not_overlap_and_begin_at_multiples_of_256_bytes():
    arena, sizes = arena_of(4096), [1, 256, 257, 1000]
    offsets = [arena.take(size) for size in sizes]
    assert all(offset % 256 == 0 for offset in offsets)
    ends = [offset + size for offset, size in zip(offsets, sizes, strict=True)]
    assert all(end <= following for end, following in zip(ends, offsets[1:], strict=False))


def test_more_than_there_is_raises():
    arena = arena_of(1024)
    arena.take(512)
    with pytest.raises(ValueError, match="exceed 1024"):
        arena.take(513)
