"""Adapters by turns in fewer slots: each has weights of its own, and no request is lost."""

from types import SimpleNamespace

import pytest

from benchmarks.h200.cycling_adapters import run_round, write_adapters
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason

RANK = 4


def test_more_adapters_than_slots_lose_no_request(tmp_path) -> None:
    config = EngineConfig(device="cpu", num_cpu_threads=1, max_loras=2, max_lora_rank=RANK)
    engine = Engine.from_config(config)
    try:
        info = engine.info.adapters
        assert info is not None
        adapters = write_adapters(tmp_path, info, RANK, 5)
        assert len({one.key for one in adapters}) == 5
        for _ in range(2):
            made = run_round(engine, adapters, 12, 3, vocab_size=1000)
            assert (made.num_requests, made.num_whole) == (12, 12)
            assert made.tokens_a_second > 0
        engine.check_integrity()
    finally:
        engine.close()


def test_requests_that_end_early_are_not_whole() -> None:
    def generate(prompts, sampling, adapters):
        assert adapters == ["a", "b", "a", "b"]
        reasons = FinishReason.LENGTH, FinishReason.ERROR, FinishReason.ABORT, FinishReason.LENGTH
        sizes = 3, 3, 0, 2
        return [
            SimpleNamespace(finish_reason=reason, token_ids=[0] * size)
            for reason, size in zip(reasons, sizes, strict=True)
        ]

    made = run_round(SimpleNamespace(generate=generate), ["a", "b"], 4, 3)
    assert (made.num_requests, made.num_whole) == (4, 1)


def test_a_model_without_these_projections_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="no module's name ends with one of"):
        write_adapters(tmp_path, SimpleNamespace(modules={"x.up_proj": (2, 2)}), 1, 1)
