"""Every family, natively or through transformers' code, against transformers' own eager model."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import (
    NATIVE,
    THROUGH_TRANSFORMERS,
    TinyModel,
    eager_reference,
    random_prompt,
    save_tiny_model,
)
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.loading.loader import LoadedModel, load_model
from workers.models.features import ModelFeature
from workers.parallel.group import SingleRank

MAX_LOGIT_ERROR = 1e-4
ALL = {**NATIVE, **THROUGH_TRANSFORMERS}


def load(folder: Path, **changes: object) -> LoadedModel:
    config = EngineConfig(model=str(folder), **changes)  # type: ignore[arg-type]
    return load_model(config, SingleRank(), torch.device("cpu"), torch.float32)


# One, as a module's tests of a folder follow each other.
@functools.lru_cache(maxsize=1)
def reference_of(folder: Path) -> PreTrainedModel:
    return eager_reference(folder).eval()


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return reference_of(folder)(torch.tensor([tokens]), use_cache=False).logits[0]


def reference_greedy(folder: Path, prompt: list[int], num_tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = reference_of(folder).generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            do_sample=False,
        )
    return out[0, len(prompt) :].tolist()


@pytest.fixture(scope="module", params=ALL)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(ALL[request.param], tmp_path_factory.mktemp(request.param))


@serves(ModelFeature.CPU)
def test_logits_of_every_position_are_those_of_transformers(folder: Path) -> None:
    prompt, loaded = random_prompt(40), load(folder)
    want = reference_logits(folder, prompt)
    for attention in (DenseAttention(), torch_native_backend(loaded)):
        got = ModelRows(loaded, attention).step({0: prompt})[0]
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, rtol=0, atol=MAX_LOGIT_ERROR)


def test_sixty_four_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    """min_new_tokens keeps transformers from the end token, so it is kept from ours as well."""
    prompt, loaded = random_prompt(24), load(folder)
    rows = ModelRows(loaded, torch_native_backend(loaded))
    (end_token,) = loaded.facts.eos_token_ids
    tokens: list[int] = []
    logits = rows.step({0: prompt})[0]
    while len(tokens) < 64:
        allowed = logits[-1].index_fill(0, torch.tensor(end_token), float("-inf"))
        tokens.append(int(allowed.argmax()))
        logits = rows.step({0: tokens[-1:]})[0]
    assert tokens == reference_greedy(folder, prompt, 64)


def test_chunks_and_neighbours_do_not_change_a_row(folder: Path) -> None:
    """Prefilled in pieces, decoded, and mixed with rows of other lengths: the same logits."""
    loaded = load(folder)
    first, second = random_prompt(33, seed=1), random_prompt(21, seed=2)
    rows = ModelRows(loaded, torch_native_backend(loaded))
    steps = [
        {0: first[:13], 1: second[:20]},
        {1: second[20:], 0: first[13:14]},
        {0: first[14:]},
    ]
    outputs = [rows.step(step) for step in steps]
    for row, tokens in ((0, first), (1, second)):
        got = torch.cat([output[row] for output in outputs if row in output])
        want = reference_logits(folder, tokens)
        torch.testing.assert_close(got, want, rtol=0, atol=MAX_LOGIT_ERROR)


@pytest.mark.parametrize("name", NATIVE)
def test_native_families_run_natively_unless_asked_otherwise(name: str, tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE[name], tmp_path)
    native, through = load(folder), load(folder, model_impl="transformers")
    assert (native.implementation, through.implementation) == ("native", "transformers")
    assert native.model.geometry == through.model.geometry
    assert native.model.vocab_size == through.model.vocab_size == native.facts.vocab_size
    prompt = random_prompt(30)
    got, want = (ModelRows(m, DenseAttention()).step({0: prompt})[0] for m in (native, through))
    torch.testing.assert_close(got, want, rtol=0, atol=MAX_LOGIT_ERROR)


def test_a_row_of_longrope_does_not_depend_on_the_length_of_its_neighbours(tmp_path: Path) -> None:
    """transformers switches frequencies by the longest row; a batch must not."""
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "original_max_position_embeddings": 32,
        "short_factor": [1.0, 1.5, 2.0, 2.5],
        "long_factor": [1.0, 3.0, 5.0, 7.0],
    }
    changes = {
        "sliding_window": None,
        "rope_parameters": rope,
        "original_max_position_embeddings": 32,
    }
    folder = save_tiny_model(TinyModel("phi3", changes), tmp_path)
    short, long = random_prompt(20, seed=1), random_prompt(60, seed=2)
    alone = ModelRows(load(folder), DenseAttention()).step({0: short})[0]
    together = ModelRows(load(folder), DenseAttention()).step({0: short, 1: long})
    torch.testing.assert_close(alone, together[0], rtol=0, atol=1e-5)
    want = reference_logits(folder, long)
    torch.testing.assert_close(together[1], want, rtol=0, atol=MAX_LOGIT_ERROR)
    within = ModelRows(load(folder, max_context_len=32), DenseAttention()).step({0: short})[0]
    want = reference_logits(folder, short)
    torch.testing.assert_close(within, want, rtol=0, atol=MAX_LOGIT_ERROR)
