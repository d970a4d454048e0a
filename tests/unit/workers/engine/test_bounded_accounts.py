"""Windows in memory of their own: the same text of fewer bytes, and no freed page is seen."""

from dataclasses import replace

import pytest
import torch

from tests.fakes.tiny_models import MIXTURES, NATIVE, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.parallel.group import SingleRank
from workers.runner import sizing
from workers.runner.model_runner import ModelRunner
from workers.runner.sizing import resolve_device
from workers.runner.step_inputs import StepInputBuilder
from workers.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
MODELS = {
    # All layers have a window, or some, or some and caps, or some and sinks.
    "mistral": NATIVE["mistral"],
    "qwen2": NATIVE["qwen2_windowed"],
    "gemma2": NATIVE["gemma2"],
    "gpt_oss": MIXTURES["gpt_oss"],
}
PROMPTS = [random_prompt(30 + 7 * i, seed=i) for i in range(5)]
PROMPTS += [PROMPTS[0][:24] + random_prompt(9, seed=9), PROMPTS[1] + [5], PROMPTS[1]]


# What the others show is shown for these every night.
SLOW = {"mistral", "qwen2", "gpt_oss"}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=pytest.mark.nightly if name in SLOW else ()) for name in MODELS
    ],
)
def folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return str(save_tiny_model(MODELS[request.param], folder))


def build(folder, **changes):
    """(engine, its runner)."""
    settings = {"num_pages": 60, "max_step_tokens": 23, "max_running_requests": 4, "page_size": 4}
    config = EngineConfig(model=folder, max_context_len=128, **{**settings, **changes})
    runner = ModelRunner(config, SingleRank(), resolve_device(config), lambda done, total: None)
    return Engine.of_runner(config, runner), runner


def texts(engine):
    """Twice, so that the second time finds prefixes."""
    results = [engine.generate(PROMPTS, GREEDY) for _ in range(2)]
    engine.check_integrity()
    engine.close()
    values = [[entry.logprob for entry in one.logprobs] for run in results for one in run]
    return [one.token_ids for run in results for one in run], torch.tensor(values)


@pytest.fixture(scope="module")
def expected(folder):
    """Where one account keeps every token of every layer."""
    with pytest.MonkeyPatch.context() as patched:
        choose = sizing.choose_routes

        def without_accounts(*arguments):
            return replace(choose(*arguments), has_bounded_accounts=False)

        patched.setattr(sizing, "choose_routes", without_accounts)
        engine, runner = build(folder)
        assert len(runner.pages_by_account) == 1
        return texts(engine)


def check(found, expected):
    assert found[0] == expected[0]
    torch.testing.assert_close(found[1], expected[1], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"page_size": 1, "num_pages": 240},
        pytest.param({"page_size": 16, "num_pages": 15}, marks=pytest.mark.nightly),
        {"max_step_tokens": 400},
        {"num_pages": 40, "max_running_requests": 8},
        pytest.param({"enable_prefix_cache": False}, marks=pytest.mark.nightly),
        {"enable_mixed_batches": False},
    ],
    ids=str,
)
def test_texts_do_not_depend_on_where_windows_are_kept(folder, expected, changes) -> None:
    engine, runner = build(folder, **changes)
    assert len(runner.pages_by_account) == 2
    check(texts(engine), expected)


@pytest.mark.parametrize("enable_prefix_cache", [True, False])
def test_no_output_depends_on_a_page_that_was_given_back(
    folder, expected, enable_prefix_cache, monkeypatch
) -> None:
    """What is free when a step is planned is NaN when it runs."""
    engine, runner = build(folder, enable_prefix_cache=enable_prefix_cache)
    scheduler, pool = engine._scheduler, runner._backend.token_to_kv_pool
    free_at_step: dict[int, list] = {}
    schedule, build_inputs = scheduler.schedule, StepInputBuilder.build
    num_poisoned = []

    def schedule_and_note():
        plan = schedule()
        if plan is not None:
            free_at_step[plan.step_id] = [one.free_pages() for one in scheduler._pool._allocators]
        return plan

    def poison_and_build(self, plan, attn_backend):
        for account, pages in enumerate(free_at_step.pop(plan.step_id)):
            for own_pool, own_account in zip(pool._pools, pool._accounts, strict=True):
                if own_account == account:
                    num_poisoned.append(len(pages))
                    for layer_id in range(own_pool.num_layers):
                        for buffer in own_pool.get_kv_buffer(layer_id):
                            buffer[pages.tolist()] = torch.nan
        return build_inputs(self, plan, attn_backend)

    monkeypatch.setattr(scheduler, "schedule", schedule_and_note)
    monkeypatch.setattr(StepInputBuilder, "build", poison_and_build)
    check(texts(engine), expected)
    assert sum(num_poisoned) > 300


def test_a_long_request_holds_its_windows_bytes_and_no_more(folder) -> None:
    engine, runner = build(folder, page_size=1, num_pages=200, max_running_requests=1)
    windowed = engine._scheduler._pool
    most = []
    params = SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)
    engine.submit(GenerateRequest("long", random_prompt(60, seed=3), params))
    while engine.has_work:
        engine.step()
        most.append(windowed.num_used_bounded(0))
    window = runner._retentions[0].num_tokens
    assert window < 16
    # While it is prefilled, two steps' prompt tokens are under way.
    assert max(most) <= 2 * window + 2 * 23 + 4
    assert max(most[len(most) // 2 :]) <= window + 4
    engine.close()
