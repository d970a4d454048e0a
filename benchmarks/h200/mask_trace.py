"""Where masks are late on this host: the streams of structured.py, watched, under some variations.

    python3 -m benchmarks.h200.mask_trace FOLDER [--try NAME...] [--raw FILE] [--pretend-us N]

FOLDER: of structured_model.py. Prints what the host is; then for each variation one run of none,
half and all constrained: the line of structured.py, and where time went, in microseconds: mean,
then median, 90th and 99th percentile, maximum. --raw: every step and batch, a line of JSON each.
--pretend-us: no GPU, but the clock of mask_overlap.py, which samples at --temperature 0 only.
"""

import argparse
import ctypes
import json
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from llguidance import LLExecutor, LLMatcher

from benchmarks import mask_overlap
from benchmarks.h200.structured import build, describe, request_of, run
from benchmarks.h200.structured_workload import COMPANIES, schema_of_20_fields, streams
from benchmarks.host_facts import host_lines, stolen_s
from benchmarks.mask_table import batch_lines, quantiles, step_lines, summary
from benchmarks.mask_timeline import MaskTimeline
from benchmarks.thread_clocks import InterpreterProbe, with_threads
from service.tokenizer.grammars import JSON_DEFAULTS
from workers.constraints import templates
from workers.constraints.compiler import num_mask_threads
from workers.constraints.mask_deadline import NEVER
from workers.constraints.templates import TemplateCache
from workers.engine.engine import Engine
from workers.engine.mask_patience import MaskPatience
from workers.scheduler.request import ConstrainedRequest

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


@contextmanager
def short_switches() -> Iterator[None]:
    """Who waits for the interpreter has it after 0.2 ms instead of 5."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(0.0002)
    yield
    sys.setswitchinterval(before)


@contextmanager
def kept_memory() -> Iterator[None]:
    """Freed memory stays with the process, so that masks' buffers are not mapped in every step.
    There is no way back: last of all."""
    libc = ctypes.CDLL(None)
    libc.mallopt(_M_MMAP_THRESHOLD, 1 << 30)
    libc.mallopt(_M_TRIM_THRESHOLD, 1 << 30)
    yield


@contextmanager
def few_templates() -> Iterator[None]:
    before = templates.MAX_TEMPLATES
    templates.MAX_TEMPLATES = 8
    yield
    templates.MAX_TEMPLATES = before


@contextmanager
def nothing_forced() -> Iterator[None]:
    """A step for each token, whatever must follow."""
    before = ConstrainedRequest.look_ahead
    ConstrainedRequest.look_ahead = lambda self, token_id: None  # type: ignore[method-assign]
    yield
    ConstrainedRequest.look_ahead = before  # type: ignore[method-assign]


@contextmanager
def never_late() -> Iterator[None]:
    """Every step waits for all of its masks."""
    before = MaskPatience.deadline
    MaskPatience.deadline = lambda self, plan: NEVER  # type: ignore[method-assign]
    yield
    MaskPatience.deadline = before  # type: ignore[method-assign]


@contextmanager
def probed() -> Iterator[None]:
    with InterpreterProbe() as probe:
        yield
    print(f"  a sleeper of 1 ms was late by           {quantiles(probe.late_s)}", flush=True)


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


NUM_THREADS = num_mask_threads(len(os.sched_getaffinity(0)))
VARIATIONS: dict[str, tuple[Callable[[], Any], int]] = {
    "plain": (as_it_is, NUM_THREADS),
    "threads1": (as_it_is, 1),
    "threads4": (as_it_is, 4),
    "threads8": (as_it_is, 8),
    "threads24": (as_it_is, 24),
    "switch": (short_switches, NUM_THREADS),
    "probe": (probed, NUM_THREADS),
    "patient": (never_late, NUM_THREADS),
    "templates8": (few_templates, NUM_THREADS),
    "unforced": (nothing_forced, NUM_THREADS),
    "memory": (kept_memory, NUM_THREADS),
}
"""What is changed, and how many native threads there are."""


DEFAULT = ["plain", "patient", "threads8", "templates8", "unforced", "memory"]
COLD = ("plain", "templates8")
"""Those that have something to learn first."""
WARM_UP_SEED = 1
RUNS = ((1, "half"), (1, "all"), (2, "none"), (2, "half"), (2, "all"))
NUM_WARM_UPS = 2


class Trace:
    """grammar: of the constrained streams. raw: where lines go, if anywhere."""

    def __init__(self, engine: Engine, grammar: str, temperature: float, raw: Any) -> None:
        self._engine: Any = engine
        self._grammar = grammar
        self._temperature = temperature
        self._raw = raw

    def run(self, name: str) -> None:
        change, num_threads = VARIATIONS[name]
        executor, threads = with_threads(partial(LLExecutor, num_threads))
        compiler = self._engine._grammars._compiler
        compiler._executor, before = executor, compiler._templates
        if name in COLD[1:]:
            compiler._templates = TemplateCache()
        with ExitStack() as stack:
            stack.enter_context(change())
            for seed, company in RUNS if name in COLD else RUNS[NUM_WARM_UPS:]:
                timeline = MaskTimeline(self._engine, threads)
                self._measure(name, company, seed, timeline)
        compiler._templates = before

    def _measure(self, name: str, company: str, seed: int, timeline: MaskTimeline) -> None:
        size = self._engine.info.vocab_size
        own = streams(COMPANIES[company], seed)
        own = [replace(one, prompt=[token % size for token in one.prompt]) for one in own]
        requests = [
            request_of(str(i), one, self._grammar, self._temperature) for i, one in enumerate(own)
        ]
        plain = [str(i) for i, one in enumerate(own) if not one.is_constrained]
        before_stolen_s, before_cpu_s = stolen_s(), time.process_time()
        with timeline.watching():
            row = describe(run(self._engine, requests), plain)
        row["cpu_s"] = round(time.process_time() - before_cpu_s, 3)
        row["stolen_s"] = round(stolen_s() - before_stolen_s, 3)
        if seed == WARM_UP_SEED:
            return
        row |= summary(timeline)
        print(json.dumps({"try": name, "constrained": company, **row}), flush=True)
        if timeline.batches:
            print("\n".join((*step_lines(timeline.steps), *batch_lines(timeline))), flush=True)
        for one in timeline.as_rows() if self._raw else ():
            print(json.dumps({"try": name, "constrained": company, **one}), file=self._raw)


def main() -> None:
    parser = argparse.ArgumentParser(description="where masks are late")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--try", nargs="+", dest="names", default=DEFAULT)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--raw", type=Path)
    parser.add_argument("--pretend-us", type=float)
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    print("\n".join(host_lines()), flush=True)
    grammar = LLMatcher.grammar_from_json_schema(
        schema_of_20_fields(),
        defaults=JSON_DEFAULTS,  # type: ignore[arg-type]
    )
    if arguments.pretend_us is None:
        engine = build(arguments.folder)
    else:
        engine = mask_overlap.build(arguments.folder, arguments.pretend_us / 1e6)
    engine._grammars.prepare()()
    with ExitStack() as stack:
        raw = stack.enter_context(arguments.raw.open("w")) if arguments.raw else None
        trace = Trace(engine, grammar, arguments.temperature, raw)
        for name in arguments.names:
            trace.run(name)
    engine.close()


if __name__ == "__main__":
    main()
