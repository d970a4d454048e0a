"""Models with latent attention natively, against transformers' own eager model."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import (
    LATENT,
    TinyModel,
    eager_reference,
    random_prompt,
    save_tiny_model,
    tiny_config,
)
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.moe.router import ExpertRouter
from workers.layers.rope_frequencies import RopeSpec
from workers.loading.loader import LoadedModel, check_servable, load_model
from workers.models.deepseek import DeepseekForCausalLM
from workers.models.deepseek_family import deepseek_obstacle, deepseek_spec, softmax_scaling
from workers.models.features import ModelFeature
from workers.models.registry import NATIVE_ARCHITECTURES, choose_implementation
from workers.parallel.group import SingleRank

MAX_LOGIT_ERROR = 1e-4
CPU = torch.device("cpu")
NUM_TOKENS = 64
NAMES = {"deepseek_v3": "deepseek_v3 (and R1)"}
"""R1 has the architecture of V3, whose config.json it shares but for numbers."""


def load(folder: Path, dtype: torch.dtype = torch.float32, **changes: Any) -> LoadedModel:
    return load_model(EngineConfig(model=str(folder), **changes), SingleRank(), CPU, dtype)


def reference_logits(folder: Path, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return eager_reference(folder)(torch.tensor([tokens]), use_cache=False).logits[0]


@pytest.fixture(scope="module", params=LATENT, ids=lambda name: NAMES.get(name, name))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(LATENT[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture
def v3(tmp_path: Path) -> Path:
    return save_tiny_model(LATENT["deepseek_v3"], tmp_path)


@serves(ModelFeature.CPU)
def test_logits_in_chunks_and_beside_neighbours_are_those_of_transformers(folder: Path) -> None:
    loaded = load(folder)
    assert loaded.implementation == "native"
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


def test_64_greedy_tokens_are_those_of_transformers(folder: Path) -> None:
    """Of all tokens at once, given which every token is the likeliest of the steps."""
    loaded, prompt = load(folder), random_prompt(40)
    rows = ModelRows(loaded, torch_native_backend(loaded))
    tokens, logits = rows.greedy_logits(0, prompt, NUM_TOKENS)
    want = reference_logits(folder, tokens)
    torch.testing.assert_close(logits, want, rtol=0, atol=MAX_LOGIT_ERROR)
    assert want[len(prompt) - 1 : -1].argmax(-1).tolist() == tokens[len(prompt) :]


def test_both_implementations_agree(folder: Path) -> None:
    prompt = random_prompt(30)
    native, through = load(folder), load(folder, model_impl="transformers")
    assert (native.implementation, through.implementation) == ("native", "transformers")
    got, want = (
        ModelRows(m, torch_native_backend(m)).step({0: prompt})[0] for m in (native, through)
    )
    torch.testing.assert_close(got, want, rtol=0, atol=MAX_LOGIT_ERROR)
    assert native.model.geometry.latent is not None
    assert through.model.geometry.latent is None


def test_dummy_weights_are_the_same_for_the_same_seed(folder: Path) -> None:
    prompt = random_prompt(12)
    models = [load(folder, load_format="dummy") for _ in range(2)]
    first, second = (ModelRows(m, torch_native_backend(m)).step({0: prompt})[0] for m in models)
    assert torch.isfinite(first).all()
    assert torch.equal(first, second)


def test_bfloat16_keeps_the_correction_of_the_router_in_float32(v3: Path) -> None:
    loaded = load(v3, torch.bfloat16)
    routers = [m for m in loaded.model.modules() if isinstance(m, ExpertRouter)]
    assert len(routers) == 2
    stored = load_file(v3 / "model.safetensors")
    for layer, router in enumerate(routers, start=1):
        name = f"model.layers.{layer}.mlp.gate.e_score_correction_bias"
        assert torch.equal(router.correction, stored[name])
        assert router.weight.dtype is torch.bfloat16


def edit_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in changes.items():
        name = name.replace("__", ".")
        tensors.pop(name, None)
        if tensor is not None:
            tensors[name] = tensor
    save_file(tensors, path)


def test_an_expert_that_is_missing_or_of_another_shape_is_named(v3: Path) -> None:
    edit_tensors(v3, model__layers__1__mlp__experts__5__up_proj__weight=torch.zeros(3, 3))
    with pytest.raises(ModelLoadError, match=r"experts\.5\.up_proj\.weight has shape \(3, 3\)"):
        load(v3)
    edit_tensors(v3, model__layers__1__mlp__experts__5__up_proj__weight=None)
    with pytest.raises(ModelLoadError, match=r"lacks 1 tensors: .*experts\.5\.up_proj\.weight"):
        load(v3)


def test_layers_for_multi_token_prediction_are_left_unread(v3: Path) -> None:
    """The config says how many there are; what lies beyond them is refused as ever."""
    edit_tensors(v3, model__layers__3__eh_proj__weight=torch.zeros(3, 3))
    assert tiny_config(LATENT["deepseek_v3"]).num_nextn_predict_layers == 1
    assert load(v3).implementation == "native"
    edit_tensors(v3, model__layers__4__eh_proj__weight=torch.zeros(3, 3))
    with pytest.raises(ModelLoadError, match=r"no use for: model\.layers\.4\.eh_proj\.weight"):
        load(v3)


def test_the_scale_of_scores_has_yarns_magnitude_twice() -> None:
    yarn = {"rope_type": "yarn", "factor": 40.0, "mscale_all_dim": 0.707}
    rope = RopeSpec("yarn", 1e4, 64, 4096, yarn)
    magnitude = 0.1 * 0.707 * 3.6888794541139363 + 1.0
    assert softmax_scaling(rope, 192) == pytest.approx(192**-0.5 * magnitude**2)
    without = RopeSpec("yarn", 1e4, 64, 4096, {**yarn, "mscale_all_dim": 0})
    assert softmax_scaling(without, 192) == pytest.approx(192**-0.5)
    assert softmax_scaling(RopeSpec("default", 1e4, 64, 4096, yarn), 192) == 192**-0.5


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_act": "gelu"}, "silu activations only, not 'gelu'"),
        ({"num_key_value_heads": 4}, "as many K and V heads as queries"),
        (
            {"rope_parameters": {"rope_theta": 1e4, "rope_type": "x"}},
            "rope_type 'x' is not one of",
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "rotated as a whole",
        ),
    ],
)
def test_what_the_family_does_not_cover_is_an_obstacle(
    changes: dict[str, Any], reason: str
) -> None:
    config = tiny_config(LATENT["deepseek_v3"])
    assert deepseek_obstacle(config) is None
    for name, value in changes.items():
        setattr(config, name, value)
    obstacle = deepseek_obstacle(config)
    assert obstacle is not None
    assert reason in obstacle


def test_another_model_type_is_not_of_the_family() -> None:
    assert "not of the DeepSeek family" in str(deepseek_obstacle(tiny_config(TinyModel("llama"))))


def test_deepseek_v2_lite_declares_576_elements_a_token_and_layer() -> None:
    """By the heads of its published config."""
    config = tiny_config(
        TinyModel(
            "deepseek_v2",
            {
                "num_attention_heads": 16,
                "num_key_value_heads": 16,
                "num_experts_per_tok": 6,
                "hidden_size": 2048,
                "kv_lora_rank": 512,
                "q_lora_rank": None,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
        )
    )
    spec = deepseek_spec(config)
    assert spec.entry.elements_per_token == 576
    assert spec.qk_head_dim == 192


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_cache_dtype": "fp8_e4m3"}, "latents are not kept as fp8_e4m3"),
        ({"attention_backend": "torch_native_fp8"}, "torch_native_fp8 has no multi-head"),
    ],
)
def test_where_latent_attention_is_lacking_the_bridge_runs_them_as_before(
    changes: dict[str, Any], reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(LATENT["deepseek_v3"])
    name = "DeepseekV3ForCausalLM"
    engine = EngineConfig(model="m", **changes)
    assert choose_implementation(config, name, engine, "cuda") == "transformers"
    assert reason in caplog.text
    native = EngineConfig(model="m", model_impl="native", **changes)
    with pytest.raises(ModelLoadError, match=reason):
        choose_implementation(config, name, native, "cuda")
    for plain in (EngineConfig(model="m"), EngineConfig(model="m", attention_backend="fa3")):
        for device in ("cpu", "cuda"):
            assert choose_implementation(config, name, plain, device) == "native"


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:1"])
def test_a_check_before_the_start_asks_for_no_device(
    v3: Path, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_servable(EngineConfig(model=str(v3), device=device))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_servable(EngineConfig(model=str(v3), device=device, model_impl="native"))


class ThreeRanks(SingleRank):
    size = 3


def test_heads_that_ranks_cannot_share_are_refused(v3: Path) -> None:
    config = EngineConfig(model=str(v3), tp_size=3)
    with pytest.raises(ConfigError, match="num_attention_heads=8.*tp_size=3"):
        load_model(config, ThreeRanks(), CPU, torch.float32)


def test_every_member_has_a_native_class(folder: Path) -> None:
    (name,) = json.loads((folder / "config.json").read_text())["architectures"]
    assert NATIVE_ARCHITECTURES[name].keeps_latents
    assert type(load(folder).model) is DeepseekForCausalLM
