"""Rotary frequencies and the rotation, against transformers' own."""

from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from workers.errors import ModelLoadError
from workers.layers.rope_frequencies import cos_sin_table, rope_frequencies
from workers.layers.rotary import InterleavedRotaryEmbedding, RotaryEmbedding
from workers.models.llama_family import rope_spec

HEAD_DIM = 16
MAX_POSITIONS = 64

ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.5},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "yarn_mscale": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 1.0,
        "mscale_all_dim": 0.7,
        "beta_fast": 20,
        "beta_slow": 2,
        "truncate": False,
    },
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 32,
        "factor": 2.0,
        "short_factor": [1.0 + 0.1 * i for i in range(HEAD_DIM // 2)],
        "long_factor": [1.0 + 0.5 * i for i in range(HEAD_DIM // 2)],
    },
}


def make_config(rope: dict[str, Any]) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=4 * HEAD_DIM,
        num_attention_heads=4,
        max_position_embeddings=MAX_POSITIONS,
        rope_parameters={"rope_theta": 5000.0, **rope},
    )


@pytest.mark.parametrize("name", [name for name in ROPES if name != "default"])
def test_frequencies_equal_those_of_transformers(name: str) -> None:
    config = make_config(ROPES[name])
    spec = rope_spec(config, HEAD_DIM)
    num_positions = 20  # within the original context of every variant
    want, attention_factor = ROPE_INIT_FUNCTIONS[spec.rope_type](config, seq_len=num_positions)
    got = rope_frequencies(spec, num_positions)
    torch.testing.assert_close(got.inv_freq.expand(num_positions, -1)[-1], want, rtol=1e-6, atol=0)
    assert got.attention_factor == pytest.approx(attention_factor, rel=1e-9)


def test_longrope_takes_the_long_set_when_the_context_outgrows_the_original() -> None:
    config = make_config(ROPES["longrope"])
    want, _ = ROPE_INIT_FUNCTIONS["longrope"](config, seq_len=33)
    got = rope_frequencies(rope_spec(config, HEAD_DIM), num_positions=33)
    torch.testing.assert_close(got.inv_freq, want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("position", [MAX_POSITIONS - 1, MAX_POSITIONS, 100, 150])
def test_dynamic_rotation_at_a_position_is_that_of_a_sequence_ending_there(position: int) -> None:
    config = make_config(ROPES["dynamic"])
    want, _ = ROPE_INIT_FUNCTIONS["dynamic"](config, seq_len=position + 1)
    got = rope_frequencies(rope_spec(config, HEAD_DIM), num_positions=160).inv_freq
    torch.testing.assert_close(got[position], want, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", ROPES)
def test_rotation_equals_that_of_transformers(name: str) -> None:
    config = make_config(ROPES[name])
    num_positions = 30
    rotary = RotaryEmbedding(rope_spec(config, HEAD_DIM), num_positions, torch.device("cpu"))
    q, k = torch.randn(num_positions, 4, HEAD_DIM), torch.randn(num_positions, 2, HEAD_DIM)
    positions = torch.randperm(num_positions)
    got_q, got_k = rotary(positions, q, k)

    cos, sin = LlamaRotaryEmbedding(config)(q, positions.unsqueeze(0))
    want_q, want_k = apply_rotary_pos_emb(q, k, cos.squeeze(0), sin.squeeze(0))
    torch.testing.assert_close(got_q, want_q, rtol=0, atol=1e-5)
    torch.testing.assert_close(got_k, want_k, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["default", "yarn_mscale"])
def test_neighbours_rotate_as_pairs_where_the_checkpoint_interleaves_them(name: str) -> None:
    """As complex numbers, in DeepSeek's own formulation; then all first elements before all second
    ones."""
    spec = rope_spec(make_config(ROPES[name]), HEAD_DIM)
    rotary = InterleavedRotaryEmbedding(spec, 30, torch.device("cpu"))
    q, k = torch.randn(30, 4, HEAD_DIM), torch.randn(30, 1, HEAD_DIM)
    positions = torch.randperm(30)
    frequencies = rope_frequencies(spec, 30)
    angles = positions.float().unsqueeze(1) * frequencies.inv_freq
    turn = torch.polar(torch.full_like(angles, frequencies.attention_factor), angles).unsqueeze(1)
    for got, x in zip(rotary(positions, q, k), (q, k), strict=True):
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * turn
        want = torch.cat((pairs.real, pairs.imag), dim=-1)
        torch.testing.assert_close(got, want, rtol=0, atol=1e-5)


def test_partial_rotation_leaves_the_rest_of_the_head_untouched() -> None:
    config = make_config({"rope_type": "default", "partial_rotary_factor": 0.5})
    rotary = RotaryEmbedding(rope_spec(config, HEAD_DIM), 10, torch.device("cpu"))
    q = torch.randn(10, 4, HEAD_DIM)
    rotated, _ = rotary(torch.arange(10), q, q)
    assert torch.equal(rotated[..., HEAD_DIM // 2 :], q[..., HEAD_DIM // 2 :])
    assert not torch.allclose(rotated[1:, :, : HEAD_DIM // 2], q[1:, :, : HEAD_DIM // 2])


def test_bfloat16_heads_are_rotated_in_float32() -> None:
    spec = rope_spec(make_config(ROPES["default"]), HEAD_DIM)
    rotary = RotaryEmbedding(spec, MAX_POSITIONS, torch.device("cpu"))
    q, positions = torch.randn(40, 4, HEAD_DIM).bfloat16(), torch.arange(40)
    rotated, _ = rotary(positions, q, q)
    exact, _ = rotary(positions, q.float(), q.float())
    assert torch.equal(rotated, exact.bfloat16())


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ({"rope_theta": 7000.0}, {"rope_theta": 7000.0, "rope_type": "default"}),
        (
            {"rope_theta": 7000.0, "rope_scaling": {"type": "linear", "factor": 3.0}},
            {"rope_theta": 7000.0, "rope_type": "linear", "factor": 3.0},
        ),
        (
            {"rope_theta": 7000.0, "rope_scaling": dict(ROPES["llama3"])},
            {"rope_theta": 7000.0, **ROPES["llama3"]},
        ),
    ],
    ids=["plain", "linear", "llama3"],
)
def test_old_and_new_config_shapes_give_the_same_table(
    old: dict[str, Any], new: dict[str, Any]
) -> None:
    shared = {"hidden_size": 64, "num_attention_heads": 4, "max_position_embeddings": 64}
    tables = [
        cos_sin_table(rope_spec(AutoConfig.for_model("llama", **shared, **shape), HEAD_DIM), 64)
        for shape in (old, {"rope_parameters": new})
    ]
    assert torch.equal(*tables)


def test_an_unknown_rope_type_is_refused_by_name() -> None:
    config = make_config({"rope_type": "default"})
    config.rope_parameters["rope_type"] = "spiral"
    with pytest.raises(ModelLoadError, match="spiral"):
        rope_spec(config, HEAD_DIM)
