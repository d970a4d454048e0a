"""What tests prove is read off markers and parameters, and written down by GPU and backend."""

import os
import subprocess
import sys
from pathlib import Path

from attention.features import Feature
from tests.proofs.cells import Cell
from tests.proofs.results import (
    BackendResults,
    GpuResults,
    RunProofs,
    file_name,
    merge_results,
    read_results,
    write_results,
)

ROOT = Path(__file__).parents[3]
MODULE = """
import pytest
from attention import LayerAttentionConfig
from attention.backends.triton_paged import TritonBackend
from attention.features import Feature
from tests.proofs.cells import proves
from tests.unit.attention.cases import rows_of
from tests.unit.attention.visibility_cases import KINDS

LAYERS = [LayerAttentionConfig(sliding_window_size=4, has_sinks=True)]


@proves("fa3", Feature.GRAPHS)
@pytest.mark.parametrize("page_size", [16])
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("rows", [rows_of((3, 1)), rows_of((9, 4), (2, 1))])
def test_steps(rows, layer, page_size):
    assert len(rows) == 1


@proves()
@pytest.mark.parametrize("backend", [TritonBackend])
@pytest.mark.parametrize("make", [KINDS["tree"]])
@pytest.mark.parametrize("rows", [rows_of((9, 4))])
def test_trees(rows, make, backend):
    pass


@proves("fa3", Feature.MLA)
def test_latents():
    pytest.skip("elsewhere")


def test_nothing():
    pass
"""
SERVING = """
from tests.proofs.served import serves
from workers.models.features import ModelFeature


@serves("LlamaForCausalLM", ModelFeature.{})
def test_text():
    pass
"""
# A GPU that is not there, in every process of the run.
DEVICE = """
import torch
torch.cuda.get_device_name = lambda device: "NVIDIA Test 1 GPU"
torch.cuda.get_device_capability = lambda device: (9, 0)
"""
FA3_DECODE = {"CUDA graphs", "K and V of heads", "attention sinks", "decode", "page size 16"}
FA3_DECODE |= {"sliding windows"}


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_it.py").write_text(MODULE)
    (folder / "conftest.py").write_text(DEVICE)
    markers = "[pytest]\nmarkers =\n  proves: x\n  serves: x\n"
    markers += "addopts = -p no:cacheprovider --import-mode=importlib\n"
    (folder / "pytest.ini").write_text(markers)
    plugins = ("-p", "xdist.plugin", "-p", "tests.proofs.plugin")
    command = [sys.executable, "-m", "pytest", "-q", *plugins, *options]
    # The others take longer to import than this run takes.
    environment = {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    environment = {**os.environ, **environment}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=240
    )


def test_a_run_writes_what_passed_and_what_failed(tmp_path):
    """Over processes: that of pytest-xdist hears of its tests, this one of their reports."""
    done = run(tmp_path, "--proofs-to", str(tmp_path / "out"), "-n", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    (results,) = read_results(tmp_path / "out")
    assert (results.gpu, results.compute_capability) == ("NVIDIA Test 1 GPU", "sm90")
    assert (tmp_path / "out" / "nvidia-test-1-gpu.json").exists()
    fa3, triton = results.backends["fa3"], results.backends["triton"]
    assert fa3.passed == dict.fromkeys(FA3_DECODE, 1)
    more = {"prefill", "prefill and decode in one step", "verification of drafts"}
    assert set(fa3.failed) == FA3_DECODE - {"decode"} | more
    assert (fa3.num_tests, fa3.num_failed) == (2, 1)
    assert set(triton.passed) == {Feature.HEADS.value, Feature.TREE.value}
    assert "torch" in fa3.packages


def test_what_runs_over_several_gpus_stands_beside_what_an_earlier_run_had_on_one(tmp_path):
    for place, feature in (("workers", "GRAPHS"), ("parallel", "TENSOR_PARALLEL_GPU")):
        folder = tmp_path / "tests" / "gpu" / place
        folder.mkdir(parents=True)
        (folder / "test_models.py").write_text(SERVING.format(feature))
        done = run(tmp_path, "--proofs-to", str(tmp_path / "out"), f"tests/gpu/{place}")
        assert done.returncode == 0, done.stdout + done.stderr
    (results,) = read_results(tmp_path / "out")
    assert results.backends == {}
    assert results.models["LlamaForCausalLM"].passed == {"decode graphs": 1}
    assert results.ranked_models["LlamaForCausalLM"].passed == {"tensor parallelism on GPUs": 1}


def results_of(**backends: BackendResults) -> GpuResults:
    return GpuResults("NVIDIA H200", "sm90", backends)


def test_a_run_replaces_the_backends_that_it_ran():
    old, new = (BackendResults(date, {}, 1, 0, {"decode": 1}, {}) for date in ("old", "new"))
    merged = merge_results(results_of(fa3=old, triton=old), results_of(triton=new, flex=new))
    assert {name: results.date for name, results in merged.backends.items()} == {
        "fa3": "old",
        "flex": "new",
        "triton": "new",
    }
    assert merge_results(None, merged) == merged
    alone, ranked = (
        GpuResults("NVIDIA H200", "sm90", {}, *of) for of in (({"it": old},), ({}, {"it": new}))
    )
    both = merge_results(merge_results(merged, alone), ranked)
    assert both == GpuResults("NVIDIA H200", "sm90", merged.backends, {"it": old}, {"it": new})
    later = {"it": new, "other": old}
    whole = merge_results(both, GpuResults("NVIDIA H200", "sm90", {}, later, {"other": old}))
    assert (whole.models, whole.ranked_models) == (later, later)
    whole = merge_results(whole, GpuResults("NVIDIA H200", "sm90", {}, {}, {"it": old}))
    assert (whole.models, whole.ranked_models) == (later, {"it": old, "other": old})


def test_files_are_read_as_they_were_written(tmp_path):
    proofs = RunProofs()
    proofs.count([Cell("fa3", "decode"), Cell("fa3", "prefill")], has_passed=True)
    proofs.count([Cell("fa3", "decode")], has_passed=False)
    results = results_of(**proofs.by_backend("2026-11-25", {"torch": "2.11.0"}))
    path = write_results(tmp_path, results)
    assert path.name == file_name("NVIDIA H200") == "nvidia-h200.json"
    assert read_results(tmp_path) == (results,)
    fa3 = results.backends["fa3"]
    assert (fa3.num_tests, fa3.passed, fa3.failed) == (
        2,
        {"decode": 1, "prefill": 1},
        {"decode": 1},
    )
