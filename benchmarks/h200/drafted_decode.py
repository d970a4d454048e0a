"""Decode time a token with drafts, measured alike for every engine. Knows no engine.

As Decode of workloads.py, the time for few tokens of each stream is taken off the time for many:
prompts cancel out, and so do the last steps of requests, for which engines may not know how many
drafts are of any use. What holds of a step's drafts is pretended, by each engine in its own way,
and counted by it.
"""

import argparse
import json
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.h200.workloads import LOWEST_TOKEN_ID, VOCAB_SIZE, Generate

PROMPT_TOKENS = 128
FEW_TOKENS = 48
"""Of a stream, behind its first one: more than a tree's drafts, or two chains'."""


@dataclass(frozen=True, slots=True)
class HeldRuns:
    """So far: rows that verified drafts, and tokens that they brought. num_expected: that rows with
    as many drafts bring on average, where that is known."""

    num_rows: int = 0
    num_tokens: int = 0
    num_expected: float = 0.0

    def tokens_a_step(self, before: "HeldRuns") -> float | None:
        """Since before; None where no row had drafts."""
        if self.num_rows == before.num_rows:
            return None
        tokens = (self.num_tokens - before.num_tokens) / (self.num_rows - before.num_rows)
        return round(tokens, 3)


@dataclass(frozen=True, slots=True)
class DraftsAsked:
    """engine, drafts: names. verified: tokens that a row of a step verifies, of which the one
    sampled last is one; 1 of plain decoding. acceptance: tokens that a row of a step is to bring,
    None of plain decoding."""

    engine: str
    drafts: str
    verified: int
    acceptance: float | None


def measured_row(
    asked: DraftsAsked,
    num_streams: int,
    ms_a_token: float,
    all_ms: Sequence[float],
    tokens_a_step: float | None,
) -> dict[str, Any]:
    """What is printed. all_ms: of each repeat, from which ms_a_token comes."""
    return {
        "engine": asked.engine,
        "drafts": asked.drafts,
        "verified": asked.verified,
        "acceptance": asked.acceptance,
        "streams": num_streams,
        "ms_a_token": round(ms_a_token, 4),
        "all_ms": [round(one, 4) for one in all_ms],
        "tokens_a_step": tokens_a_step,
    }


class DraftedDecode:
    """One engine's measurements. held: its count of runs so far."""

    def __init__(self, generate: Generate, held: Callable[[], HeldRuns]) -> None:
        self._generate = generate
        self._held = held
        self._rng = random.Random(0)

    def print_rows(self, asked: DraftsAsked, arguments: argparse.Namespace) -> None:
        """One line of JSON for each number of streams. arguments: of add_decode_arguments.
        Raises RuntimeError where a request got fewer tokens than it should."""
        for num_streams in arguments.streams:
            row = self.row(asked, num_streams, arguments.tokens, arguments.repeats)
            print(json.dumps(row), flush=True)

    def row(
        self,
        asked: DraftsAsked,
        num_streams: int,
        num_tokens: int,
        repeats: int,
        warm_up_tokens: int = FEW_TOKENS,
    ) -> dict[str, object]:
        """num_tokens: of a stream, those measured. ms_a_token is the best of the repeats."""
        self._seconds(num_streams, 1 + warm_up_tokens)
        before = self._held()
        found = [self._ms_a_token(num_streams, num_tokens) for _ in range(repeats)]
        tokens_a_step = self._held().tokens_a_step(before)
        return measured_row(asked, num_streams, min(found), found, tokens_a_step)

    def _ms_a_token(self, num_streams: int, num_tokens: int) -> float:
        """Of one stream among num_streams."""
        few_s, few = self._seconds(num_streams, 1 + FEW_TOKENS)
        many_s, many = self._seconds(num_streams, 1 + FEW_TOKENS + num_tokens)
        return (many_s - few_s) / (many - few) * 1e3

    def _seconds(self, num_streams: int, num_tokens: int) -> tuple[float, float]:
        """And how many tokens a stream got: engines may end a request behind a run's last one."""
        prompts = [
            [self._rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            for _ in range(num_streams)
        ]
        start_s = time.perf_counter()
        counts = self._generate(prompts, [num_tokens] * num_streams)
        elapsed_s = time.perf_counter() - start_s
        if len(counts) != num_streams or min(counts) < num_tokens:
            raise RuntimeError(f"{num_tokens} tokens were asked for, got {counts[:4]} ...")
        return elapsed_s, sum(counts) / num_streams


def add_decode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", type=Path, help="a Hugging Face config.json")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64, 256])
    parser.add_argument("--tokens", type=int, default=192, help="of a stream, those measured")
    parser.add_argument("--repeats", type=int, default=2)


def peer_parser(description: str) -> argparse.ArgumentParser:
    """Of a driver that measures one kind of drafts, as an engine is started with it."""
    parser = argparse.ArgumentParser(description=description)
    add_decode_arguments(parser)
    parser.add_argument("--head", type=Path, help="config.json of an EAGLE-3 head; none: plain")
    parser.add_argument("--steps", type=int, default=3, help="drafts of a chain, depth of a tree")
    parser.add_argument("--acceptance", type=float, default=3.0, help="tokens a step")
    return parser


@contextmanager
def config_folders(*configs: Path | None) -> Iterator[list[str]]:
    """A folder with nothing but the config for each that there is, while engines are loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        folders = []
        for index, config in enumerate(one for one in configs if one is not None):
            folder = Path(scratch) / str(index)
            folder.mkdir()
            shutil.copy(config, folder / "config.json")
            folders.append(str(folder))
        yield folders
