"""Gemma natively in the engine: transformers' tokens and log probabilities, however it is run."""

import pytest
import torch

from tests.fakes.tiny_models import GEMMA, gemma3_with_images, save_random_model, tiny_config
from tests.unit.workers.engine.test_latent_engine import (
    NIGHTLY,
    NUM_FIRST_TOKENS,
    NUM_OUTPUT_TOKENS,
    PROMPT_LENGTHS,
    check,
    described,
    run,
)
from workers import Engine
from workers.config import EngineConfig
from workers.models.gemma import GemmaForCausalLM
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

MODELS = {
    "gemma2": lambda: tiny_config(GEMMA["gemma2"]),
    "gemma3": lambda: tiny_config(GEMMA["gemma3"]),
    "gemma3_with_images": gemma3_with_images,
}


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return described(save_random_model(MODELS[request.param](), folder))


VARIATIONS = {
    "page_1": {"page_size": 1},
    "page_16": {"page_size": 16, "num_tokens": NUM_OUTPUT_TOKENS},
    "page_64": NIGHTLY({"page_size": 64}),
    "alone": {"max_running_requests": 1},
    "chunked_at_16": {"max_step_tokens": 16, "page_size": 4},
}


@pytest.mark.parametrize("change", VARIATIONS.values(), ids=VARIATIONS)
def test_tokens_and_log_probabilities_are_those_of_transformers(model, change) -> None:
    results, _ = run(model, model_impl="native", **change)
    check(results, model)


@pytest.mark.parametrize("page_size", [1, NIGHTLY(16)])
def test_retraction_changes_nothing(model, page_size) -> None:
    longest = max(PROMPT_LENGTHS) + NUM_OUTPUT_TOKENS
    num_pages = int(1.2 * (longest // page_size + 1))
    results, stats = run(
        model, num_tokens=NUM_OUTPUT_TOKENS, page_size=page_size, num_pages=num_pages
    )
    assert stats.num_preemptions > 0
    check(results, model)


def test_a_prefix_hit_changes_nothing(model) -> None:
    folder, prompts, expected, _ = model
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_FIRST_TOKENS, ignore_eos=True)
    engine = Engine.from_config(EngineConfig(model=folder, device="cpu", page_size=4))
    try:
        engine.generate(prompts, sampling)
        warm = engine.generate(prompts, sampling)
        engine.check_integrity()
    finally:
        engine.close()
    assert [result.token_ids for result in warm] == [one[:NUM_FIRST_TOKENS] for one in expected]
    assert max(result.num_cached_tokens for result in warm) >= 80


def test_windows_have_the_accounts_that_the_bridge_gives_them(model) -> None:
    def runner_of(model_impl):
        config = EngineConfig(
            model=model[0], device="cpu", num_pages=40, page_size=4, model_impl=model_impl
        )
        return make_model_runner(config, SingleRank(), torch.device("cpu"), print)

    native, through = runner_of("native"), runner_of("transformers")
    assert type(native._model) is GemmaForCausalLM
    assert native.pages_by_account == through.pages_by_account
    assert len(native.pages_by_account) == 2
    assert native._backend.config.kv_layout == through._backend.config.kv_layout
