"""What transformers wraps, nests or names in other ways is served, or refused for the right reason.

Each is compared with transformers token for token; the sweep in tests/nightly does so for all.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM

from tests.fakes.architecture_trial import Outcome, Verdict, run_trial
from tests.fakes.tiny_models import THROUGH_TRANSFORMERS, tiny_config
from tests.fakes.tiny_reference import config_of
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.loading.loader import load_model
from workers.loading.model_folder import resolve_max_context_len
from workers.models.transformers_attention import ATTENTION_NAME, register_attention_interface
from workers.models.transformers_model import TransformersCausalLM
from workers.models.transformers_parts import BodyAndHead
from workers.parallel.group import SingleRank

ALL_ATTEND = {"layer_types": ["full_attention"] * 4}


def load(folder: Path, **changes: Any) -> None:
    config = EngineConfig(model=str(folder), load_format="dummy", **changes)
    load_model(config, SingleRank(), torch.device("cpu"), torch.float32)


def save_config(folder: Path, model_type: str, architecture: str, **fields: Any) -> Path:
    AutoConfig.for_model(model_type, architectures=[architecture], **fields).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model_type", "class_name", "changes"),
    [
        # Only the mapping for images and text has these.
        ("llava", "LlavaForConditionalGeneration", {}),
        ("qwen2_vl", "Qwen2VLForConditionalGeneration", {}),
        # Both have it; its head reads what a body for text alone does not give.
        ("gemma3", "Gemma3ForConditionalGeneration", {}),
        # Its eyes choose among attentions of their own.
        pytest.param(
            "deepseek_ocr2", "DeepseekOcr2ForConditionalGeneration", {}, marks=pytest.mark.nightly
        ),
        # A body within the body.
        ("opt", "OPTForCausalLM", {}),
        # States the architecture of another family.
        ("internlm3", "LlamaForCausalLM", {}),
        ("granitemoehybrid", "GraniteMoeHybridForCausalLM", ALL_ATTEND),
        # One block of attention stands in several layers, which keep states as well.
        pytest.param("zamba", "ZambaForCausalLM", {}, marks=pytest.mark.nightly),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_text_is_that_of_transformers(
    model_type: str, class_name: str, changes: Mapping[str, Any]
) -> None:
    outcome = run_trial(model_type, class_name, changes)
    assert outcome.verdict == Verdict.SERVED, outcome.reason


@pytest.mark.parametrize(
    ("model_type", "class_name", "changes", "reason"),
    [
        (
            "rwkv",
            "RwkvForCausalLM",
            {},
            "RwkvModel keeps recurrent state outside of its cache",
        ),
        (
            "xlstm",
            "xLSTMForCausalLM",
            {},
            "xLSTMModel keeps its state in a cache of its own, with rnn_state",
        ),
        # As an encoder it is refused for another reason.
        (
            "roberta",
            "RobertaForCausalLM",
            {"is_decoder": True},
            "RobertaForCausalLM does not count positions from 0",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_by_name(
    model_type: str, class_name: str, changes: Mapping[str, Any], reason: str
) -> None:
    assert run_trial(model_type, class_name, changes) == Outcome(Verdict.REFUSED, reason)


@pytest.mark.parametrize(
    ("model_type", "architecture", "reason"),
    [
        ("openai-gpt", "OpenAIGPTLMHeadModel", "attention interface and takes no cache"),
        ("speech_to_text", "Speech2TextForConditionalGeneration", "encoder-decoder"),
        ("musicgen", "MusicgenForCausalLM", "encoder-decoder"),
        ("pi0", "PI0ForConditionalGeneration", "vocab_size"),
    ],
)
def test_the_class_is_chosen_before_limits_are_read(
    tmp_path: Path, model_type: str, architecture: str, reason: str
) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        load(save_config(tmp_path, model_type, architecture))


def test_a_wrapper_may_name_the_class_of_its_text_alone(tmp_path: Path) -> None:
    config = config_of("emu3", "Emu3ForCausalLM", {})
    config.save_pretrained(tmp_path)
    load(tmp_path)


@pytest.mark.parametrize(
    ("model_type", "limit"), [("mpt", 2048), ("whisper", 448), ("gpt2", 1024), ("llama", 2048)]
)
def test_the_longest_context_is_found_under_the_familys_name(model_type: str, limit: int) -> None:
    config = AutoConfig.for_model(model_type)
    assert resolve_max_context_len(config, None) == limit
    with pytest.raises(ConfigError, match=f"exceeds the model's {limit} tokens"):
        resolve_max_context_len(config, limit + 1)


def test_a_model_without_a_longest_context_takes_what_is_set() -> None:
    config = AutoConfig.for_model("bloom")
    with pytest.raises(ConfigError, match="'bloom' states no longest context; set max_context_len"):
        resolve_max_context_len(config, None)
    assert resolve_max_context_len(config, 640) == 640
    assert resolve_max_context_len(AutoConfig.for_model("bloom", seq_length=512), None) == 512


@pytest.mark.parametrize("kind", [ImportError, ValueError])
def test_what_keeps_transformers_from_building_a_model_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[Exception]
) -> None:
    def build(*args: Any, **kwargs: Any) -> None:
        raise kind("\nTimmWrapperModel requires\nthe timm library")

    monkeypatch.setattr(transformers.LlavaForConditionalGeneration, "_from_config", build)
    folder = save_config(tmp_path, "llava", "LlavaForConditionalGeneration")
    with pytest.raises(ModelLoadError, match="Llava.* cannot be built here: Timm.* the timm lib"):
        load(folder)


class Shift(torch.nn.Module):
    """Lets every token see the one before it, as convolutions over a sequence do."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        before = hidden.roll(1, dims=1).flip(-1)
        return hidden + before * torch.arange(hidden.shape[1])[None, :, None]


def test_tokens_that_depend_on_each_other_beside_attention_are_refused() -> None:
    register_attention_interface()
    config = tiny_config(THROUGH_TRANSFORMERS["olmo2"])
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    TransformersCausalLM(BodyAndHead.of(model))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()
    model.model.layers[1].mlp = Shift()
    with pytest.raises(ModelLoadError, match="tokens depend on each other beside attention"):
        TransformersCausalLM(BodyAndHead.of(model))
