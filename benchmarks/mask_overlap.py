"""Structured output beside plain text over a device that is only pretended: what the host holds up.

    python3 -m benchmarks.mask_overlap FOLDER [--device-us N] [--repeats N] [--slow-us N]

FOLDER: of benchmarks/h200/structured_model.py. Runs the streams of structured_workload.py with the
real engine, scheduler and masks; the device is a clock, as in host_overhead.py: a step's forward
pass ends so many microseconds after the step before, its samples are there at once, or once their
masks are. Rows with a grammar draw random allowed tokens. Prints what benchmarks/h200/structured.py
prints. Goal: as many tokens a second as without constraints, as evenly.
--slow-us: what each mask of one stream takes beside its own time.
"""

import argparse
import json
import random
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from llguidance import LLMatcher

from benchmarks.h200.structured import LateRows, TimedFill, describe, request_of, run
from benchmarks.h200.structured_workload import (
    COMPANIES,
    NUM_STREAMS,
    Stream,
    schema_of_20_fields,
    streams,
)
from benchmarks.host_overhead import (
    MAX_CONTEXT_LEN,
    PAGE_SIZE,
    PretendedDevice,
    StubExecutor,
    scheduler_config,
)
from benchmarks.pretended_steps import result_with
from service.tokenizer.grammars import JSON_DEFAULTS
from workers.constraints.compiler import GrammarCompiler
from workers.constraints.desk import CompilingDesk
from workers.constraints.masks import WORD_BITS, AskedMasks, StepMasks
from workers.constraints.matcher import MaskBits, TokenMatcher
from workers.engine.engine import Engine
from workers.engine.protocol import ModelInfo
from workers.runner.executor import PendingStep, StepOutcome
from workers.sampling.token_masks import find_masks
from workers.scheduler.plan import IntArray, StepPlan, StepResult
from workers.scheduler.scheduler import Scheduler

SAMPLING_S = 0.0001


def draw(bits: MaskBits, rng: random.Random) -> IntArray:
    """A token of each row of bits, int32 (n, num words): one of the first word that has any, from
    a random word on."""
    has_any = bits != 0
    start = rng.randrange(bits.shape[1])
    words = start + has_any[:, start:].argmax(axis=1)
    missed = ~has_any[np.arange(len(bits)), words]
    words[missed] = has_any[missed].argmax(axis=1)
    tokens = []
    for row, word in enumerate(words.tolist()):
        value = int(bits[row, word]) & 0xFFFFFFFF
        allowed = [bit for bit in range(WORD_BITS) if value >> bit & 1]
        tokens.append(word * WORD_BITS + rng.choice(allowed))
    return np.array(tokens, dtype=np.int32)


class _MaskedStep:
    def __init__(self, plan: StepPlan, started_s: float, forward_end_s: float) -> None:
        self.plan = plan
        self._started_s = started_s
        self._end_s = forward_end_s
        self.token_ids = np.full(int(plan.samples.sum()), 7, dtype=np.int32)

    def sample(self, masks: StepMasks, rng: random.Random) -> float:
        """When its tokens are there, on time.perf_counter's axis."""
        plan = self.plan
        self._end_s = max(self._end_s, time.perf_counter()) + SAMPLING_S
        sampling = plan.samples > 0
        positions = (plan.prefix_lens + plan.num_new_tokens)[sampling]
        found = find_masks(plan.slots[sampling], positions, plan.masked_slots, masks)
        if len(found.rows):
            self.token_ids[found.rows] = draw(masks.rows[found.own], rng)
        return self._end_s

    def result(self) -> StepResult:
        return self.outcome().result

    def outcome(self) -> StepOutcome:
        time.sleep(max(self._end_s - time.perf_counter(), 0.0))
        return StepOutcome(result_with(self.plan, self.token_ids), self._started_s, self._end_s, ())


class MaskedExecutor(StubExecutor):
    """As a GPU's: a step with masks is launched in two halves."""

    def __init__(self, device_s: float) -> None:
        self._clock = PretendedDevice(device_s)
        super().__init__(self._clock)
        self._half: _MaskedStep | None = None
        self._rng = random.Random(1)

    def launch(self, plan: StepPlan) -> PendingStep:
        if not len(plan.masked_slots):
            return super().launch(plan)
        begun_s = max(self._clock.free_at_s, time.perf_counter())
        self._sampling.admit(plan.admitted)
        self._inputs.apply_memory_writes(plan)
        if self._graphs.covers(plan):
            self._graphs.replay(plan)
        self._half = _MaskedStep(plan, begun_s, self._clock.start_step())
        return self._half

    def provide(self, masks: StepMasks) -> None:
        if self._half is not None:
            self._clock.free_at_s = self._half.sample(masks, self._rng)
        self._half = None


class SlowFill(TimedFill):
    """The masks of the first request that asks take slow_s longer."""

    def __init__(self, fill: Any, slow_s: float) -> None:
        super().__init__(fill)
        self._slow_s = slow_s
        self._slow: TokenMatcher | None = None

    def __call__(self, rows: Sequence[AskedMasks], bits: MaskBits) -> None:
        super().__call__(rows, bits)
        if rows and self._slow is None:
            self._slow = rows[0].matcher
        if self._slow_s and any(asked.matcher is self._slow for asked in rows):
            time.sleep(self._slow_s)


def build(folder: Path, device_s: float) -> Engine:
    facts = json.loads((folder / "config.json").read_text())
    vocab_size, named = facts["vocab_size"], facts["eos_token_id"]
    eos = named if isinstance(named, list) else [named]
    info = ModelInfo(
        "stub", vocab_size, MAX_CONTEXT_LEN, tuple(eos), "none", PAGE_SIZE, 1, 1, "none", 4096
    )
    config = scheduler_config(vocab_size, can_repeat_slots=True)
    desk = CompilingDesk(GrammarCompiler(folder, vocab_size, eos))
    return Engine(info, Scheduler(config), MaskedExecutor(device_s), grammars=desk)


def own_streams(num_constrained: int, seed: int, vocab_size: int) -> list[Stream]:
    """With tokens of this vocabulary: nobody reads them."""
    return [
        replace(one, prompt=[token_id % vocab_size for token_id in one.prompt])
        for one in streams(num_constrained, seed)
    ]


def measure(engine: Engine, company: str, seed: int, grammar: str, slow_s: float) -> None:
    fill, late = SlowFill(engine._grammars.fill, slow_s), LateRows(engine)
    engine._filler._fill = fill
    own = own_streams(COMPANIES[company], seed, engine.info.vocab_size)
    requests = [request_of(str(i), one, grammar, 0.0) for i, one in enumerate(own)]
    plain = [str(i) for i, one in enumerate(own) if not one.is_constrained]
    num_steps = engine.stats().num_steps
    row = describe(run(engine, requests), plain)
    row["num_steps"] = engine.stats().num_steps - num_steps
    if fill.seconds:
        row["late"] = round(late.count / max(fill.num_masks, 1), 4)
        row["mask_us"] = round(float(np.median(fill.seconds)) * 1e6, 1)
        row["mask_p99_us"] = round(float(np.percentile(fill.seconds, 99)) * 1e6, 1)
    print(json.dumps({"constrained": company, "of": NUM_STREAMS, **row}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="structured output over a pretended device")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device-us", type=float, default=7100.0)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--slow-us", type=float, default=0.0)
    arguments = parser.parse_args()
    grammar = LLMatcher.grammar_from_json_schema(
        schema_of_20_fields(),
        defaults=JSON_DEFAULTS,  # type: ignore[arg-type]
    )
    engine = build(arguments.folder, arguments.device_us / 1e6)
    # Reads the tokenizer, for seconds.
    run(engine, [request_of("first", own_streams(1, 0, engine.info.vocab_size)[0], grammar, 0.0)])
    for repeat in range(arguments.repeats + 1):
        for company in COMPANIES:
            if repeat == 0:
                print("warming up:", end=" ")
            measure(engine, company, 1 + repeat, grammar, arguments.slow_us / 1e6)
    engine.close()


if __name__ == "__main__":
    main()
