"""The table of attention backends says what the code and its tests say."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from attention.backends.torch_native import TorchNativeBackend
from attention.features import Feature
from attention.registry import registered_backends
from tests.proofs.cells import MARKER, MODELS_MARKER
from tests.proofs.matrix import failed, features_of, main, render_matrix, unproven
from tests.proofs.model_table import failed_models, render_models, unserved, with_models
from tests.proofs.plugin import COMMITTED
from tests.proofs.results import BackendResults, GpuResults, read_results
from workers.models.features import ModelCapability, ModelFeature, all_capabilities

ROOT = Path(__file__).parents[3]
TABLE = ROOT / "docs" / "attention-backends.md"
MODELS = ROOT / "docs" / "models.md"
_USE = re.compile(rf"\b({MARKER}|{MODELS_MARKER})\(")


def test_committed_table_is_current():
    wanted = render_matrix(registered_backends(), read_results(COMMITTED))
    assert TABLE.read_text(encoding="utf-8") == wanted, (
        "run: python -m tests.proofs.matrix docs/attention-backends.md"
    )


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """What tests prove, by node id: those of GPUs are collected everywhere."""
    path = tmp_path_factory.mktemp("proofs") / "collected.json"
    options = ("-q", "--collect-only", "--assert=plain", "-p", "no:cacheprovider")
    options += ("-p", "tests.proofs.plugin", "--proofs-collected", str(path))
    folders = (ROOT / "tests" / kind for kind in ("unit/attention", "unit/workers", "gpu"))
    files = [file for folder in folders for file in sorted(folder.rglob("test_*.py"))]
    files = [file for file in files if _USE.search(file.read_text(encoding="utf-8"))]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *map(str, files)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    return json.loads(path.read_text(encoding="utf-8"))


def test_every_yes_has_a_test(collected):
    """Of the CPU's among those that run here, of a GPU's among tests/gpu."""
    assert unproven(registered_backends(), collected) == []


def test_every_yes_of_a_model_has_a_test(collected):
    assert unserved(all_capabilities(), collected) == []


def test_committed_table_of_models_is_current():
    text = MODELS.read_text(encoding="utf-8")
    table = render_models(all_capabilities(), read_results(COMMITTED))
    assert text == with_models(text, table), (
        "run: python -m tests.proofs.model_table docs/models.md"
    )


def test_no_run_on_a_gpu_shows_a_yes_to_be_wrong():
    assert failed(read_results(COMMITTED)) == []
    assert failed_models(read_results(COMMITTED)) == []


def test_every_no_has_a_reason():
    missing = [
        (backend.capability.name, feature.name)
        for backend in registered_backends()
        for feature in set(Feature) - features_of(backend)
        if not backend.capability.why_not.get(feature)
    ]
    assert missing == []


def backend_of(name, **changes):
    declared = replace(TorchNativeBackend.capability, name=name, **changes)
    return type("Backend", (TorchNativeBackend,), {"capability": declared})


CUDA = backend_of(
    "special",
    device_types=("cuda",),
    min_compute_capability=(9, 0),
    max_compute_capability=(9, 0),
    page_sizes=(64, 128),
    default_page_size=128,
    has_sinks=False,
    why_not={**TorchNativeBackend.capability.why_not, Feature.SINKS: "nobody built them"},
)


def h200(passed, failed):
    run = BackendResults("2026-11-25", {"torch": "2.11.0"}, 9, len(failed), passed, failed)
    return GpuResults("NVIDIA H200", "sm90", {"special": run})


def rows_of(text):
    return {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if "|" in line}


def test_cells_say_what_was_run_and_why_not():
    newer = backend_of("newer", device_types=("cuda",), min_compute_capability=(10, 0))
    results = [h200({"decode": 3, "page size 64": 1, "page size 128": 2}, {"logit caps": 1})]
    text = render_matrix([TorchNativeBackend, CUDA, newer], results)
    rows = rows_of(text)
    assert rows["Page sizes"] == "| Page sizes | 1 to 256 | 64, 128 | 1 to 256 |"
    assert rows["Default page size"] == "| Default page size | 16 | 128 | 16 |"
    assert rows["GPU generations"] == "| GPU generations | any | sm90 | sm100 to |"
    assert rows["Decode"] == "| Decode | yes | yes | not run |"
    assert rows["Logit caps"] == "| Logit caps | yes | fails on NVIDIA H200 | not run |"
    number = text.split("nobody built them")[0].splitlines()[-1].strip(". ")
    assert rows["Attention sinks"] == f"| Attention sinks | yes | no ({number}) | not run |"
    assert (
        "| NVIDIA H200 (sm90) | `special` | 2026-11-25 | 8 | 1 | 64, 128 | torch 2.11.0 |" in text
    )
    assert failed(results) == ["NVIDIA H200: special: logit caps"]


def test_a_test_elsewhere_than_where_a_backend_runs_proves_nothing():
    cells = [["special", feature.value] for feature in features_of(CUDA)]
    cells += [["special", "page size 64"], ["special", "page size 128"]]
    assert unproven([CUDA], {"tests/gpu/attention/test_it.py::test": cells}) == []
    left = unproven([CUDA], {"tests/unit/attention/test_it.py::test": cells})
    assert ("special", "decode") in left
    assert ("special", "page size 64") in left
    assert ("special", "attention sinks") not in left


def test_cells_of_models_say_what_was_run_and_why_not():
    features = set(ModelFeature) - {ModelFeature.LORA}
    model = ModelCapability("SomeForCausalLM", "native", {ModelFeature.LORA: "nobody built it"})
    run = BackendResults("2026-11-27", {}, 3, 1, {"runs on a GPU": 2}, {"decode graphs": 1})
    ranks = {"tensor parallelism on GPUs": 1}, {"expert parallelism on GPUs": 1}
    over_ranks = BackendResults("2026-11-27", {}, 2, 1, *ranks)
    of_each = [{"SomeForCausalLM": one} for one in (run, over_ranks)]
    results = [GpuResults("NVIDIA H200", "sm90", {}, *of_each)]
    line = render_models([model], results).splitlines()[2]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[:2] == ["`SomeForCausalLM`", "native"]
    assert cells[2:8] == ["yes", "yes", "yes", "yes", "yes", "no (1)"]
    assert cells[8:] == ["yes", "fails on NVIDIA H200", "yes", "fails on NVIDIA H200"]
    failed_cells = ["decode graphs", "expert parallelism on GPUs"]
    assert failed_models(results) == [f"NVIDIA H200: SomeForCausalLM: {x}" for x in failed_cells]
    unrun = render_models([model], [GpuResults("NVIDIA H200", "sm90", {}, of_each[0])])
    assert unrun.splitlines()[2].endswith("| yes | fails on NVIDIA H200 | not run | not run |")
    on_cpu = [["SomeForCausalLM", feature.value] for feature in features]
    left = unserved([model], {"tests/unit/test_it.py::test": on_cpu})
    assert {what for _, what in left} == {one.value for one in features if one.is_proved_on_gpu}
    with pytest.raises(ValueError, match="the document has no"):
        with_models("nothing", "table")


def test_fp8_is_what_a_kv_cache_may_be_kept_in():
    fp8 = backend_of("fp8", kv_dtypes=(torch.float8_e5m2,))
    assert Feature.FP8_KV in features_of(fp8)
    assert Feature.FP8_KV not in features_of(CUDA)


def test_command_writes_the_file_or_prints_it(tmp_path, capsys):
    target = tmp_path / "matrix.md"
    main([str(target)])
    main([])
    assert target.read_text(encoding="utf-8") == capsys.readouterr().out
