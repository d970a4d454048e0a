"""What becomes of the masks of an engine's steps, moment by moment: wrapped around one engine."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from benchmarks.thread_clocks import cpu_s
from workers.constraints import compiler
from workers.constraints.grammar_matcher import GrammarMatcher
from workers.engine.engine import Engine


@dataclass(slots=True)
class Batch:
    """Masks that are made together; on time.perf_counter's axis. native_threads_s: processor time
    of each native thread meanwhile."""

    num_rows: int
    thread: str
    submitted_s: float
    started_s: float
    native_started_s: float = 0.0
    native_ended_s: float = 0.0
    ended_s: float = 0.0
    own_cpu_s: float = 0.0
    native_threads_s: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Step:
    """Of one turn of an engine that had masks. wall_s, cpu_s: of the engine's thread, by what it
    did. free_s, patience_s: from the masks' being asked for until waiting for them costs something
    and until the last is given up. needed_s: until the step had use for them. num_rows: of the plan
    that was launched. ran_rows, ran_s: of the step that was committed, and how long it ran."""

    wall_s: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, float] = field(default_factory=dict)
    num_asked: int = 0
    num_late: int = 0
    num_consumed: int = 0
    begun_s: float = 0.0
    free_s: float = 0.0
    patience_s: float = 0.0
    needed_s: float = 0.0
    num_rows: int = 0
    ran_rows: int = 0
    ran_s: float = 0.0

    def add(self, what: str, wall_s: float, cpu_s: float) -> None:
        self.wall_s[what] = self.wall_s.get(what, 0.0) + wall_s
        self.cpu_s[what] = self.cpu_s.get(what, 0.0) + cpu_s


class MaskTimeline:
    """native_threads: those that make masks, by the kernel's ids. native_cpu_s: what all of them
    took; batches that were made at the same time count each other's."""

    def __init__(self, engine: Engine, native_threads: Sequence[int]) -> None:
        self.batches: list[Batch] = []
        self.steps: list[Step] = []
        self._engine: Any = engine
        self._native_threads = native_threads
        self._step = Step()
        self._own = threading.local()
        self._submitted_s = 0.0
        self.native_cpu_s = 0.0

    @contextmanager
    def watching(self) -> Iterator["MaskTimeline"]:
        engine = self._engine
        filler, scheduler, executor = engine._filler, engine._scheduler, engine._executor
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            (filler, "_fill", self._fill(filler._fill)),
            (filler, "begin", self._begin(filler.begin)),
            (filler, "finish", self._finish(filler.finish)),
            (scheduler, "run_again", self._run_again(scheduler.run_again)),
            (executor, "launch", self._launch(executor.launch)),
            (engine, "_step", self._whole(engine._step)),
            (compiler, "fill_next_token_bitmask_par", self._native()),
            (GrammarMatcher, "consume", self._consume()),
            (GrammarMatcher, "take_forced", self._timed("forced", GrammarMatcher.take_forced)),
            (executor, "provide", self._timed("provide", executor.provide)),
            (scheduler, "schedule", self._timed("schedule", scheduler.schedule)),
            (scheduler, "commit", self._timed("commit", scheduler.commit)),
        ]
        before = [(owner, name, vars(owner).get(name)) for owner, name, _ in places]
        for owner, name, wrapped in places:
            setattr(owner, name, wrapped)
        start_s = sum(map(cpu_s, self._native_threads))
        try:
            yield self
        finally:
            self.native_cpu_s = sum(map(cpu_s, self._native_threads)) - start_s
            for owner, name, was in before:
                if was is None:
                    delattr(owner, name)
                else:
                    setattr(owner, name, was)

    def as_rows(self) -> list[dict[str, Any]]:
        return [asdict(one) for one in (*self.steps, *self.batches)]

    def _timed(self, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            step, start_s, start_cpu_s = self._step, time.perf_counter(), time.thread_time()
            try:
                return call(*args, **kwargs)
            finally:
                step.add(what, time.perf_counter() - start_s, time.thread_time() - start_cpu_s)

        return wrapped

    def _whole(self, call: Callable[[], Any]) -> Callable[[], Any]:
        timed = self._timed("turn", call)

        def wrapped() -> Any:
            self._step = Step()
            outputs = timed()
            if self._step.num_asked:
                self.steps.append(self._step)
            return outputs

        return wrapped

    def _begin(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("begin", call)

        def wrapped(step_id: int, rows: Any, deadline: Any) -> Any:
            self._submitted_s = time.perf_counter()
            begun = timed(step_id, rows, deadline)
            step = self._step
            step.num_asked, step.begun_s = len(rows), self._submitted_s
            step.free_s = deadline.free_until_s - self._submitted_s
            step.patience_s = begun.last_until_s - self._submitted_s
            return begun

        return wrapped

    def _finish(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("finish", call)

        def wrapped(begun: Any) -> Any:
            if self.steps:
                self.steps[-1].needed_s = time.perf_counter() - self._submitted_s
            return timed(begun)

        return wrapped

    def _run_again(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(plan: Any, rows: Any) -> None:
            self._step.num_late += len(rows)
            call(plan, rows)

        return wrapped

    def _launch(self, call: Callable[..., Any]) -> Callable[..., Any]:
        timed = self._timed("launch", call)

        def wrapped(plan: Any) -> Any:
            self._step.num_rows = len(plan.slots)
            return _Pending(timed(plan), len(plan.slots), self)

        return wrapped

    def _consume(self) -> Callable[..., Any]:
        timed = self._timed("consume", GrammarMatcher.consume)

        def wrapped(matcher: GrammarMatcher, token_id: int) -> None:
            self._step.num_consumed += 1
            timed(matcher, token_id)

        return wrapped

    def _fill(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(rows: Any, bits: Any) -> None:
            name = threading.current_thread().name
            batch = Batch(len(rows), name, self._submitted_s, time.perf_counter())
            self._own.batch, start_cpu_s = batch, time.thread_time()
            call(rows, bits)
            batch.own_cpu_s = time.thread_time() - start_cpu_s
            batch.ended_s = time.perf_counter()
            self.batches.append(batch)

        return wrapped

    def _native(self) -> Callable[..., Any]:
        call, threads = compiler.fill_next_token_bitmask_par, self._native_threads

        def wrapped(*args: Any) -> None:
            batch: Batch = self._own.batch
            before = [cpu_s(one) for one in threads]
            batch.native_started_s = time.perf_counter()
            call(*args)
            batch.native_ended_s = time.perf_counter()
            after = [cpu_s(one) for one in threads]
            batch.native_threads_s = np.subtract(after, before).tolist()

        return wrapped


class _Pending:
    """A step in flight, its wait timed."""

    def __init__(self, step: Any, num_rows: int, timeline: MaskTimeline) -> None:
        self._num_rows = num_rows
        self._timeline = timeline
        self._outcome = timeline._timed("device", step.outcome)

    def result(self) -> Any:
        return self.outcome().result

    def outcome(self) -> Any:
        outcome, step = self._outcome(), self._timeline._step
        step.ran_rows, step.ran_s = self._num_rows, outcome.finished_s - outcome.started_s
        return outcome
