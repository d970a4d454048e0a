"""Followers whose one-shot sums end at another size: what a test's few tokens can exceed.

A follower is `python -m tests.gpu.parallel.limited_ranks BYTES`, told what it is by its stdin.
"""

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from workers.config import EngineConfig
from workers.layers.cuda import row_shards
from workers.parallel import local_rank
from workers.parallel.local_followers import LocalFollowers


def limit_one_shot(num_bytes: int) -> None:
    """Of this process's models of more than two ranks."""
    row_shards.ONE_SHOT_BYTES_OF_MORE_RANKS = num_bytes


def limited_followers(num_bytes: int):
    """For build_tp_engine: ranks on CUDA devices 1 and up."""
    return partial(_start, num_bytes)


def _start(num_bytes: int, config: EngineConfig, directory: Path, auth_key: bytes):
    processes = []
    for rank in range(1, config.tp_size):
        command = [sys.executable, "-m", "tests.gpu.parallel.limited_ranks", str(num_bytes)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        own = replace(config, device=f"cuda:{rank}")
        told = local_rank.LocalRank(own, rank, str(directory), auth_key)
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(told))
        processes.append(process)
    return LocalFollowers(processes)


if __name__ == "__main__":
    limit_one_shot(int(sys.argv[1]))
    local_rank.main()
