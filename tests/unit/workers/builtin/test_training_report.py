"""What the training run reported, against what the model must be and what its card says."""

import json
from pathlib import Path
from typing import Any

import pytest

import workers.builtin
from workers.builtin import builtin_draft_path, builtin_model_path

_FOLDER = Path(workers.builtin.__file__).parent


@pytest.fixture
def report() -> Any:
    return json.loads((_FOLDER / "training_report.json").read_text(encoding="utf-8"))


def test_held_out_loss_beats_a_unigram_model_by_a_wide_margin(report: Any) -> None:
    for name in ("target", "draft"):
        losses = report[name]["held_out"]
        assert losses["unigram_nats_per_token"] - losses["nats_per_token"] >= 2.0
        assert losses["num_windows"] >= 100


def test_target_is_better_than_draft(report: Any) -> None:
    target, draft = (report[name]["held_out"] for name in ("target", "draft"))
    assert target["nats_per_token"] < draft["nats_per_token"] - 0.1


def test_report_is_about_the_weights_that_ship(report: Any) -> None:
    for name, folder in (("target", builtin_model_path()), ("draft", builtin_draft_path())):
        assert report[name]["weights_bytes"] == (folder / "model.safetensors").stat().st_size


def test_model_card_states_the_reported_figures(report: Any) -> None:
    card = (_FOLDER / "README.md").read_text(encoding="utf-8")
    for name in ("target", "draft"):
        losses = report[name]["held_out"]
        for figure in ("nats_per_token", "bits_per_byte", "chat_nats_per_token"):
            assert f"{losses[figure]:.2f}" in card, f"{name} {figure}"
    assert report["corpus"]["sha256"] in card


def test_held_out_functions_are_called_and_asked_for_json_is_json(report: Any) -> None:
    scores = report["target"]["calls_and_json"]
    assert all(one["num"] >= 100 for one in scores.values())
    assert scores["one function"]["right_call"] > 0.8
    assert scores["some functions"]["right_call"] > 0.6
    assert scores["JSON, schema"]["right"] > 0.8
    assert all(one["valid"] > 0.9 for kind, one in scores.items() if kind.startswith("JSON"))


def test_model_card_states_the_scores_of_calls_and_json(report: Any) -> None:
    card = (_FOLDER / "README.md").read_text(encoding="utf-8")
    for kind, one in report["target"]["calls_and_json"].items():
        first, second = (one[name] for name in one if name != "num")
        assert f"| {kind} | {first:.0%} | {second:.0%} |".replace("%", " %") in card, kind


def test_notice_of_the_training_text_is_carried() -> None:
    notice = (_FOLDER / "LICENSE.PSF-2.0.txt").read_text(encoding="utf-8")
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2\n" in notice
    assert "Python Software Foundation;\nAll Rights Reserved" in notice
