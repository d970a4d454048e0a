"""Structured output beside plain text: tokens a second and inter-token times, in one process.

    python3 -m benchmarks.h200.structured FOLDER [--temperature T] [--repeats N]

FOLDER: of structured_model.py. Runs 64 streams (structured_workload.py) of which none, half or all
are constrained by a schema of 20 fields. tokens_per_s counts from the moment when every stream has
its first token until the first has its last, so that all streams are there; decode_s is the whole
time from the first moment to the last token of all. itl_p50_ms, itl_p99_ms: of streams without a
constraint, as the engine's caller sees them. mask_us: what the masks take that are made together,
as a rule a step's. late: the share of masks that came so late that their rows ran again.
"""

import argparse
import json
import logging
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.structured_workload import (
    COMPANIES,
    MAX_TOKENS,
    Stream,
    schema_of_20_fields,
    streams,
)
from service.tokenizer.grammars import JSON_DEFAULTS
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.long_lived import settle
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams


@dataclass(slots=True)
class Progress:
    """When a stream got tokens, in seconds, and how many each time."""

    times_s: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    def num_until(self, stop_s: float) -> int:
        pairs = zip(self.times_s, self.counts, strict=True)
        return sum(count for at_s, count in pairs if at_s <= stop_s)


class TimedFill:
    """An engine's FillMasks, timed. seconds: of each step that had masks."""

    def __init__(self, fill: Any) -> None:
        self._fill = fill
        self.seconds: list[float] = []
        self.num_masks = 0

    def __call__(self, rows: Any, bits: Any) -> None:
        start_s = time.perf_counter()
        self._fill(rows, bits)
        self.num_masks += len(rows)
        self.seconds.append(time.perf_counter() - start_s)


class LateRows:
    """Counts the rows of an engine that run again."""

    def __init__(self, engine: Engine) -> None:
        self.count = 0
        self._run_again = type(engine._scheduler).run_again.__get__(engine._scheduler)
        engine._scheduler.run_again = self  # type: ignore[method-assign, assignment]

    def __call__(self, plan: Any, rows: Any) -> None:
        self.count += len(rows)
        self._run_again(plan, rows)


def request_of(name: str, stream: Stream, grammar: str, temperature: float) -> GenerateRequest:
    sampling = SamplingParams(
        temperature=temperature, seed=stream.seed, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    own = grammar if stream.is_constrained else ""
    return GenerateRequest(name, stream.prompt, sampling, grammar=own)


def run(engine: Engine, requests: list[GenerateRequest]) -> dict[str, Progress]:
    progress = {request.request_id: Progress() for request in requests}
    for request in requests:
        engine.submit(request)
    while engine.has_work:
        outputs = engine.step()
        now_s = time.perf_counter()
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(f"{output.request_id}: {output.error.message}")
            progress[output.request_id].times_s.append(now_s)
            progress[output.request_id].counts.append(len(output.token_ids))
    return progress


def describe(progress: dict[str, Progress], plain: list[str]) -> dict[str, float]:
    begin_s = max(one.times_s[0] for one in progress.values())
    first_end_s = min(one.times_s[-1] for one in progress.values())
    end_s = max(one.times_s[-1] for one in progress.values())
    num_tokens = sum(
        one.num_until(first_end_s) - one.num_until(begin_s) for one in progress.values()
    )
    row = {
        "tokens_per_s": round(num_tokens / (first_end_s - begin_s), 1),
        "decode_s": round(end_s - begin_s, 4),
        "num_tokens": sum(sum(one.counts) for one in progress.values()),
    }
    if plain:
        gaps = [
            np.diff([at_s for at_s in progress[name].times_s if at_s >= begin_s]) for name in plain
        ]
        p50, p99 = np.percentile(np.concatenate(gaps) * 1e3, [50, 99])
        row |= {"itl_p50_ms": round(float(p50), 3), "itl_p99_ms": round(float(p99), 3)}
    return row


def measure(engine: Engine, company: str, temperature: float, seed: int, grammar: str) -> None:
    fill, late = TimedFill(engine._grammars.fill), LateRows(engine)
    engine._filler._fill = fill
    own = streams(COMPANIES[company], seed)
    requests = [request_of(str(i), one, grammar, temperature) for i, one in enumerate(own)]
    plain = [str(i) for i, one in enumerate(own) if not one.is_constrained]
    num_steps = engine.stats().num_steps
    row = describe(run(engine, requests), plain)
    row["num_steps"] = engine.stats().num_steps - num_steps
    if fill.seconds:
        row["late"] = round(late.count / max(fill.num_masks, 1), 4)
        row["mask_us"] = round(float(np.median(fill.seconds)) * 1e6, 1)
        row["mask_p99_us"] = round(float(np.percentile(fill.seconds, 99)) * 1e6, 1)
    print(json.dumps({"constrained": company, "temperature": temperature, **row}), flush=True)


def build(folder: Path) -> Engine:
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        max_context_len=MAX_CONTEXT_LEN,
        gpu_memory_fraction=MEMORY_FRACTION,
        max_running_requests=MAX_RUNNING_REQUESTS,
        enable_prefix_cache=False,
    )
    engine = build_local_engine(config, lambda done, total: None)
    while engine.prepare_while_idle():
        pass
    # As a replica does when it has started.
    settle()
    return engine


def main() -> None:
    parser = argparse.ArgumentParser(description="structured output beside plain text")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--temperature", type=float, nargs="+", default=[0.0, 1.0])
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    grammar = LLMatcher.grammar_from_json_schema(
        schema_of_20_fields(),
        defaults=JSON_DEFAULTS,  # type: ignore[arg-type]
    )
    engine = build(arguments.folder)
    # Reads the tokenizer, for seconds.
    run(engine, [request_of("first", streams(1, 0)[0], grammar, 0.0)])
    for temperature in arguments.temperature:
        for repeat in range(arguments.repeats + 1):
            for company in COMPANIES:
                # The first round warms up; the table leaves it out.
                if repeat == 0:
                    print("warming up:", end=" ")
                measure(engine, company, temperature, 1 + repeat, grammar)
    engine.close()


if __name__ == "__main__":
    main()
