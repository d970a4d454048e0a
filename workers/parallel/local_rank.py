"""A follower rank as a child process: `python -m workers.parallel.local_rank`, told what to be.

Knows no Ray. Everything else is RankProcess's.
"""

import sys
from dataclasses import dataclass

import msgspec

from workers.config import EngineConfig
from workers.parallel.rank_process import RankProcess


@dataclass(frozen=True, slots=True)
class LocalRank:
    """What a child reads, as JSON, from its standard input."""

    config: EngineConfig
    rank: int
    directory: str
    auth_key: bytes


def main() -> None:
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=LocalRank)
    RankProcess(told.config, told.rank, told.directory, told.auth_key).run()


if __name__ == "__main__":
    main()
