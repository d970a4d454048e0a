"""Tensor-parallel ranks as threads of one process, for what is too small to be worth processes."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")
TIMEOUT_S = 60.0


class ThreadRanks:
    """Where the ranks of one group leave what they bring."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._meeting = threading.Barrier(size, timeout=TIMEOUT_S)
        self._brought = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's, in the order of ranks."""
        self._brought[rank] = tensor.clone()
        self._meeting.wait()
        everybodys = list(self._brought)
        self._meeting.wait()
        return everybodys

    def run(self, work: Callable[["ThreadRank"], T]) -> list[T]:
        """What the work gives on each rank. Raises what a rank raises; the others end then."""
        with ThreadPoolExecutor(self.size) as pool:
            running = [pool.submit(self._run, work, rank) for rank in range(self.size)]
        errors = [one.exception() for one in running]
        own = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
        for error in filter(None, own):
            raise error
        return [one.result() for one in running]

    def _run(self, work: Callable[["ThreadRank"], T], rank: int) -> T:
        try:
            with torch.inference_mode():
                return work(ThreadRank(self, rank))
        except BaseException:
            self._meeting.abort()
            raise


class ThreadRank:
    """A TPGroup."""

    def __init__(self, ranks: ThreadRanks, rank: int) -> None:
        self._ranks = ranks
        self.rank = rank
        self.size = ranks.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._ranks.exchange(self.rank, tensor)).sum(0)

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = torch.stack(self._ranks.exchange(self.rank, tensor))  # of one shape
        return torch.cat(list(parts), -1)

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        tensor.copy_(self._ranks.exchange(self.rank, tensor)[source_rank])

    def all_reduce_min(self, value: int) -> int:
        return int(min(self._ranks.exchange(self.rank, torch.tensor(value))))

    def share_memory(self, num_bytes: int) -> None:
        """Ranks on CPU share none."""

    def barrier(self) -> None:
        self._ranks.exchange(self.rank, torch.empty(0))

    def close(self) -> None:
        """Nothing is held."""
