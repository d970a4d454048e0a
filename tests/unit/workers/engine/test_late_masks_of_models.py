"""Rows run again whatever else is kept of a request, but where a state has taken their token in."""

import msgspec
import pytest

from tests.fakes import tiny_seq2seq
from tests.fakes.third_of_vocabulary import ThirdsCompiler
from tests.fakes.tiny_models import NATIVE, random_prompt, save_tiny_model
from tests.fakes.tiny_state_models import save_state_model
from tests.fakes.tiny_vision import image, prompt_of, save_vision_model
from tests.unit.workers.engine.test_forced_tokens import told
from tests.unit.workers.engine.test_grammars import run_together
from tests.unit.workers.engine.test_late_masks import make_late
from workers.config import EngineConfig
from workers.constraints.desk import CompilingDesk
from workers.constraints.mask_deadline import NEVER
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams

NUM_TOKENS = 30
SAMPLINGS = [
    ("a", SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)),
    ("", SamplingParams(temperature=0.0, max_tokens=2 * NUM_TOKENS, ignore_eos=True)),
    ("b", SamplingParams(seed=3, max_tokens=NUM_TOKENS, ignore_eos=True, frequency_penalty=0.5)),
    ("", SamplingParams(seed=4, max_tokens=2 * NUM_TOKENS, ignore_eos=True)),
]


def texts_of(prompts):
    """Requests of token ids, every other one under a grammar."""
    return [
        GenerateRequest(f"r{index}", prompt, sampling, grammar=grammar)
        for index, (prompt, (grammar, sampling)) in enumerate(zip(prompts, SAMPLINGS, strict=True))
    ]


def windowed(folder):
    prompts = [random_prompt(20 + 7 * i, seed=i) for i in range(4)]
    return save_tiny_model(NATIVE["qwen2_windowed"], folder), texts_of(prompts)


def encoded(folder):
    requests = texts_of([[2], [2, 7, 9], [2], [2, 5]])
    sources = [tiny_seq2seq.random_source("bart", 5 + n, seed=n) for n in range(4)]
    return tiny_seq2seq.save("bart", folder), [
        msgspec.structs.replace(one, encoder_input=source)
        for one, source in zip(requests, sources, strict=True)
    ]


def pictured(folder):
    wide, tall = image(1, 4, 10), image(2, 12, 6)
    prompts = [prompt_of(3, tall, 4), prompt_of(5, wide, 7), prompt_of(wide, 2), prompt_of(12)]
    return save_vision_model(folder), [
        msgspec.structs.replace(one, content_spans=prompt.spans, media=prompt.images)
        for one, prompt in zip(texts_of([one.ids for one in prompts]), prompts, strict=True)
    ]


def stateful(folder):
    prompts = [list(range(3, 12 + i)) for i in range(4)]
    save_state_model("lfm2", folder)
    return folder, texts_of(prompts)


def start(folder, **settings):
    config = EngineConfig(
        model=str(folder),
        max_context_len=128,
        num_pages=60,
        max_running_requests=4,
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **settings,
    )
    runner = ModelRunner(config, SingleRank(), resolve_device(config), lambda done, total: None)
    desk = CompilingDesk(ThirdsCompiler(runner.facts.vocab_size))
    runner.grammar_desk = lambda: desk
    return Engine.of_runner(config, runner)


def in_time(folder, requests, **settings):
    engine = start(folder, **settings)
    engine._patience.deadline = lambda plan: NEVER
    try:
        return told(run_together(engine, *requests))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (windowed, {"page_size": 4}),
        (encoded, {"page_size": 16}),
        (pictured, {"page_size": 16}),
    ],
)
def test_texts_are_those_of_masks_in_time(make, settings, tmp_path) -> None:
    folder, requests = make(tmp_path)
    expected = in_time(folder, requests, **settings)
    engine = start(folder, **settings)
    again = make_late(engine)
    try:
        assert told(run_together(engine, *requests)) == expected
        assert set(again.request_ids) == {"r0", "r2"}
    finally:
        engine.close()


def test_a_row_whose_state_has_taken_its_token_in_is_waited_for(tmp_path) -> None:
    folder, requests = stateful(tmp_path)
    expected = in_time(folder, requests)
    engine = start(folder)
    again = make_late(engine)
    try:
        assert told(run_together(engine, *requests)) == expected
        assert not again.request_ids
    finally:
        engine.close()
