"""Pooled requests: the vector of Transformers' final states, whatever shares their steps."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from tests.fakes.tiny_models import (
    LATENT,
    NATIVE,
    THROUGH_TRANSFORMERS,
    eager_reference,
    random_prompt,
    save_tiny_model,
)
from tests.fakes.tiny_state_models import save_state_model
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import ErrorCode, RequestRejectedError
from workers.pooling.params import DECODER_POOLINGS, Pooling, PoolingParams
from workers.pooling.vectors import unpack_vector
from workers.runner import step_pieces
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams
from workers.scheduler.request import PooledRequest

PROMPTS = [random_prompt(length, seed) for seed, length in enumerate((1, 2, 16, 37, 70))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
NO_SAMPLING = SamplingParams()
MAX_ERROR = 1e-4
HIDDEN_SIZE = 64
OTHERS = {
    "windows": NATIVE["mistral"],
    "latents": LATENT["deepseek_v3"],
    "through transformers": THROUGH_TRANSFORMERS["gpt2"],
    "layers with windows": NATIVE["gemma2"],
}
RAW = {method: PoolingParams(method, is_normalised=False) for method in DECODER_POOLINGS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_model(NATIVE["qwen3"], tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def expected(folder) -> dict[Pooling, list[np.ndarray]]:
    """Of each prompt, before it is cut or normalised, by Transformers."""
    reference = eager_reference(folder)
    with torch.no_grad():
        states = [reference.model(torch.tensor([p])).last_hidden_state[0] for p in PROMPTS]
    return {
        Pooling.LAST: [one[-1].numpy() for one in states],
        Pooling.MEAN: [one.mean(0).numpy() for one in states],
    }


def config_of(folder: Path, **settings) -> EngineConfig:
    return EngineConfig(
        model=str(folder), **{"page_size": 4, "check_integrity_when_idle": True} | settings
    )


def embed(folder: Path, pooling: PoolingParams, prompts=PROMPTS, **settings):
    engine = Engine.from_config(config_of(folder, **settings))
    results = engine.embed(prompts, pooling)
    assert engine.stats().num_used_pages == 0
    engine.close()
    return results


def drain(engine: Engine) -> dict[str, list[StepOutput]]:
    outputs: dict[str, list[StepOutput]] = {}
    while engine.has_work:
        for one in engine.step():
            outputs.setdefault(one.request_id, []).append(one)
        engine.check_integrity()
    return outputs


def pooled(name: str, prompt: list[int], method: Pooling, **fields) -> GenerateRequest:
    return GenerateRequest(name, prompt, NO_SAMPLING, pooling=RAW[method], **fields)


@pytest.mark.parametrize("method", DECODER_POOLINGS)
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("max_step_tokens", [7, 512])
def test_vectors_are_those_of_transformers_batched_and_in_chunks(
    folder, expected, method, page_size, max_step_tokens
) -> None:
    results = embed(folder, RAW[method], page_size=page_size, max_step_tokens=max_step_tokens)
    for result, vector in zip(results, expected[method], strict=True):
        assert result.finish_reason is FinishReason.STOP
        assert result.token_ids == []
        assert result.embedding.dtype == np.float32
        np.testing.assert_allclose(result.embedding, vector, atol=MAX_ERROR)


@pytest.mark.parametrize("method", DECODER_POOLINGS)
@pytest.mark.parametrize("name", OTHERS)
def test_models_of_other_kinds_too(tmp_path, name, method) -> None:
    folder = save_tiny_model(OTHERS[name], tmp_path)
    reference = eager_reference(folder)
    results = embed(folder, RAW[method], max_step_tokens=16)
    for prompt, result in zip(PROMPTS, results, strict=True):
        with torch.no_grad():
            states = reference.base_model(torch.tensor([prompt])).last_hidden_state[0]
        vector = states[-1] if method is Pooling.LAST else states.mean(0)
        np.testing.assert_allclose(result.embedding, vector.numpy(), atol=MAX_ERROR)


@pytest.mark.parametrize("method", DECODER_POOLINGS)
def test_a_model_that_keeps_states_too(tmp_path, method) -> None:
    reference = save_state_model("falcon_h1", tmp_path)
    engine = Engine.from_config(config_of(tmp_path, max_step_tokens=16))
    prompt = [token % 100 for token in random_prompt(100)]
    for _ in range(2):
        (result,) = engine.embed([prompt], RAW[method])
        with torch.no_grad():
            states = reference.base_model(torch.tensor([prompt])).last_hidden_state[0]
        vector = states[-1] if method is Pooling.LAST else states.mean(0)
        np.testing.assert_allclose(result.embedding, vector.numpy(), atol=MAX_ERROR)
    engine.close()


def test_a_folder_may_hold_the_body_alone(folder, expected, tmp_path) -> None:
    """As Qwen3-Embedding's does: names without a prefix, under the causal model's config."""
    eager_reference(folder).model.save_pretrained(tmp_path)
    shutil.copy(folder / "config.json", tmp_path)
    assert "embed_tokens.weight" in load_file(tmp_path / "model.safetensors")
    results = embed(tmp_path, RAW[Pooling.LAST])
    for result, vector in zip(results, expected[Pooling.LAST], strict=True):
        np.testing.assert_allclose(result.embedding, vector, atol=MAX_ERROR)


@pytest.mark.parametrize("method", DECODER_POOLINGS)
def test_a_prompt_alone_gives_the_same(folder, expected, method) -> None:
    engine = Engine.from_config(config_of(folder, enable_prefix_cache=False))
    for prompt, vector in zip(PROMPTS, expected[method], strict=True):
        (result,) = engine.embed([prompt], RAW[method])
        np.testing.assert_allclose(result.embedding, vector, atol=MAX_ERROR)
    engine.close()


@pytest.mark.parametrize("method", DECODER_POOLINGS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cached_prefix_is_used_by_the_last_token_and_not_by_a_mean(
    folder, expected, method, page_size
) -> None:
    engine = Engine.from_config(config_of(folder, page_size=page_size))
    prompt, vector = PROMPTS[-1], expected[method][-1]
    engine.generate([prompt[:50]], GREEDY)
    for _ in range(2):
        (result,) = engine.embed([prompt], RAW[method])
        np.testing.assert_allclose(result.embedding, vector, atol=MAX_ERROR)
        assert (result.num_cached_tokens >= 48) is (method is Pooling.LAST)
    # What a pooled request has computed serves those who generate.
    (result,) = engine.generate([prompt], GREEDY)
    assert result.num_cached_tokens >= 64
    engine.close()


def test_a_vector_is_cut_first_and_normalised_then(folder, expected) -> None:
    raw = expected[Pooling.LAST]
    for dimensions in (1, 10, HIDDEN_SIZE, None):
        params = PoolingParams(Pooling.LAST, dimensions)
        for result, vector in zip(embed(folder, params), raw, strict=True):
            cut = vector[:dimensions]
            np.testing.assert_allclose(
                result.embedding, cut / np.linalg.norm(cut), atol=MAX_ERROR, strict=True
            )
            assert np.linalg.norm(result.embedding) == pytest.approx(1.0, abs=1e-6)
        kept = PoolingParams(Pooling.LAST, dimensions, is_normalised=False)
        for result, vector in zip(embed(folder, kept), raw, strict=True):
            np.testing.assert_allclose(
                result.embedding, vector[:dimensions], atol=MAX_ERROR, strict=True
            )


@pytest.mark.parametrize(
    "settings", [{}, {"enable_mixed_batches": False}, {"speculative": "ngram"}]
)
def test_beside_requests_that_generate_both_get_what_they_get_alone(
    folder, expected, settings
) -> None:
    alone = Engine.from_config(config_of(folder))
    texts = [one.token_ids for one in alone.generate(PROMPTS, GREEDY)]
    alone.close()
    engine = Engine.from_config(config_of(folder, max_step_tokens=20, **settings))
    for index, prompt in enumerate(PROMPTS):
        engine.submit(GenerateRequest(f"text {index}", prompt, GREEDY))
        for method in DECODER_POOLINGS:
            engine.submit(pooled(f"{method} {index}", prompt, method))
    outputs = drain(engine)
    assert engine.stats().num_output_tokens == sum(map(len, texts))
    assert engine.stats().num_finished == 3 * len(PROMPTS)
    engine.close()
    for index, text in enumerate(texts):
        assert [t for one in outputs[f"text {index}"] for t in one.token_ids] == text
        for method in DECODER_POOLINGS:
            (output,) = outputs[f"{method} {index}"]
            np.testing.assert_allclose(
                unpack_vector(output.embedding), expected[method][index], atol=MAX_ERROR
            )


@pytest.mark.parametrize("method", DECODER_POOLINGS)
def test_a_retracted_prompt_begins_anew(folder, expected, monkeypatch, method) -> None:
    forget, num_retracted = PooledRequest.forget_progress, []

    def counting(self: PooledRequest) -> None:
        num_retracted.append(self)
        forget(self)

    monkeypatch.setattr(PooledRequest, "forget_progress", counting)
    engine = Engine.from_config(config_of(folder, num_pages=36, max_step_tokens=8))
    long = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    for index in range(3):
        engine.submit(GenerateRequest(f"text {index}", random_prompt(10, index), long))
    outputs = [engine.step() for _ in range(4)]
    engine.submit(pooled("vector", PROMPTS[-1], method, priority=1))
    outputs += drain(engine)["vector"]
    engine.close()
    assert num_retracted
    vector = unpack_vector(outputs[-1].embedding)
    np.testing.assert_allclose(vector, expected[method][-1], atol=MAX_ERROR)


@pytest.mark.parametrize("max_tokens", [40, 9, 3, 2])
def test_a_step_in_pieces_gives_the_same(folder, expected, monkeypatch, max_tokens) -> None:
    monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 2)
    launch, num_refused = ModelRunner._launch, []

    def limited(self: ModelRunner, plan):
        if plan.num_tokens > max_tokens:
            num_refused.append(plan.step_id)
            raise torch.OutOfMemoryError("injected")
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "_launch", limited)
    for method in DECODER_POOLINGS:
        for result, vector in zip(embed(folder, RAW[method]), expected[method], strict=True):
            np.testing.assert_allclose(result.embedding, vector, atol=MAX_ERROR)
    assert num_refused


def test_what_no_memory_is_found_for_fails_alone(folder, expected, monkeypatch) -> None:
    launch = ModelRunner._launch

    def limited(self: ModelRunner, plan):
        if plan.num_new_tokens.max() > 40:
            raise torch.OutOfMemoryError("injected")
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "_launch", limited)
    for method in DECODER_POOLINGS:
        monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 1000)
        *fine, failed = embed(folder, RAW[method])
        assert failed.error.code is ErrorCode.OUT_OF_MEMORY
        assert failed.embedding is None
        for result, vector in zip(fine, expected[method], strict=False):
            np.testing.assert_allclose(result.embedding, vector, atol=MAX_ERROR)


@pytest.mark.parametrize("method", DECODER_POOLINGS)
def test_no_vector_has_anything_but_numbers(folder, method) -> None:
    engine = Engine.from_config(config_of(folder))
    broken = next(iter(engine._executor._run_step.__self__._model.parameters()))
    with torch.no_grad():
        broken[PROMPTS[-1][3]] = float("nan")
    (result,) = engine.embed([PROMPTS[-1]], RAW[method])
    assert result.error.code is ErrorCode.INTERNAL
    assert engine.stats().num_evictable_pages == 0
    engine.close()


def test_an_abort_returns_the_pages_at_any_moment(folder) -> None:
    for num_steps in range(6):
        engine = Engine.from_config(config_of(folder, max_step_tokens=16))
        for method in DECODER_POOLINGS:
            engine.submit(pooled(method, PROMPTS[-1], method))
        outputs = [one for _ in range(num_steps) for one in engine.step()]
        for method in DECODER_POOLINGS:
            engine.abort(method)
        outputs += [one for of_one in drain(engine).values() for one in of_one]
        assert sorted(one.request_id for one in outputs) == sorted(DECODER_POOLINGS)
        assert engine.stats().num_used_pages == 0
        engine.close()


def test_a_prompt_may_fill_the_context_and_the_pool(folder) -> None:
    whole = random_prompt(256)
    (result,) = embed(folder, RAW[Pooling.LAST], [whole])
    assert result.embedding.shape == (HIDDEN_SIZE,)
    (result,) = embed(folder, RAW[Pooling.LAST], [whole[:28]], num_pages=7)
    assert result.embedding.shape == (HIDDEN_SIZE,)
    with pytest.raises(RequestRejectedError) as refused:
        embed(folder, RAW[Pooling.LAST], [[*whole, 5]])
    assert refused.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    with pytest.raises(RequestRejectedError) as refused:
        embed(folder, RAW[Pooling.LAST], [whole[:29]], num_pages=7)
    assert refused.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED


@pytest.mark.parametrize(
    ("pooling", "fields", "param"),
    [
        (PoolingParams(Pooling.LAST, 0), {}, "dimensions"),
        (PoolingParams(Pooling.LAST, HIDDEN_SIZE + 1), {}, "dimensions"),
        (RAW[Pooling.LAST], {"resumed_token_ids": [5]}, "resumed_token_ids"),
        (RAW[Pooling.LAST], {"sampling": SamplingParams(prompt_logprobs=1)}, "prompt_logprobs"),
        (RAW[Pooling.LAST], {"prompt_token_ids": []}, "prompt"),
        (RAW[Pooling.LAST], {"prompt_token_ids": [-1]}, "prompt"),
    ],
)
def test_what_no_vector_can_be_made_of_is_refused_by_name(folder, pooling, fields, param) -> None:
    engine = Engine.from_config(config_of(folder))
    asked = {"prompt_token_ids": [5], "sampling": NO_SAMPLING, "pooling": pooling, **fields}
    with pytest.raises(RequestRejectedError) as refused:
        engine.submit(GenerateRequest("r", **asked))
    assert refused.value.param == param
    assert not engine.has_work
    engine.close()
