"""What masks cost on this machine's processors: a step's rows, filled by more and more threads.

    python3 -m benchmarks.mask_threads FOLDER [--rows N]

FOLDER: of benchmarks/h200/structured_model.py. Every row has a matcher of its own, under the schema
of 20 fields, a copy of one of as many templates as an engine has, and draws random allowed tokens.
A line for each number of threads: milliseconds that the masks of a step take, of new matchers and
of such that have been through their text once.
"""

import argparse
import os
import random
import time
from pathlib import Path

import numpy as np
from llguidance import LLExecutor, LLMatcher
from llguidance.hf import from_tokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from transformers import AutoTokenizer

from benchmarks.h200.structured_workload import schema_of_20_fields
from service.tokenizer.grammars import JSON_DEFAULTS
from workers.constraints.compiler import NUM_TEMPLATES
from workers.constraints.limits import parser_limits

NUM_STEPS = 160


def step_ms(matchers: list[LLMatcher], executor: LLExecutor, num_words: int) -> list[float]:
    rng = random.Random(1)
    bits = np.zeros((len(matchers), num_words), dtype=np.int32)
    times_ms = []
    for _ in range(NUM_STEPS):
        start_s = time.perf_counter()
        rows = [(matcher, row) for row, matcher in enumerate(matchers)]
        fill_next_token_bitmask_par(executor, rows, bits)
        times_ms.append((time.perf_counter() - start_s) * 1e3)
        for row, matcher in enumerate(matchers):
            allowed = np.flatnonzero(np.unpackbits(bits[row].view(np.uint8), bitorder="little"))
            matcher.consume_token(int(rng.choice(allowed)))
    return times_ms


def text(times_ms: list[float]) -> str:
    p50, p99 = np.percentile(times_ms, [50, 99])
    return f"mean {np.mean(times_ms):.2f} median {p50:.2f} p99 {p99:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description="masks of a step by number of threads")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.folder)
    start_s = time.perf_counter()
    vocabulary = from_tokenizer(tokenizer, len(tokenizer), [tokenizer.eos_token_id])
    print(f"reading the tokenizer: {time.perf_counter() - start_s:.2f} s", flush=True)
    grammar = LLMatcher.grammar_from_json_schema(
        schema_of_20_fields(),
        defaults=JSON_DEFAULTS,  # type: ignore[arg-type]
    )
    for num_threads in (1, 2, 4, 8, 16, 32):
        if num_threads > 2 * (os.cpu_count() or 1):
            break
        executor = LLExecutor(num_threads)
        templates = [
            LLMatcher(vocabulary, grammar, log_level=0, limits=parser_limits())
            for _ in range(NUM_TEMPLATES)
        ]
        matchers = [
            templates[row * NUM_TEMPLATES // arguments.rows].deep_copy()
            for row in range(arguments.rows)
        ]
        first = step_ms(matchers, executor, -(-len(tokenizer) // 32))
        for matcher in matchers:
            matcher.reset()
        again = step_ms(matchers, executor, -(-len(tokenizer) // 32))
        print(f"{num_threads} threads: new {text(first)}, again {text(again)}", flush=True)


if __name__ == "__main__":
    main()
