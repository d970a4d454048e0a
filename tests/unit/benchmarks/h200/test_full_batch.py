"""A full batch's tokens a second are those between the last first token and the first last one."""

import itertools
from types import SimpleNamespace

import pytest

from benchmarks.h200 import full_batch
from benchmarks.h200.full_batch import tokens_a_second
from workers import Engine
from workers.config import EngineConfig


def test_tokens_between_full_and_ending_are_counted(monkeypatch):
    """By a clock that counts steps, of which each brings every stream a token."""
    clock = itertools.count()
    steps = SimpleNamespace(perf_counter=lambda: float(next(clock)))
    monkeypatch.setattr(full_batch, "time", steps)
    engine = Engine.from_config(EngineConfig(device="cpu", num_cpu_threads=1))
    try:
        assert tokens_a_second(engine, 4, 12, vocab_size=1000) == pytest.approx(4.0, rel=0.2)
    finally:
        engine.close()
