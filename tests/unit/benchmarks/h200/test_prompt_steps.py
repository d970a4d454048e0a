"""The sweep over steps' tokens: one step holds what its row says."""

import random

from benchmarks.h200.prompt_steps import NUM_PROMPTS, step_seconds


class CountingEngine:
    def __init__(self):
        self.prompts = []

    def generate(self, prompts, params):
        assert params.max_tokens == 1
        self.prompts.append(prompts)


def test_a_step_holds_as_many_tokens_as_it_says() -> None:
    engine = CountingEngine()
    assert step_seconds(engine, 1024, random.Random(0)) > 0.0
    (prompts,) = engine.prompts
    assert len(prompts) == NUM_PROMPTS
    assert sum(map(len, prompts)) == 1024
