"""How a model is pooled, by what sentence-transformers has written into its folder."""

import json
import logging

import pytest

from tests.fakes.tiny_models import NATIVE, save_tiny_model
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.loading.loader import model_facts
from workers.loading.pooling_config import POOLING_FILE, read_pooling
from workers.loading.sentence_modules import PROMPTS_FILE
from workers.pooling.params import EmbeddingInfo, Pooling


def state(folder, text: str) -> None:
    path = folder / POOLING_FILE
    path.parent.mkdir()
    path.write_text(text, encoding="utf-8")


def modes(*true: str) -> str:
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    return json.dumps(
        {"word_embedding_dimension": 64, "include_prompt": True}
        | {f"pooling_mode_{name}": name in true for name in names}
    )


@pytest.mark.parametrize(
    ("true", "method"), [("lasttoken", Pooling.LAST), ("mean_tokens", Pooling.MEAN)]
)
def test_the_folder_says_how(tmp_path, true, method) -> None:
    save_tiny_model(NATIVE["qwen3"], tmp_path)
    assert model_facts(EngineConfig(model=str(tmp_path))).embedding == EmbeddingInfo(
        64, Pooling.LAST
    )
    state(tmp_path, modes(true))
    stated = EmbeddingInfo(64, method, is_purpose=True)
    assert model_facts(EngineConfig(model=str(tmp_path))).embedding == stated


@pytest.mark.parametrize("true", [(), ("cls_token",), ("mean_tokens", "max_tokens")])
def test_what_is_not_served_is_told(tmp_path, caplog, true) -> None:
    state(tmp_path, modes(*true))
    with caplog.at_level(logging.WARNING):
        assert read_pooling(tmp_path) is None
    assert " and ".join(true) in caplog.text
    assert "no embeddings" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("modules.json", '[{"type": "sentence_transformers.models.Dense"}]', "Dense"),
        ("sentence_bert_config.json", '{"do_lower_case": true}', "do_lower_case"),
        (PROMPTS_FILE, '{"default_prompt_name": "q"}', "no prompt 'q'"),
    ],
)
def test_a_decoder_whose_folder_asks_for_more_gives_no_vectors(
    tmp_path, caplog, name, text, reason
) -> None:
    save_tiny_model(NATIVE["qwen3"], tmp_path)
    (tmp_path / name).write_text(text, encoding="utf-8")
    with caplog.at_level(logging.WARNING):
        assert model_facts(EngineConfig(model=str(tmp_path))).embedding is None
    assert "no embeddings" in caplog.text
    assert reason in caplog.text


def test_a_decoders_default_prompt_is_told(tmp_path) -> None:
    save_tiny_model(NATIVE["qwen3"], tmp_path)
    prompts = {"prompts": {"q": "query: "}, "default_prompt_name": "q"}
    (tmp_path / PROMPTS_FILE).write_text(json.dumps(prompts), encoding="utf-8")
    stated = EmbeddingInfo(64, Pooling.LAST, prompt="query: ")
    assert model_facts(EngineConfig(model=str(tmp_path))).embedding == stated


@pytest.mark.parametrize("text", ["", "[]", "{", "\xff"])
def test_a_broken_file_is_an_error_by_its_name(tmp_path, text) -> None:
    state(tmp_path, text)
    with pytest.raises(ModelLoadError, match="1_Pooling"):
        read_pooling(tmp_path)
