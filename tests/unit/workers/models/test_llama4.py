"""What the native Llama 4 makes of configs and checkpoints, and what it leaves alone."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from attention import LayerAttentionConfig
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import (
    LLAMA4,
    TinyModel,
    eager_reference,
    random_prompt,
    save_tiny_model,
    tiny_config,
)
from tests.fakes.tiny_reference import build_reference, config_of, reference_logits
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.loading.loader import LoadedModel, load_model
from workers.models.llama4 import Llama4ForCausalLM
from workers.models.llama4_family import llama4_obstacle, llama4_spec
from workers.models.registry import choose_implementation
from workers.parallel.group import SingleRank

WRAPPER = "Llama4ForConditionalGeneration"
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
}


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    config = EngineConfig(model=str(folder))
    return load_model(config, SingleRank(), torch.device("cpu"), dtype)


def logits_of(loaded: LoadedModel, prompt: list[int]) -> torch.Tensor:
    return ModelRows(loaded, torch_native_backend(loaded)).step({0: prompt})[0]


def test_the_spec_of_scout() -> None:
    """Of its config for images and text, as published."""
    text = {"rope_parameters": LLAMA3_ROPE, "max_position_embeddings": 10485760}
    config = AutoConfig.for_model("llama4", text_config=text)
    spec = llama4_spec(config)
    chunked, whole = LayerAttentionConfig(chunk_size=8192), LayerAttentionConfig()
    assert spec.layers == (chunked, chunked, chunked, whole) * 12
    assert spec.rotated_layers == {i for i in range(48) if i % 4 != 3}
    assert spec.dense_layers == frozenset()
    assert (spec.mixture.num_experts, spec.mixture.width) == (16, 8192)
    assert (spec.mixture.routing.num_chosen, spec.mixture.num_pieces) == (1, 1)
    assert spec.rope.rope_type == "llama3"
    assert spec.temperature is not None
    assert spec.temperature.floor_scale == 8192


def test_on_one_gpu_it_has_to_be_asked_for() -> None:
    config = AutoConfig.for_model("llama4")
    auto, native = (EngineConfig(model="m", model_impl=impl) for impl in ("auto", "native"))
    assert choose_implementation(config, WRAPPER, auto, "cpu") == "native"
    assert choose_implementation(config, WRAPPER, auto, "cuda") == "transformers"
    assert choose_implementation(config, WRAPPER, native, "cuda") == "native"


def test_several_experts_a_token_and_heads_that_are_not_normalised(tmp_path: Path) -> None:
    changes = {"use_qk_norm": False, "moe_layers": [0, 1, 2], "num_experts_per_tok": 2}
    folder = save_tiny_model(TinyModel("llama4_text", {**LLAMA4, **changes}), tmp_path)
    prompt = random_prompt(30)
    with torch.inference_mode():
        want = eager_reference(folder)(torch.tensor([prompt]), use_cache=False).logits[0]
    torch.testing.assert_close(logits_of(load(folder), prompt), want, rtol=0, atol=1e-4)


def test_text_is_read_out_of_a_model_for_images(tmp_path: Path) -> None:
    reference = build_reference(config_of("llama4", WRAPPER, {}), WRAPPER, tmp_path)
    loaded, prompt = load(tmp_path), random_prompt(40)
    prompt = [token % 90 for token in prompt]
    assert type(loaded.model) is Llama4ForCausalLM
    want = reference_logits(reference, prompt)
    torch.testing.assert_close(logits_of(loaded, prompt), want, rtol=0, atol=1e-4)


def test_bfloat16_rounds_where_transformers_rounds(tmp_path: Path) -> None:
    """What experts are given before their products: nearer to transformers' own bfloat16 than that
    is to float32."""
    folder = save_tiny_model(TinyModel("llama4_text", {**LLAMA4, "num_local_experts": 1}), tmp_path)
    prompt = random_prompt(20)
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        theirs = eager_reference(folder)
        exact = theirs(ids, use_cache=False).logits[0]
        rounded = theirs.bfloat16()(ids, use_cache=False).logits[0].float()
    got = logits_of(load(folder, torch.bfloat16), prompt).float()
    assert (got - exact).norm() < 1.5 * (rounded - exact).norm()


ODDITIES = {
    "activation": ({"hidden_act": "gelu"}, "silu activations only, not 'gelu'"),
    "chunks": ({"attention_chunk_size": None}, "with attention_chunk_size None"),
    "rotations": (
        {"no_rope_layers": [1], "layer_types": ["chunked_attention"] * 3},
        "says something of 1 layers, the model has 3",
    ),
    "choice": ({"num_experts_per_tok": 5}, "cannot take 5 of 4 experts"),
    "rope": (
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


@pytest.mark.parametrize(("changes", "reason"), ODDITIES.values(), ids=ODDITIES)
def test_oddities_are_named(changes: dict[str, Any], reason: str) -> None:
    obstacle = llama4_obstacle(tiny_config(TinyModel("llama4_text", {**LLAMA4, **changes})))
    assert obstacle is not None
    assert reason in obstacle


def test_another_kind_of_model_that_states_its_architecture_is_not_for_it() -> None:
    with pytest.raises(ModelLoadError, match="'llama' is no Llama 4"):
        llama4_spec(AutoConfig.for_model("llama"))
