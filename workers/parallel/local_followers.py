"""Followers as plain child processes on this machine, for engines that run without Ray.

A child is this package's local_rank module; it learns what it is from its standard input.
"""

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import msgspec

from workers.config import EngineConfig
from workers.parallel.local_rank import LocalRank
from workers.runner.sizing import resolve_device

_POLL_S = 0.02


class LocalFollowers:
    """The children, in order of their ranks."""

    def __init__(self, processes: list[subprocess.Popen[bytes]]) -> None:
        self._processes = processes

    def wait_for_end(self, timeout_s: float) -> bool:
        deadline_s = time.monotonic() + timeout_s
        while True:
            if any(process.poll() is not None for process in self._processes):
                return True
            if time.monotonic() >= deadline_s:
                return False
            time.sleep(_POLL_S)


def start_local_followers(config: EngineConfig, directory: Path, auth_key: bytes) -> LocalFollowers:
    """Rank r computes on CUDA device r, or on the CPU if rank 0 does. They end with rank 0."""
    is_cuda = resolve_device(config).type == "cuda"
    processes = []
    for rank in range(1, config.tp_size):
        own = replace(config, device=f"cuda:{rank}") if is_cuda else config
        process = subprocess.Popen(
            [sys.executable, "-m", "workers.parallel.local_rank"], stdin=subprocess.PIPE
        )
        assert process.stdin is not None
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(LocalRank(own, rank, str(directory), auth_key)))
        processes.append(process)
    return LocalFollowers(processes)
