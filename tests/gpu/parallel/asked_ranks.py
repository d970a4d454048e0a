"""Ranks of which a test asks something beside their config.

A follower is `python -m tests.gpu.parallel.asked_ranks ASKED`, told what it is by its stdin.
"""

import subprocess
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from tests.gpu.parallel.draft_record import DraftRecord
from workers.config import EngineConfig
from workers.layers.cuda import row_shards
from workers.parallel import local_rank
from workers.parallel.local_followers import LocalFollowers


@dataclass(frozen=True)
class Asked:
    """one_shot_bytes: where one-shot sums of more than two ranks end, which a test's few tokens can
    exceed; None: as it is. drafts_folder: where each rank writes what it drafted (DraftRecord)."""

    one_shot_bytes: int | None = None
    drafts_folder: str | None = None

    def of_this_process(self) -> DraftRecord | None:
        """Before its rank is made."""
        if self.one_shot_bytes is not None:
            row_shards.ONE_SHOT_BYTES_OF_MORE_RANKS = self.one_shot_bytes
        return None if self.drafts_folder is None else DraftRecord(Path(self.drafts_folder))


def asked_followers(asked: Asked):
    """For build_tp_engine: ranks on CUDA devices 1 and up."""
    return partial(_start, asked)


def _start(asked: Asked, config: EngineConfig, directory: Path, auth_key: bytes):
    processes = []
    for rank in range(1, config.tp_size):
        command = [sys.executable, "-m", "tests.gpu.parallel.asked_ranks"]
        command.append(msgspec.json.encode(asked).decode())
        process = subprocess.Popen(command, stdin=subprocess.PIPE)
        own = replace(config, device=f"cuda:{rank}")
        told = local_rank.LocalRank(own, rank, str(directory), auth_key)
        with process.stdin as pipe:
            pipe.write(msgspec.json.encode(told))
        processes.append(process)
    return LocalFollowers(processes)


if __name__ == "__main__":
    msgspec.json.decode(sys.argv[1], type=Asked).of_this_process()
    local_rank.main()
