"""What the native Gemma family makes of configs and checkpoints, and what it leaves alone."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from attention import LayerAttentionConfig
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import (
    GEMMA,
    SLIDING_WINDOW,
    TinyModel,
    eager_reference,
    gemma3_with_images,
    random_prompt,
    save_random_model,
    save_tiny_model,
    tiny_config,
)
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.loading.loader import LoadedModel, check_servable, load_model
from workers.models.features import ModelFeature
from workers.models.gemma import GemmaForCausalLM
from workers.models.gemma_family import gemma_spec
from workers.models.registry import choose_implementation
from workers.parallel.group import SingleRank

GEMMA_12B = Path("benchmarks/h200/models/gemma-3-12b.json")


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    config = EngineConfig(model=str(folder), **changes)
    return load_model(config, SingleRank(), torch.device("cpu"), dtype)


def test_the_spec_of_gemma_2() -> None:
    spec = gemma_spec(tiny_config(GEMMA["gemma2"]))
    window = LayerAttentionConfig(sliding_window_size=SLIDING_WINDOW, logit_cap=2.0)
    assert spec.layers == (window, LayerAttentionConfig(logit_cap=2.0), window)
    assert (spec.scaling, spec.logit_cap, spec.has_qk_norm) == (12**-0.5, 3.0, False)


def test_the_spec_of_the_benchmarks_gemma_3_12b() -> None:
    """As its checkpoint states it: rope's base and scaling by names of their own."""
    stated = json.loads(GEMMA_12B.read_text(encoding="utf-8"))
    config = AutoConfig.for_model(**stated)
    engine = EngineConfig(model="anywhere")
    assert choose_implementation(config, "Gemma3ForCausalLM", engine, "cuda") == "native"
    spec = gemma_spec(config)
    windows = [layer.sliding_window_size for layer in spec.layers]
    assert windows == ([1024] * 5 + [-1]) * 8
    assert {layer.logit_cap for layer in spec.layers} == {0.0}
    local, full = spec.ropes["sliding_attention"], spec.ropes["full_attention"]
    assert (local.theta, local.rope_type) == (10000.0, "default")
    assert (full.theta, full.rope_type, full.factor) == (1000000.0, "linear", 8.0)
    assert (spec.num_q_heads, spec.num_kv_heads, spec.head_dim) == (16, 8, 256)
    assert spec.has_tied_embeddings
    assert spec.logit_cap is None


ODDITIES = {
    "activation": ("gemma2", {"hidden_activation": "gelu"}, "gelu_pytorch_tanh .* not 'gelu'"),
    "bias": ("gemma2", {"attention_bias": True}, "has no attention_bias"),
    "cap": ("gemma3", {"attn_logit_softcapping": 5.0}, "attn_logit_softcapping is set"),
    "partial rope": (
        "gemma2",
        {
            "rope_parameters": {
                "rope_type": "linear",
                "rope_theta": 10000.0,
                "factor": 2.0,
                "partial_rotary_factor": 0.5,
            }
        },
        "rotates whole heads",
    ),
}


@pytest.mark.parametrize(("name", "changes", "reason"), ODDITIES.values(), ids=ODDITIES)
def test_oddities_are_named_and_left_to_transformers(
    name: str,
    changes: dict[str, Any],
    reason: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    tiny = GEMMA[name]
    config = tiny_config(TinyModel(tiny.model_type, {**tiny.changes, **changes}))
    with pytest.raises(ModelLoadError, match=reason):
        gemma_spec(config)
    config.architectures = ["Gemma2ForCausalLM" if name == "gemma2" else "Gemma3ForCausalLM"]
    config.save_pretrained(tmp_path)
    check_servable(EngineConfig(model=str(tmp_path)))
    assert "it runs through transformers" in caplog.text
    with pytest.raises(ModelLoadError, match=f"cannot run natively: .*{reason}"):
        check_servable(EngineConfig(model=str(tmp_path), model_impl="native"))


def test_what_attends_in_both_directions_is_not_for_it() -> None:
    tiny = GEMMA["gemma3"]
    changes = {**tiny.changes, "use_bidirectional_attention": True}
    with pytest.raises(ModelLoadError, match="does not attend in both directions"):
        gemma_spec(tiny_config(TinyModel(tiny.model_type, changes)))


def test_another_kind_of_model_that_states_its_architecture_is_not_for_it() -> None:
    with pytest.raises(ModelLoadError, match="'shieldgemma2' is not of the Gemma family"):
        gemma_spec(AutoConfig.for_model("shieldgemma2"))


def renamed(folder: Path, new_name: Any) -> None:
    path = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path)


def plain_name(name: str) -> str:
    """As a causal model has it, and what sees images as it was."""
    for prefix in ("model.language_model.", "language_model.model."):
        name = name.replace(prefix, "model.")
    return name


NAMES = {
    "now": lambda name: plain_name(name).replace("model.", "model.language_model."),
    "before": lambda name: plain_name(name).replace("model.", "language_model.model."),
}


@pytest.mark.parametrize("style", NAMES)
@serves("Gemma3ForCausalLM", ModelFeature.CPU)
def test_text_is_read_out_of_a_model_for_images(style: str, tmp_path: Path) -> None:
    folder = save_random_model(gemma3_with_images(), tmp_path)
    prompt = random_prompt(30)
    with torch.inference_mode():
        wanted = eager_reference(folder)(torch.tensor([prompt]), use_cache=False).logits[0]

    def is_of_text(name: str) -> bool:
        return "vision" not in name and "projector" not in name

    stored = load_file(folder / "model.safetensors")
    assert {is_of_text(name) for name in stored} == {True, False}
    renamed(folder, lambda name: NAMES[style](name) if is_of_text(name) else name)
    loaded = load(folder)
    assert type(loaded.model) is GemmaForCausalLM
    got = ModelRows(loaded, torch_native_backend(loaded)).step({0: prompt})[0]
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-4)


def test_a_tensor_that_nobody_takes_is_refused_where_no_images_are_taken(tmp_path: Path) -> None:
    folder = save_tiny_model(GEMMA["gemma3"], tmp_path)
    path = folder / "model.safetensors"
    save_file({**load_file(path), "vision_tower.weight": torch.ones(2)}, path)
    with pytest.raises(ModelLoadError, match=r"no use for: vision_tower\.weight"):
        load(folder)


def test_one_tensor_under_two_names_is_refused(tmp_path: Path) -> None:
    folder = save_tiny_model(GEMMA["gemma3"], tmp_path)
    path = folder / "model.safetensors"
    twice = {"model.language_model.norm.weight": torch.ones(64)}
    save_file({**load_file(path), **twice}, path)
    with pytest.raises(ModelLoadError, match=r"both are model\.norm\.weight"):
        load(folder)


def test_bfloat16_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    """The factor of embeddings before it multiplies, norms once: nearer to transformers' own
    bfloat16 than that is to float32."""
    folder = save_tiny_model(GEMMA["gemma3"], tmp_path)
    prompt, loaded = torch.tensor([random_prompt(20)]), load(folder, torch.bfloat16)
    with torch.inference_mode():
        theirs = eager_reference(folder)
        exact = theirs(prompt, use_cache=False).logits[0]
        rounded = theirs.bfloat16()(prompt, use_cache=False).logits[0].float()
        ids = prompt[0]
        embedded = loaded.model.begin(ids)[0]
        assert torch.equal(embedded, theirs.model.embed_tokens(ids))
        rows = ModelRows(loaded, torch_native_backend(loaded))
        got = rows.step({0: ids.tolist()})[0].float()
    assert (got - exact).norm() < 1.5 * (rounded - exact).norm()
