"""`tessera backends --model M`: measured times, who is taken, who is left out and why."""

from dataclasses import replace

import pytest
from typer.testing import CliRunner

from attention.backends.torch_native import TorchNativeBackend
from attention.preferences import PREFERENCES, DeviceGeneration, Preference
from attention.registration import ATTENTION_BACKENDS
from service.cli import app
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.attention.tuning.doubles import KnownCosts, ManualClock
from workers.runner import sizing
from workers.runner.attention_tuning import AttentionTuner


class Wide(TorchNativeBackend):
    capability = replace(TorchNativeBackend.capability, name="wide")


COSTS = {"torch_native": lambda point: 1e-3 * point.rows, "wide": lambda point: 4e-3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(
        ATTENTION_BACKENDS, "_classes", ATTENTION_BACKENDS._classes | {"wide": Wide}
    )
    order = Preference(mha=("torch_native", "wide", "fa3"), mla=())
    monkeypatch.setitem(PREFERENCES, DeviceGeneration.NO_GPU, order)

    def tuner_for(config, tp, front):
        clock = ManualClock()
        measure = KnownCosts(COSTS, clock)
        return AttentionTuner(config, tp, lambda *_: measure, tmp_path / "cache", clock=clock)

    monkeypatch.setattr(sizing, "tuner_for", tuner_for)
    monkeypatch.setenv("COLUMNS", "200")
    return str(save_tiny_model(NATIVE["llama3"], tmp_path / "model"))


def test_a_models_attention_is_measured_and_shown(folder):
    result = CliRunner().invoke(app, ["backends", "--device", "cpu", "--model", folder])
    assert result.exit_code == 0, result.output
    rows = [line for line in result.output.splitlines() if "decode 256 x 256" in line]
    (row,) = rows
    cells = [cell.strip() for cell in row.strip("│┃ ").split("│")]
    assert cells[-1] == "wide"
    assert float(cells[1]) / float(cells[2]) == pytest.approx(64.0, rel=1e-3)
    assert "auto-tuned: " in result.output
    assert "not fa3 in decode: " in result.output


def test_a_model_that_is_not_there_is_one_readable_message():
    result = CliRunner().invoke(app, ["backends", "--device", "cpu", "--model", "/absent"])
    assert result.exit_code == 1
    assert "nor a folder with a model" in " ".join(result.output.split())


def test_one_candidate_is_not_measured(folder, monkeypatch):
    order = Preference(mha=("torch_native",), mla=())
    monkeypatch.setitem(PREFERENCES, DeviceGeneration.NO_GPU, order)
    result = CliRunner().invoke(app, ["backends", "--device", "cpu", "--model", folder])
    assert "decode: torch_native, the only candidate; nothing was measured" in result.output
