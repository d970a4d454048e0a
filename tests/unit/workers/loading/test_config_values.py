"""Values that transformers takes as they are, and no model can have, are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.tiny_models import TINY_MODELS, tiny_config
from workers.errors import ModelLoadError
from workers.loading.model_folder import read_hf_config


def folder_of(name: str, tmp_path: Path, changes: dict[str, Any]) -> Path:
    stated = tiny_config(TINY_MODELS[name]).to_dict()
    (tmp_path / "config.json").write_text(json.dumps({**stated, **changes}))
    return tmp_path


def rope(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **parameters}}


ODDITIES = [
    ({"architectures": 5}, "architectures are a list of names, not 5"),
    ({"architectures": "LlamaForCausalLM"}, "are a list of names, not 'LlamaForCausalLM'"),
    ({"architectures": [None]}, r"are a list of names, not \[None\]"),
    (rope(rope_theta="x"), "rope_theta is a number above 0, not 'x'"),
    (rope(rope_theta=0), "rope_theta is a number above 0, not 0"),
    (rope(rope_theta=float("nan")), "rope_theta is a number above 0, not nan"),
    (rope(rope_type="linear", factor="x"), "factor is a number above 0, not 'x'"),
    (rope(rope_type="yarn", factor=-2.0), "factor is a number above 0, not -2.0"),
    ({"rms_norm_eps": -1.0}, "rms_norm_eps is a number from 0 on, not -1.0"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is a number from 0 on, not nan"),
    (rope(rope_type="linear", factor=[2.0]), r"factor is a number above 0, not \[2.0\]"),
    ({"quantization_config": "fp8"}, "quantization_config is a JSON object, not 'fp8'$"),
    ({"model_type": "zamba9"}, r"model_type 'zamba9' is not known to transformers [\d.]+$"),
    ({"model_type": ["llama"]}, r"model_type is a name, not \['llama'\]$"),
    ({"model_type": None}, "model_type is a name, not None$"),
]


@pytest.mark.parametrize(("changes", "message"), ODDITIES, ids=str)
def test_odd_values_are_refused_by_name(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message) as refused:
        read_hf_config(folder_of("llama3", tmp_path, changes))
    assert str(tmp_path / "config.json") in str(refused.value)


def test_what_transformers_says_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="cannot be used: ") as refused:
        read_hf_config(folder_of("llama3", tmp_path, {"hidden_size": "wide"}))
    assert "\n" not in str(refused.value)


def test_layers_of_a_kind_may_have_positions_of_their_own(tmp_path: Path) -> None:
    own = {"full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": "x"}}
    changes = {"rope_parameters": {**own, "sliding_attention": rope()["rope_parameters"]}}
    with pytest.raises(ModelLoadError, match="factor is a number above 0, not 'x'"):
        read_hf_config(folder_of("gemma3", tmp_path, changes))


@pytest.mark.parametrize("name", sorted(TINY_MODELS))
def test_what_models_state_is_read(name: str, tmp_path: Path) -> None:
    read_hf_config(folder_of(name, tmp_path, {}))
