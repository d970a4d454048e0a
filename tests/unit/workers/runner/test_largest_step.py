"""The step that a start tries: as large as any, on pages of its own, and nothing is left of it."""

import numpy as np
import pytest
import torch

from tests.fakes import tiny_seq2seq
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.workers.scheduler.driver import make_config
from workers import Engine
from workers.config import EngineConfig
from workers.engine.encoder_input import TextEncoder
from workers.errors import ConfigError
from workers.runner.largest_step import largest_step, without_trace
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams
from workers.scheduler.config import EncoderAccount

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PENALISED = SamplingParams(
    seed=3, max_tokens=6, ignore_eos=True, presence_penalty=1.0, allowed_token_ids=(7, 8, 9)
)
PROMPT = list(range(5, 40))


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory) -> str:
    name = getattr(request, "param", "llama3")
    return save_tiny_model(NATIVE[name], tmp_path_factory.mktemp(name))


def runner_of(engine: Engine) -> ModelRunner:
    return engine._executor._run_step.__self__


def lazy_tables(runner: ModelRunner) -> list[torch.Tensor]:
    """What sampling makes of all slots and tokens once the first request needs it."""
    penalties, allowed = runner._sampling._penalties, runner._sampling._allowed
    return [penalties.prompt_mask, penalties.output_counts, allowed.mask]


def made_in(runner: ModelRunner, config: EngineConfig) -> list[int]:
    """Their rows while the largest step samples."""
    seen, sample = [], runner._sample

    def look(begun):
        seen.append([len(table) for table in lazy_tables(runner)])
        return sample(begun)

    runner._sample = look
    runner.try_largest_step(config)
    runner._sample = sample
    (rows,) = seen
    return rows


@pytest.mark.parametrize(
    ("changes", "num_rows", "num_tokens"),
    [
        ({}, 8, 64),
        ({"max_step_tokens": 61}, 8, 61),
        ({"max_step_tokens": 3}, 3, 3),
        ({"max_step_tokens": 4096, "num_pages": 1000}, 8, 8 * 63),
        ({"max_step_tokens": 4096, "num_pages": 20}, 8, 8 * 8),
        ({"max_step_tokens": 4096, "num_pages": 3}, 2, 2 * 4),
        ({"page_size": 1, "num_pages": 401}, 8, 64),
    ],
)
def test_it_has_all_tokens_and_rows_that_a_step_can_have(changes, num_rows, num_tokens):
    config = make_config(**changes)
    plan = largest_step(config)
    assert (plan.batch_size, plan.num_tokens) == (num_rows, num_tokens)
    assert int(plan.num_new_tokens.sum()) == num_tokens
    places = plan.out_cache_loc
    assert len(np.unique(places)) == num_tokens
    assert places.min() >= config.page_size
    assert places.max() < config.num_pages * config.page_size
    assert plan.samples.all()
    assert [one.slot for one in plan.admitted] == plan.slots.tolist()


def test_its_rows_have_as_many_drafts_as_a_step_takes():
    for max_draft_tokens, num_samples in ((0, 1), (2, 3), (9, 4)):
        plan = largest_step(make_config(max_draft_tokens=max_draft_tokens))
        # Of 64 tokens, half of what 8 rows of one leave.
        assert plan.samples.tolist() == [num_samples] * 8


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("folder", ["llama3", "qwen2_windowed"], indirect=True)
def test_it_runs_and_leaves_nothing(folder, page_size):
    config = EngineConfig(model=folder, page_size=page_size, num_pages=64, max_running_requests=6)
    engine = Engine.from_config(config)
    expected = [one.token_ids for one in engine.generate([PROMPT] * 2, [GREEDY, PENALISED])]
    engine.close()
    engine = Engine.from_config(config)
    runner = runner_of(engine)
    assert made_in(runner, config) == [6, 6, 6]
    assert [len(table) for table in lazy_tables(runner)] == [0, 0, 0]
    pool = runner._inputs._token_to_kv_pool
    for layer_id in range(pool.num_layers):
        assert all(not buffer.any() for buffer in pool.get_kv_buffer(layer_id))
    results = engine.generate([PROMPT] * 2, [GREEDY, PENALISED])
    assert [one.token_ids for one in results] == expected
    engine.close()


@pytest.mark.parametrize(
    ("num_pages", "num_rows", "shares"), [(80, 8, 7), (31, 6, 1), (28, 3, 1), (26, 1, 0)]
)
def test_one_input_is_read_and_the_others_have_been(num_pages, num_rows, shares):
    """An encoder of 100 tokens takes 25 pages."""
    encoder = EncoderAccount(num_pages, TextEncoder(max_tokens=100, vocab_size=64))
    plan = largest_step(make_config(encoder=encoder, page_size=4, num_pages=100))
    first, *others = plan.encoder.grants
    assert plan.batch_size == num_rows == 1 + len(others)
    assert (first.num_tokens, len(first.source.token_ids)) == (100, 100)
    assert [(one.slot, one.num_tokens, one.source) for one in others] == [
        (slot, 4 * shares, None) for slot in range(1, num_rows)
    ]
    pages = np.concatenate([grant.pages for grant in plan.encoder.grants])
    assert len(np.unique(pages)) == len(pages)
    assert (pages.min(), pages.max() < num_pages) == (1, True)
    cleared = without_trace(plan, 4).encoder.cleared
    assert sorted(cleared // 4) == sorted(np.repeat(pages, 4))


def test_an_encoder_decoder_runs_it_and_keeps_nothing(tmp_path):
    config = EngineConfig(
        model=str(tiny_seq2seq.save("bart", tmp_path)), page_size=16, max_running_requests=3
    )
    engine = Engine.from_config(config)
    runner = runner_of(engine)
    runner.try_largest_step(config)
    pool = runner._inputs._token_to_kv_pool
    for layer_id in range(4):
        assert all(not buffer.any() for buffer in pool.get_kv_buffer(layer_id))
    source = tiny_seq2seq.random_source("bart", 9, seed=1)
    (result,) = engine.generate([[2]], GREEDY, [source])
    truth = tiny_seq2seq.Reference("bart", GREEDY.max_tokens, 1.0).truth(source, (2,))
    assert result.token_ids == truth.token_ids
    engine.close()


def test_too_little_memory_is_said_at_the_start(folder, monkeypatch):
    config = EngineConfig(model=folder, page_size=16, num_pages=64, max_running_requests=6)
    engine = Engine.from_config(config)

    def refuse(self, begun):
        raise torch.OutOfMemoryError("injected")

    monkeypatch.setattr(ModelRunner, "_sample", refuse)
    with pytest.raises(ConfigError, match="lower gpu_memory_fraction"):
        runner_of(engine).try_largest_step(config)
    engine.close()
