"""Outputs obey their grammars on a GPU: by replayed graphs and eagerly, beside rows without one."""

import json

import pytest

from tests.gpu.engines import BUILTIN, share_equal
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.unit.workers.engine import test_forced_tokens as forced
from tests.unit.workers.engine.test_grammars import MIXED, TOKENIZER, check, request_of, run
from tests.unit.workers.engine.test_late_masks import make_late
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU


def engine_of(**settings):
    return Engine.from_config(EngineConfig(**BUILTIN, check_integrity_when_idle=True, **settings))


def texts(results):
    return [one.token_ids for one in results]


@pytest.mark.parametrize(
    "settings",
    [{}, {"enable_cuda_graphs": False}, {"page_size": 16, "num_pages": 5, "max_step_tokens": 48}],
    ids=["graphs", "eager", "few_pages_and_chunks"],
)
def test_every_output_obeys_its_grammar(settings) -> None:
    engine = engine_of(**settings)
    try:
        for _ in range(3):
            check(run(engine, *MIXED))
            while engine.prepare_while_idle():
                pass
    finally:
        engine.close()


def test_constrained_rows_leave_greedy_ones_beside_them_alone() -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    prompts = [list(range(10, 40)), list(range(100, 120))]
    plain = [GenerateRequest(f"p{i}", prompt, greedy) for i, prompt in enumerate(prompts)]
    engine = engine_of()
    try:
        while engine.prepare_while_idle():
            pass
        alone = texts(run(engine, *plain))
        under_grammar = request_of(60, MIXED[0].grammar, temperature=0.0, logprobs=None)
        *beside, constrained = run(engine, *plain, under_grammar)
        # Batches of other sizes take other kernels: near ties may turn.
        assert share_equal(texts(beside), alone) > 0.8
        assert constrained.finish_reason is FinishReason.STOP
    finally:
        engine.close()


def test_forced_tokens_come_in_runs_and_are_what_masks_would_have_given() -> None:
    """By replays and eagerly, beside rows of other kinds."""
    by_settings = {}
    for name, settings in {"graphs": {}, "eager": {"enable_cuda_graphs": False}}.items():
        engine = engine_of(**settings)
        try:
            while engine.prepare_while_idle():
                pass
            results = run(engine, *forced.requests())
            fixed = results[4]
            assert TOKENIZER.decode(fixed.token_ids) == forced.TEXT
            for index in (0, 2, 3, 5):
                text = TOKENIZER.decode(results[index].token_ids)
                assert list(json.loads(text)) == forced.NAMES
            assert all(len(one.logprobs) == len(one.token_ids) for one in results[:5])
            (alone,) = run(engine, forced.requests()[0])
            num_steps = engine.stats().num_steps
            (again,) = run(engine, forced.requests()[0])
            assert engine.stats().num_steps - num_steps < 0.6 * len(again.token_ids)
            by_settings[name] = texts([*results[2:3], *results[4:5], alone])
        finally:
            engine.close()
    assert share_equal(by_settings["graphs"], by_settings["eager"]) > 0.5


@pytest.mark.parametrize("settings", [{}, {"enable_cuda_graphs": False}], ids=["graphs", "eager"])
def test_forced_tokens_see_the_keys_of_those_before_them(settings) -> None:
    """Rows of one slot in one step, few enough for kernels that store keys while they attend."""
    engine = engine_of(**settings)
    try:
        while engine.prepare_while_idle():
            pass
        request = forced.requests()[4]
        (fixed,) = run(engine, request)
        prompt = request.prompt_token_ids
        as_prompt = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        (read,) = engine.generate([prompt + fixed.token_ids], as_prompt)
        expected = [one.logprob for one in read.prompt_logprobs[len(prompt) :]]
        assert [one.logprob for one in fixed.logprobs] == pytest.approx(expected, abs=0.5)
    finally:
        engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"deterministic": True, "dtype": "bfloat16"}, marks=NEEDS_FA3),
        {"enable_cuda_graphs": False, "dtype": "float32"},
    ],
    ids=["graphs", "eager-float32"],
)
def test_rows_whose_masks_are_late_run_again_and_say_the_same(settings) -> None:
    """Steps that run rows again have other numbers of rows, which bits may not depend on here."""
    requests = [
        request_of(70, MIXED[0].grammar, temperature=0.0, logprobs=None),
        request_of(72, MIXED[0].grammar, seed=3, logprobs=None, frequency_penalty=0.4),
        request_of(71, "", temperature=0.0, logprobs=None, max_tokens=80, ignore_eos=True),
    ]
    engine = engine_of(**settings)
    try:
        while engine.prepare_while_idle():
            pass
        in_time = texts(run(engine, *requests))
        again = make_late(engine)
        late = texts(run(engine, *requests))
        assert set(again.request_ids) == {"r70", "r72"}
        assert late == in_time
        check(run(engine, *MIXED))
    finally:
        engine.close()
