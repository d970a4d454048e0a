"""The pool after requests whose keys and values are no numbers: an engine with a real model."""

import pytest
import torch

from attention.kernels import torch_extend
from tests.fakes.tiny_models import NATIVE, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams

BAD_TOKEN = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(save_tiny_model(NATIVE["llama2_mha"], tmp_path_factory.mktemp("llama2")))


@pytest.fixture
def bad_engine(folder):
    engine, runner = build_bad(folder)
    yield engine, runner
    engine.close()


def build_bad(folder, **changes):
    """(engine, its runner): BAD_TOKEN's embedding is NaN; memory for one request at a time."""
    settings = {"num_pages": 6, "page_size": 16, "max_step_tokens": 32, **changes}
    config = EngineConfig(model=folder, max_context_len=96, **settings)
    runner = ModelRunner(config, SingleRank(), resolve_device(config), lambda done, total: None)
    runner._model.get_parameter("model.embed_tokens.weight").data[BAD_TOKEN] = torch.nan
    return Engine.of_runner(config, runner), runner


def has_nan(runner: ModelRunner) -> bool:
    pool = runner._backend.token_to_kv_pool
    layers = range(pool.num_layers)
    return any(buffer.isnan().any() for i in layers for buffer in pool.get_kv_buffer(i))


@pytest.mark.parametrize("bad_position", [0, 40, 59])
def test_nan_is_gone_from_memory_when_the_next_request_runs(bad_engine, bad_position):
    engine, runner = bad_engine
    good, bad = random_prompt(20), random_prompt(60, seed=1)
    bad[bad_position] = BAD_TOKEN
    (before,) = engine.generate([good], GREEDY)
    (failed,) = engine.generate([bad], GREEDY)
    assert failed.finish_reason is FinishReason.ERROR
    assert has_nan(runner)
    (after,) = engine.generate([good], GREEDY)
    assert after.token_ids == before.token_ids
    assert not has_nan(runner)
    engine.check_integrity()


@pytest.mark.parametrize(("bad_position", "num_cached"), [(40, 32), (3, 0)])
def test_a_chunk_of_numbers_outlives_its_aborted_prefill_and_no_other_does(
    bad_engine, bad_position, num_cached
):
    engine, runner = bad_engine
    prompt = random_prompt(60, seed=1)
    (before,) = engine.generate([prompt[:36]], GREEDY)
    engine._scheduler._pool.free(engine._scheduler._cache.evict(100))
    bad = [*prompt]
    bad[bad_position] = BAD_TOKEN
    engine.submit(GenerateRequest("bad", bad, GREEDY))
    engine.step()
    engine.step()
    engine.abort("bad")
    while engine.has_work:
        engine.step()
    (after,) = engine.generate([prompt[:36]], GREEDY)
    assert after.num_cached_tokens == num_cached
    assert after.token_ids == before.token_ids
    assert not has_nan(runner)
    engine.check_integrity()


def test_nan_of_a_prefill_that_was_aborted_is_gone_too(bad_engine):
    engine, runner = bad_engine
    engine.submit(GenerateRequest("bad", [BAD_TOKEN, *random_prompt(59)], GREEDY))
    engine.step()
    engine.abort("bad")
    while engine.has_work:
        engine.step()
    assert has_nan(runner)
    (after,) = engine.generate([random_prompt(20)], GREEDY)
    assert after.finish_reason is FinishReason.LENGTH
    assert not has_nan(runner)


@pytest.mark.parametrize("model", ["mistral", "qwen2_windowed"])
@pytest.mark.parametrize("bad_position", [0, 3, pytest.param(20, marks=pytest.mark.nightly), 40])
@pytest.mark.parametrize("max_step_tokens", [1, 32, 64])
def test_what_a_window_no_longer_shows_vouches_for_nothing(
    model, bad_position, max_step_tokens, tmp_path, monkeypatch
):
    """The last layers' window does not reach from a chunk's last token to the one without a number:
    its pages go to nobody before they are cleared, neither by the cache nor by the stock."""
    # A block of queries with NaN among its keys has NaN only.
    monkeypatch.setattr(torch_extend, "QUERY_BLOCK", 8)
    folder = str(save_tiny_model(NATIVE[model], tmp_path))
    engine, runner = build_bad(folder, page_size=4, num_pages=24, max_step_tokens=max_step_tokens)
    assert runner._retentions[0].num_tokens < 16
    good, bad = random_prompt(20), random_prompt(60, seed=1)
    bad[bad_position] = BAD_TOKEN
    (before,) = engine.generate([good], GREEDY)
    for _ in range(2):
        (failed,) = engine.generate([bad], GREEDY)
        assert failed.finish_reason is FinishReason.ERROR
        assert failed.num_cached_tokens <= bad_position
        (after,) = engine.generate([good], GREEDY)
        assert after.token_ids == before.token_ids
        assert not has_nan(runner)
        engine.check_integrity()
    engine.close()
