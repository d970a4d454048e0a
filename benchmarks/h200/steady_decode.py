"""Decode time a token of our own engine while all streams run, for drafts that are right by chance.

Streams whose drafts are right by chance end at different steps, and the last ones have the device
to themselves: here none ends before all is measured. Nor does luck count: tokens are those that
steps with so many drafts bring on average. Times are of the whole measurement, trials of a policy
and what it learns on the way included.
"""

import random
import time
from collections.abc import Callable, Iterable
from typing import Any

from benchmarks.h200.drafted_decode import (
    FEW_TOKENS,
    PROMPT_TOKENS,
    DraftsAsked,
    HeldRuns,
    measured_row,
)
from benchmarks.h200.workloads import LOWEST_TOKEN_ID, VOCAB_SIZE
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams


class RunningStreams:
    """Requests that run all at once, and how many tokens each has got."""

    def __init__(self, engine: Engine, num_streams: int, max_tokens: int) -> None:
        self._engine = engine
        self._counts = {f"stream-{index}": 0 for index in range(num_streams)}
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
        rng = random.Random(num_streams)
        for name in self._counts:
            prompt = [rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]
            engine.submit(GenerateRequest(name, prompt, sampling))

    @property
    def num_tokens(self) -> int:
        return sum(self._counts.values())

    @property
    def fewest(self) -> int:
        """Tokens of the slowest."""
        return min(self._counts.values())

    def step(self) -> None:
        """Raises RuntimeError where a stream has ended: the others are no more all."""
        for output in self._engine.step():
            self._counts[output.request_id] += len(output.token_ids)
            if output.finish_reason is not None:
                raise RuntimeError(f"{output.request_id} has ended: {output.finish_reason}")

    def end(self) -> None:
        for name in self._counts:
            self._engine.abort(name)
        while self._engine.has_work:
            self._engine.step()


class SteadyDecode:
    """One engine's measurements. held: its count of runs so far."""

    def __init__(self, engine: Engine, held: Callable[[], HeldRuns]) -> None:
        self._engine = engine
        self._held = held

    def row(
        self,
        asked: DraftsAsked,
        num_streams: int,
        num_tokens: int,
        repeats: int,
        warm_up_tokens: int,
    ) -> dict[str, Any]:
        """As DraftedDecode.row, but for ms_a_token, which is the mean of the repeats: a policy's
        trials are in one of them. Streams that warm an engine up end before others are measured:
        whatever a policy had to learn, these are as long as those of any other engine, and their
        keys take as long to read."""
        self._warmed_up(num_streams, warm_up_tokens, 0).end()
        streams = self._warmed_up(num_streams, FEW_TOKENS, repeats * num_tokens)
        try:
            before = self._held()
            found = [self._ms_a_token(streams, num_streams, num_tokens) for _ in range(repeats)]
        finally:
            streams.end()
        tokens_a_step = self._held().tokens_a_step(before)
        return measured_row(asked, num_streams, sum(found) / len(found), found, tokens_a_step)

    def _warmed_up(self, num_streams: int, num_tokens: int, num_to_come: int) -> RunningStreams:
        """Streams of so many tokens each, that can go on for num_to_come more."""
        # They drift apart; none may be twice as fast as another.
        max_tokens = 2 * (num_tokens + num_to_come) + 64
        streams = RunningStreams(self._engine, num_streams, max_tokens)
        while streams.fewest < num_tokens:
            streams.step()
        return streams

    def _ms_a_token(self, streams: RunningStreams, num_streams: int, num_tokens: int) -> float:
        """Of one stream among num_streams, over num_tokens of each on average."""
        before, already, start_s = self._held(), streams.num_tokens, time.perf_counter()
        while streams.num_tokens < already + num_streams * num_tokens:
            streams.step()
        elapsed_s = time.perf_counter() - start_s
        held, brought = self._held(), streams.num_tokens - already
        luck = held.num_tokens - before.num_tokens - (held.num_expected - before.num_expected)
        return elapsed_s * num_streams / (brought - luck) * 1e3


def shares_of_best(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of adaptive lengths' rows, one a number of streams and acceptance: their speed as a share of
    the fastest of plain decoding and fixed chains, and of plain decoding's, None where there is no
    row of that. Plain decoding knows no acceptance."""
    by_case: dict[tuple[int, float | None], dict[str, float]] = {}
    for row in rows:
        case = by_case.setdefault((row["streams"], row["acceptance"]), {})
        case[row["drafts"]] = row["ms_a_token"]
    shares = []
    for (num_streams, acceptance), case in by_case.items():
        if "adaptive" not in case:
            continue
        plain = by_case.get((num_streams, None), {})
        others = {**plain, **{name: ms for name, ms in case.items() if name.startswith("chain")}}
        best = min(others, key=lambda name: others[name], default=None)
        own = case["adaptive"]
        shares.append(
            {
                "streams": num_streams,
                "acceptance": acceptance,
                "best": best,
                "of_best": None if best is None else round(others[best] / own, 4),
                "of_plain": round(plain["plain"] / own, 4) if plain else None,
            }
        )
    return shares
