"""Latent attention in the engine: transformers' tokens and log probabilities, however it is run."""

import functools
import random

import pytest
import torch

from attention.capability import AttentionBackendError
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from tests.fakes.tiny_models import LATENT, VOCAB_SIZE, eager_reference, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

PROMPT_LENGTHS = (3, 88, 17, 60)
NUM_OUTPUT_TOKENS = 40
# What differs between ways to run shows within these.
NUM_FIRST_TOKENS = 24
MAX_LOGPROB_ERROR = 1e-4
# Pages and chunks of other sizes, and retraction from them, are shown every night.
NIGHTLY = functools.partial(pytest.param, marks=pytest.mark.nightly)
# The first has of the others all but how it chooses experts, which its logits show by day.
MODELS = (
    NIGHTLY("deepseek_v2"),
    "deepseek_v2_lite",
    "deepseek_v3",
)


def random_prompts():
    rng = random.Random(0)
    return [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in PROMPT_LENGTHS]


def reference_logprobs(reference, tokens):
    """Of tokens[1:], each after those before it."""
    with torch.inference_mode():
        logits = reference(torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    picked = logits.log_softmax(-1).gather(1, torch.tensor(tokens[1:]).unsqueeze(1))
    return picked.flatten()


def described(folder):
    """(folder, prompts, their greedy tokens, log probabilities of prompt and tokens)."""
    reference, prompts = eager_reference(folder).eval(), random_prompts()
    expected = [
        reference.generate(
            torch.tensor([prompt]),
            max_new_tokens=NUM_OUTPUT_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    pairs = zip(prompts, expected, strict=True)
    logprobs = [reference_logprobs(reference, [*prompt, *tokens]) for prompt, tokens in pairs]
    return str(folder), prompts, expected, logprobs


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory):
    folder = save_tiny_model(LATENT[request.param], tmp_path_factory.mktemp(request.param))
    return described(folder)


def check(results, model):
    _, _, expected, logprobs = model
    for result, tokens, want in zip(results, expected, logprobs, strict=True):
        assert result.token_ids == tokens[: len(result.token_ids)]
        own = [entry.logprob for entry in result.prompt_logprobs[1:]]
        own += [entry.logprob for entry in result.logprobs]
        torch.testing.assert_close(
            torch.tensor(own), want[: len(own)], rtol=0, atol=MAX_LOGPROB_ERROR
        )


def run(model, num_tokens=NUM_FIRST_TOKENS, **changes):
    folder, prompts, _, _ = model
    greedy = SamplingParams(
        temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=0, prompt_logprobs=0
    )
    engine = Engine.from_config(EngineConfig(model=folder, device="cpu", **changes))
    try:
        results = engine.generate(prompts, greedy)
        assert {len(one.token_ids) for one in results} == {num_tokens}
        engine.check_integrity()
        return results, engine.stats()
    finally:
        engine.close()


VARIATIONS = {
    "page_1": {"page_size": 1},
    "page_16": {"page_size": 16, "num_tokens": NUM_OUTPUT_TOKENS},
    "page_64": NIGHTLY({"page_size": 64}),
    "alone": {"max_running_requests": 1},
    "chunked_at_64": NIGHTLY({"max_step_tokens": 64}),
    "chunked_at_16": {"max_step_tokens": 16, "page_size": 4},
    "through_transformers": {"model_impl": "transformers"},
}


@pytest.mark.parametrize("change", VARIATIONS.values(), ids=VARIATIONS)
def test_tokens_and_log_probabilities_are_those_of_transformers(model, change) -> None:
    results, _ = run(model, **change)
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
    """Without log probabilities of the prompt, for which its tokens have to run again."""
    folder, prompts, expected, logprobs = model
    sampling = SamplingParams(
        temperature=0.0, max_tokens=NUM_FIRST_TOKENS, ignore_eos=True, logprobs=0
    )
    engine = Engine.from_config(EngineConfig(model=folder, device="cpu", page_size=4))
    try:
        engine.generate(prompts, sampling)
        warm = engine.generate(prompts, sampling)
        engine.check_integrity()
    finally:
        engine.close()
    assert [result.token_ids for result in warm] == [one[:NUM_FIRST_TOKENS] for one in expected]
    for prompt, result, want in zip(prompts, warm, logprobs, strict=True):
        assert result.num_cached_tokens == (len(prompt) - 1) // 4 * 4
        own = torch.tensor([entry.logprob for entry in result.logprobs])
        generated = want[len(prompt) - 1 :][: len(own)]
        torch.testing.assert_close(own, generated, rtol=0, atol=MAX_LOGPROB_ERROR)


def runner_of(folder, **changes):
    config = EngineConfig(model=folder, device="cpu", num_pages=7, page_size=4, **changes)
    device = torch.device("cpu")
    return make_model_runner(config, SingleRank(), device, lambda done, total: None)


def test_the_pool_holds_latents_natively_and_every_head_through_transformers(model) -> None:
    """24 + 8 elements a token and layer in place of 8 heads of 20 and of 10."""
    native, through = runner_of(model[0]), runner_of(model[0], model_impl="transformers")
    pools = native._backend.token_to_kv_pool, through._backend.token_to_kv_pool
    assert type(pools[0]) is LatentTokenToKVPool
    assert pools[0].num_bytes == 3 * 8 * 4 * (24 + 8) * 4
    assert pools[1].num_bytes == 3 * 8 * 4 * 8 * (20 + 10) * 4


def test_what_has_no_latent_attention_runs_through_transformers_as_before(model, caplog) -> None:
    runner = runner_of(model[0], kv_cache_dtype="fp8_e4m3")
    assert runner._backend.capability.name == "torch_native_fp8"
    assert "latents are not kept as fp8_e4m3" in caplog.text
    assert "it runs through transformers" in caplog.text
    with pytest.raises(AttentionBackendError, match="no attention backend named 'nothing'"):
        runner_of(model[0], attention_backend="nothing")
    assert "nothing has no multi-head latent attention" in caplog.text
