"""What is read of PEFT's files, and what is refused, by its name."""

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.fakes.peft_files import (
    CONFIG,
    DOWN,
    EMBEDDING,
    INFO,
    Q,
    embedding,
    expert_pair,
    name_of,
    pair,
    pair_of,
    refused,
    stack,
    write,
)
from workers.adapters.folder import AdapterBytes, adapter_at, content_key
from workers.adapters.host import AdapterReader
from workers.adapters.peft_config import PeftConfig
from workers.adapters.peft_weights import check_fits, read_pairs
from workers.adapters.ref import AdapterRef, prefix_salt
from workers.adapters.sites import Site, SitePart
from workers.errors import AdapterError
from workers.layers.formats.format import Cut


@pytest.mark.parametrize(
    ("changes", "module", "scale"),
    [
        ({}, Q, 4.0),
        ({"use_rslora": True}, Q, 8 / 2**0.5),
        ({"alpha_pattern": {"q_proj": 5}}, Q, 2.5),
        ({"alpha_pattern": {"layers.1.*.q_proj": 5}}, Q, 4.0),
        ({"alpha_pattern": {"q_proj": 5}}, DOWN, 4.0),
        ({"rank_pattern": {r".*\.down_proj": 16}}, DOWN, 0.5),
        ({"lora_dropout": 0.1, "init_lora_weights": "gaussian", "use_dora": False}, Q, 4.0),
        ({"a_setting_of_a_later_peft": None}, Q, 4.0),
    ],
)
def test_the_scale_is_what_peft_computes(tmp_path, changes, module, scale) -> None:
    write(tmp_path, pair(), **changes)
    assert PeftConfig.read(tmp_path).scale_of(module) == pytest.approx(scale)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type='IA3' is not served"),
        ({"use_dora": True}, "use_dora=True is not served"),
        ({"bias": "lora_only"}, "bias='lora_only' is not served"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not served"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not served"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not served"),
        ({"ensure_weight_tying": 1}, "ensure_weight_tying=1 is neither true nor false"),
        ({"a_setting_of_a_later_peft": 3}, "a_setting_of_a_later_peft=3 is not served"),
        ({"task_type": "SEQ_CLS"}, "task_type='SEQ_CLS' is not served"),
        ({"r": 0}, "r=0 is no rank"),
        ({"r": True}, "r=True is no rank"),
        ({"r": 10**400}, "r=1000"),
        ({"rank_pattern": {"q_proj": 1 << 20}}, "rank_pattern of q_proj=1048576 is no rank"),
        ({"alpha_pattern": {"x{4294967295}": 2}}, "alpha_pattern has 'x{4294967295}'"),
        ({"rank_pattern": {"q)(": 2}}, "rank_pattern has 'q)('"),
        ({"rank_pattern": dict.fromkeys(map(str, range(2001)), 2)}, "has more than 2000 entries"),
        ({"lora_alpha": "8"}, "lora_alpha='8' is no number"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern has '('"),
        ({"rank_pattern": {"(q+)+x": 2}}, "rank_pattern has '(q+)+x', which is too complex"),
        ({"rank_pattern": 3}, "rank_pattern is no object"),
        ({"use_rslora": 1}, "use_rslora=1 is neither true nor false"),
        ({"lora_alpha": 10**400}, "lora_alpha=1000"),
        ({"x": "y" * 1000}, f"x='{'y' * 79}... is not served"),
        ({"\ud800": 1}, r"'\ud800'=1 is not served"),
        ({"base_model_name_or_path": "x" * (1 << 20)}, "has more than 1048576 bytes"),
    ],
)
def test_a_config_that_would_change_the_result_is_refused_by_name(
    tmp_path, changes, message
) -> None:
    write(tmp_path, pair(), **changes)
    refused(tmp_path, message)


@pytest.mark.parametrize(
    ("tensors", "changes", "message"),
    [
        ({}, {}, "changes nothing"),
        ({"base_model.model.lm_head.lora_embedding_A": torch.ones(2)}, {}, "lacks one of lora_A"),
        (embedding(Q), {}, f"{Q}.lora_embedding_A, which is not served"),
        (pair() | {f"base_model.model.{Q}.base_layer.weight": torch.ones(2)}, {}, "not served"),
        (embedding(EMBEDDING), {"ensure_weight_tying": True}, f"with {EMBEDDING} is not served"),
        (embedding(EMBEDDING, size=7), {}, "has 7 inputs and 5 outputs there, the model's 9 and 5"),
        (stack((4, 6), (4, 2)), {}, "has matrices (4, 6) and (4, 2), and rank 2"),
        (stack((8, 6), (7, 8)), {}, "of neither tensor of experts 3 wide"),
        (stack((6, 3), (6, 6)), {}, "has 6 ranks, which are not 2, as the config has it, for each"),
        (stack((8, 3), (6, 8), layer=1), {}, "changes model.layers.1.mlp.experts; served are"),
        (
            stack((64, 3), (6, 64)),
            {"rank_pattern": {"down_proj": 16}},
            "model.layers.0.mlp.experts has rank 16, max_lora_rank is 8",
        ),
        (
            stack((8, 3), (6, 8)) | expert_pair("w2"),
            {},
            "adds to down_proj of model.layers.0.moe.experts in two ways",
        ),
        (
            stack((8, 3), (6, 8)) | stack((8, 3), (6, 8), inner=True),
            {},
            "adds to down_proj of model.layers.0.moe.experts in two ways",
        ),
        (expert_pair("w1", expert="1" * 5000), {}, "changes model.layers.0.moe.experts.111"),
        (embedding(EMBEDDING) | pair_of(EMBEDDING), {}, f"has {EMBEDDING} by two names"),
        (pair_of(EMBEDDING), {}, f"{EMBEDDING}.lora_A.weight, which is not served"),
        (
            pair() | {f"base_model.model.{Q}.lora_magnitude_vector": torch.ones(2)},
            {},
            "lora_magnitude_vector, which is not served",
        ),
        ({name_of(Q, "A"): torch.ones((2, 6))}, {}, "lacks one of lora_A and lora_B"),
        (pair(rank=4), {}, "rank 2 in the config"),
        (pair(rank=16), {"r": 16}, "has rank 16, max_lora_rank is 8"),
        (pair(dtype=torch.int32), {}, "dtype I32"),
        (
            {name_of(Q, "A"): torch.ones((2, 7)), name_of(Q, "B"): torch.ones((10, 2))},
            {},
            "has 7 inputs and 10 outputs there, the model's 6 and 10",
        ),
        (
            {
                name_of("model.layers.0.mlp.experts.0.up_proj", "A"): torch.ones((2, 6)),
                name_of("model.layers.0.mlp.experts.0.up_proj", "B"): torch.ones((10, 2)),
            },
            {},
            "changes model.layers.0.mlp.experts.0.up_proj; served are",
        ),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, tensors, changes, message) -> None:
    write(tmp_path, tensors, **changes)
    refused(tmp_path, message)


def test_scales_come_before_the_models_dtype(tmp_path) -> None:
    tensors = pair()
    tensors[name_of(Q, "B")][:] = 1.01
    write(tmp_path, tensors, lora_alpha=6)
    read = reader_of(torch.bfloat16).read(adapter_at("one", tmp_path, INFO)).pairs[Q]
    assert torch.equal(read.b, torch.full((10, 2), 1.01 * 3).bfloat16())
    assert float(read.b[0, 0]) != 3 * float(torch.tensor(1.01).bfloat16())


def test_missing_pickled_and_broken_files_are_refused(tmp_path) -> None:
    refused(tmp_path, "there is no adapter_config.json")
    (tmp_path / "adapter_config.json").write_text("[")
    refused(tmp_path, "adapter_config.json cannot be read")
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    refused(tmp_path, "adapter_config.json cannot be read")
    (tmp_path / "adapter_config.json").write_text("{}")
    refused(tmp_path, "has no peft_type")
    (tmp_path / "adapter_config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "adapter_model.bin").write_bytes(b"x")
    refused(tmp_path, "pickled weights are not read")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"x")
    refused(tmp_path, "adapter_model.safetensors cannot be read")
    (tmp_path / "adapter_config.json").unlink()
    os.mkfifo(tmp_path / "adapter_config.json")
    refused(tmp_path, "there is no adapter_config.json")


@pytest.mark.parametrize("folder", ["~nobody-of-this-name/x", "a\0b", "x" * 5000])
def test_what_is_no_path_is_refused(folder) -> None:
    with pytest.raises(AdapterError, match="cannot be found|cannot be read: File name too long"):
        adapter_at("one", Path(folder), INFO)


def test_patterns_are_of_names_as_the_adapters_model_had_them(tmp_path) -> None:
    wrapped = Q.replace("model.", "model.language_model.", 1)
    own = {name.replace(Q, wrapped): tensor for name, tensor in pair().items()}
    write(tmp_path, own, alpha_pattern={f"^{wrapped}": 20})
    assert read_pairs(tmp_path)[Q].scale == 10.0
    write(tmp_path, own | pair())
    refused(tmp_path, f"has {Q} by two names")


def test_who_asks_later_is_not_told_where_files_were(tmp_path) -> None:
    write(tmp_path, pair())
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"^adapter_model\.safetensors cannot be read: No such"):
        content_key(tmp_path)


def test_an_adapter_is_known_by_what_its_files_hold(tmp_path) -> None:
    write(tmp_path, pair() | pair(DOWN))
    first = adapter_at("one", tmp_path, INFO)
    assert first == adapter_at("one", tmp_path, INFO)
    assert read_pairs(tmp_path).keys() == {Q, DOWN}
    assert AdapterBytes.read(tmp_path).key == first.key
    write(tmp_path, pair() | pair(DOWN), lora_alpha=9)
    assert content_key(tmp_path) != first.key


@pytest.mark.parametrize("change", ["overwritten", "shortened", "gone"])
def test_who_writes_to_a_file_that_is_being_read_changes_nothing(
    tmp_path, monkeypatch, change
) -> None:
    """A shortened one, mapped into memory, would have ended the process."""
    write(tmp_path, pair())
    ref, path = adapter_at("one", tmp_path, INFO), tmp_path / "adapter_model.safetensors"
    other = save({name: 3.0 * tensor for name, tensor in pair().items()})

    def check_and_change(pairs, info):
        check_fits(pairs, info)
        if change == "gone":
            path.unlink()
        else:
            path.write_bytes(other if change == "overwritten" else b"")

    monkeypatch.setattr("workers.adapters.host.check_fits", check_and_change)
    reader = reader_of(torch.float32)
    read = reader.read(ref).pairs[Q]
    assert torch.equal(read.a, torch.ones((2, 6)))
    assert torch.equal(read.b, torch.full((10, 2), 4.0))
    with pytest.raises(AdapterError, match="have changed since|cannot be read: No such file"):
        reader.read(ref)


def reader_of(dtype, rows=slice(0, 10)):
    part = SitePart(Q, Cut((10, 6), rows, slice(0, 6)), slice(0, 10))
    return AdapterReader([Site(torch.nn.Identity(), (part,))], INFO, dtype, torch.device("cpu"))


@pytest.mark.parametrize("value", [float("nan"), float("-inf"), 1e5])
def test_values_that_are_no_numbers_are_refused_by_every_rank(tmp_path, value) -> None:
    """By one whose own rows are numbers, too. 1e5 is none in float16."""
    tensors = pair()
    tensors[name_of(Q, "B")][9, 0] = value
    write(tmp_path, tensors)
    ref = adapter_at("one", tmp_path, INFO)
    for rows in (slice(0, 5), slice(5, 10)):
        with pytest.raises(AdapterError, match=f"{Q} has values that are no finite numbers in"):
            reader_of(torch.float16, rows).read(ref)
    write(tmp_path, pair(), lora_alpha=1e300)
    ref = adapter_at("one", tmp_path, INFO)
    with pytest.raises(AdapterError, match=r"by its scale of 5e\+299"):
        reader_of(torch.float32).read(ref)


def test_no_salt_is_taken_for_an_adapters() -> None:
    one, other = AdapterRef("one", "", "a" * 32), AdapterRef("other", "", "b" * 32)
    forged = prefix_salt("", one)
    salts = [
        *(prefix_salt(salt, who) for salt in ("", "x", forged) for who in (None, one, other)),
        prefix_salt("\0\0x", None),
    ]
    assert len(set(salts)) == len(salts)
    assert prefix_salt("x", None) == "x"
