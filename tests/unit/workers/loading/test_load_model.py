"""From folders to models: formats, facts, and every way in which a folder can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import ModelRows
from tests.fakes.tiny_models import (
    NATIVE,
    THROUGH_TRANSFORMERS,
    TinyModel,
    random_prompt,
    save_tiny_model,
)
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.loader import LoadedModel, load_model, model_facts, resolve_dtype
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
LLAMA = NATIVE["llama3"]


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **changes), SingleRank(), CPU, dtype)


def logits(loaded: LoadedModel) -> torch.Tensor:
    return ModelRows(loaded, DenseAttention()).step({0: random_prompt(12)})[0]


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace, add or (None) remove tensors; names have '/' for '.'."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("/", "."), None)
        if tensor is not None:
            tensors[name.replace("/", ".")] = tensor
    save_file(tensors, path)


def test_a_sharded_checkpoint_is_the_single_one(tmp_path: Path) -> None:
    single = save_tiny_model(LLAMA, tmp_path / "single")
    sharded = save_tiny_model(LLAMA, tmp_path / "sharded", max_shard_size="100KB")
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert torch.equal(logits(load(single)), logits(load(sharded)))


def test_progress_counts_bytes_up_to_the_total(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path, max_shard_size="100KB")
    seen: list[tuple[int, int]] = []
    config = EngineConfig(model=str(folder))
    load_model(config, SingleRank(), CPU, torch.float32, lambda done, all: seen.append((done, all)))
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    assert seen[0] == (0, total)
    assert seen[-1] == (total, total)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert len({done for done, _ in seen}) > 20


def test_weights_take_the_requested_dtype(tmp_path: Path) -> None:
    loaded = load(save_tiny_model(LLAMA, tmp_path), torch.bfloat16)
    assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}
    assert logits(loaded).dtype == torch.float32
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())


def test_facts_need_no_weights(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path / "tiny-llama")
    (folder / "model.safetensors").unlink()
    facts = model_facts(EngineConfig(model=str(folder)))
    assert (facts.name, facts.folder) == ("tiny-llama", folder)
    assert (facts.vocab_size, facts.max_context_len, facts.eos_token_ids) == (131, 256, (2,))
    assert facts.architecture == "LlamaForCausalLM"


@pytest.mark.parametrize(
    ("generation", "config", "want"),
    [([2, 5], 7, (2, 5)), (3, 7, (3,)), (None, 7, (7,)), (None, [7, 8], (7, 8)), (None, None, ())],
)
def test_end_tokens_come_from_the_generation_config_first(
    tmp_path: Path, generation: Any, config: Any, want: tuple[int, ...]
) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    edit_config(folder, eos_token_id=config)
    assert model_facts(EngineConfig(model=str(folder))).eos_token_ids == want


@pytest.mark.parametrize(
    ("rope", "default", "limit"),
    [
        ({"rope_type": "default"}, 256, 256),
        ({"rope_type": "linear", "factor": 2.0}, 256, 512),
        ({"rope_type": "dynamic", "factor": 2.0}, 256, 512),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
            1024,
            1024,
        ),
    ],
    ids=lambda value: value["rope_type"] if isinstance(value, dict) else None,
)
def test_context_reaches_as_far_as_the_rope(
    tmp_path: Path, rope: dict[str, Any], default: int, limit: int
) -> None:
    changes = {"rope_parameters": {"rope_theta": 1e4, **rope}}
    folder = save_tiny_model(TinyModel("llama", changes), tmp_path)
    assert model_facts(EngineConfig(model=str(folder))).max_context_len == default
    config = EngineConfig(model=str(folder), max_context_len=limit)
    assert model_facts(config).max_context_len == limit
    with pytest.raises(ConfigError, match=f"max_context_len={limit + 1}"):
        model_facts(EngineConfig(model=str(folder), max_context_len=limit + 1))


def test_auto_dtype_is_float32_on_cpu_and_the_checkpoints_on_cuda(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    edit_config(folder, dtype="bfloat16")
    config = EngineConfig(model=str(folder))
    assert resolve_dtype(config, CPU) == torch.float32
    assert resolve_dtype(config, torch.device("cuda")) == torch.bfloat16
    asked = EngineConfig(model=str(folder), dtype="float16")
    assert resolve_dtype(asked, CPU) == torch.float16


@pytest.mark.parametrize("tiny", [LLAMA, THROUGH_TRANSFORMERS["olmo2"]], ids=["native", "through"])
def test_dummy_weights_need_only_a_config_and_follow_the_seed(
    tmp_path: Path, tiny: TinyModel
) -> None:
    folder = save_tiny_model(tiny, tmp_path)
    for path in folder.iterdir():
        if path.name != "config.json":
            path.unlink()
    first, again, other = (
        logits(load(folder, load_format="dummy", dummy_weights_seed=seed)) for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.allclose(first, other)
    assert first.isfinite().all()
    drawn_otherwise = load(folder, load_format="dummy", dummy_weights_seed=1, seed=5)
    assert torch.equal(logits(drawn_otherwise), first), "weights know nothing of requests' seeds"


def test_a_redundant_copy_of_tied_weights_is_fine(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama3_tied"], tmp_path)
    want = logits(load(folder))
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    inv_freq = {"model/layers/0/self_attn/rotary_emb/inv_freq": torch.ones(4)}
    edit_weights(folder, **{"lm_head/weight": embedding.clone()}, **inv_freq)
    assert torch.equal(logits(load(folder)), want)


def test_tied_weights_that_differ_are_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama3_tied"], tmp_path)
    edit_weights(folder, **{"lm_head/weight": torch.zeros(131, 64)})
    with pytest.raises(ModelLoadError, match="tie_word_embeddings"):
        load(folder)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_missing_tensor_is_an_error_that_names_it(tmp_path: Path, impl: str) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    edit_weights(folder, **{"model/layers/1/self_attn/k_proj/weight": None})
    with pytest.raises(ModelLoadError, match=r"layers\.1\.self_attn\.k_proj\.weight"):
        load(folder, model_impl=impl)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_left_over_tensor_is_an_error_that_names_it(tmp_path: Path, impl: str) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    edit_weights(folder, **{"model/layers/0/self_attn/k_proj/bias": torch.zeros(16)})
    with pytest.raises(ModelLoadError, match=r"layers\.0\.self_attn\.k_proj\.bias"):
        load(folder, model_impl=impl)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_a_tensor_of_another_shape_is_an_error_that_names_it(tmp_path: Path, impl: str) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    edit_weights(folder, **{"model/norm/weight": torch.ones(65)})
    with pytest.raises((ModelLoadError), match=r"model\.norm\.weight"):
        load(folder, model_impl=impl)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
@pytest.mark.parametrize("tiny", [LLAMA, THROUGH_TRANSFORMERS["olmo2"]], ids=["native", "through"])
def test_pickled_weights_are_refused_unread(tmp_path: Path, tiny: TinyModel, name: str) -> None:
    folder = save_tiny_model(tiny, tmp_path)
    (folder / "model.safetensors").rename(folder / name)
    with pytest.raises(ModelLoadError, match=f"pickled weights.*{name}.*refused"):
        load(folder)


def test_a_folder_without_weights_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match=r"neither model\.safetensors nor"):
        load(folder)


def test_a_truncated_file_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelLoadError, match=r"model\.safetensors is not a readable"):
        load(folder)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path, max_shard_size="100KB")
    shard = sorted(folder.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name}, which is missing"):
        load(folder)


@pytest.mark.parametrize("file", ["../elsewhere.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_cannot_point_outside_its_folder(tmp_path: Path, file: str) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    index = {"weight_map": {"model.norm.weight": file}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match="not a safetensors file beside it"):
        load(folder)


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {"a": 5}}']
)
def test_a_broken_index_is_an_error(tmp_path: Path, text: str) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ModelLoadError, match="not a safetensors index"):
        load(folder)


def test_integer_weights_are_refused_by_dtype(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    edit_weights(folder, **{"model/norm/weight": torch.ones(64, dtype=torch.int8)})
    with pytest.raises(ModelLoadError, match=r"model\.norm\.weight has dtype torch\.int8"):
        load(folder)


def test_an_unknown_quantisation_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(LLAMA, tmp_path)
    edit_config(folder, quantization_config={"quant_method": "eetq"})
    with pytest.raises(ModelLoadError, match="quantised by 'eetq', which is not supported"):
        load(folder)


def test_no_such_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(ModelLoadError, match=r"no config\.json"):
        load(tmp_path)
