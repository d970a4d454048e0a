"""What masks cost on this machine's processors: a step's rows, filled by more and more threads.

    python3 -m benchmarks.mask_threads FOLDER [--rows N] [--threads N...] [--steps N]

FOLDER: of benchmarks/h200/structured_model.py. Every row has a matcher of its own, under the schema
of 20 fields, a copy of one of as many templates as an engine has, and draws random allowed tokens.
Lines for each number of threads, then for as many processes of one thread each: milliseconds that
the masks of a step take, and microseconds of a processor that each mask takes. new: of matchers
that go through their text for the first time. busy: beside a thread of Python's that never rests.
"""

import argparse
import json
import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.synchronize import Barrier
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par

from benchmarks.h200.structured_workload import schema_of_20_fields
from benchmarks.thread_clocks import cpu_s, with_threads
from service.tokenizer.grammars import JSON_DEFAULTS
from workers.constraints.limits import parser_limits
from workers.constraints.templates import MAX_TEMPLATES
from workers.constraints.vocabulary import read_vocabulary


@dataclass(slots=True)
class Case:
    """Rows of so many steps under one grammar."""

    vocabulary: LLTokenizer
    num_words: int
    grammar: str
    num_rows: int
    num_steps: int

    def matchers(self, num_rows: int) -> list[LLMatcher]:
        templates = [
            LLMatcher(self.vocabulary, self.grammar, log_level=0, limits=parser_limits())
            for _ in range(min(MAX_TEMPLATES, num_rows))
        ]
        return [templates[row * len(templates) // num_rows].deep_copy() for row in range(num_rows)]


@dataclass(slots=True)
class Times:
    steps_ms: list[float]
    cpu_us: float

    def __str__(self) -> str:
        p50, p99 = np.percentile(self.steps_ms, [50, 99])
        mean = np.mean(self.steps_ms)
        return f"mean {mean:.2f} median {p50:.2f} p99 {p99:.2f} ms, {self.cpu_us:.0f} us a mask"


@contextmanager
def never_resting() -> Iterator[None]:
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(100))

    thread = threading.Thread(target=spin)
    thread.start()
    yield
    stop.set()
    thread.join()


def fill_steps(
    case: Case, matchers: list[LLMatcher], num_threads: int, barrier: Barrier | None = None
) -> Times:
    """barrier: where other processes begin each step, too."""
    executor, threads = with_threads(partial(LLExecutor, num_threads))
    rng = random.Random(1)
    bits = np.zeros((len(matchers), case.num_words), dtype=np.int32)
    rows = [(matcher, row) for row, matcher in enumerate(matchers)]
    times_ms, work_s = [], 0.0
    for _ in range(case.num_steps):
        if barrier is not None:
            barrier.wait()
        start_s, start_cpu_s = time.perf_counter(), time.thread_time()
        work_s -= sum(map(cpu_s, threads))
        fill_next_token_bitmask_par(executor, rows, bits)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
        # A single row is filled by who asks.
        work_s += sum(map(cpu_s, threads)) + time.thread_time() - start_cpu_s
        for row, matcher in enumerate(matchers):
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
            matcher.consume_token(int(rng.choice(allowed)))
    return Times(times_ms, work_s / (case.num_steps * len(matchers)) * 1e6)


def by_threads(case: Case, num_threads: int) -> None:
    matchers = case.matchers(case.num_rows)
    for what in ("new", "again"):
        times = fill_steps(case, matchers, num_threads)
        print(f"{num_threads} threads, {what}: {times}", flush=True)
        for matcher in matchers:
            matcher.reset()
    with never_resting():
        times = fill_steps(case, matchers, num_threads)
    print(f"{num_threads} threads, busy: {times}", flush=True)


def by_processes(case: Case, num_processes: int) -> None:
    """Forked: the vocabulary is theirs, and threads begin in each."""
    fork = multiprocessing.get_context("fork")
    barrier, results = fork.Barrier(num_processes), fork.SimpleQueue()
    num_rows = case.num_rows // num_processes

    def work() -> None:
        results.put(fill_steps(case, case.matchers(num_rows), 1, barrier))

    children = [fork.Process(target=work) for _ in range(num_processes)]
    for child in children:
        child.start()
    each: list[Times] = [results.get() for _ in children]
    for child in children:
        child.join()
    longest = np.max([one.steps_ms for one in each], axis=0).tolist()
    together = Times(longest, float(np.mean([one.cpu_us for one in each])))
    print(f"{num_processes} processes, new: {together}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="masks of a step by number of threads")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    arguments = parser.parse_args()
    facts = json.loads((arguments.folder / "config.json").read_text())
    start_s = time.perf_counter()
    named = facts["eos_token_id"]
    eos = named if isinstance(named, list) else [named]
    vocabulary = read_vocabulary(arguments.folder, facts["vocab_size"], eos)
    print(f"reading the tokenizer: {time.perf_counter() - start_s:.2f} s", flush=True)
    grammar = LLMatcher.grammar_from_json_schema(
        schema_of_20_fields(),
        defaults=JSON_DEFAULTS,  # type: ignore[arg-type]
    )
    num_words = -(-facts["vocab_size"] // 32)
    case = Case(vocabulary, num_words, grammar, arguments.rows, arguments.steps)
    most = 2 * len(os.sched_getaffinity(0))
    counts = [count for count in arguments.threads if count <= most]
    # Before there are threads that a fork would miss.
    for count in counts:
        if count <= case.num_rows:
            by_processes(case, count)
    for count in counts:
        by_threads(case, count)


if __name__ == "__main__":
    main()
