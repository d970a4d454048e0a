"""compare.py and the peers' drivers, whole, with packages that stand in for vLLM and SGLang."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.h200.peers.run_vllm import WITHOUT_MULTICAST, apply_environment

ROOT = Path(__file__).parents[4]
VLLM = """
import json, pathlib, time, types
class SamplingParams:
    def __init__(self, **settings):
        assert settings["temperature"] == 0.0 and settings["ignore_eos"]
        self.max_tokens = settings["max_tokens"]
class LLM:
    def __init__(self, model, **settings):
        from vllm.model_executor.model_loader import dummy_loader
        assert dummy_loader.initialize_dummy_weights.__name__ == "fill_with_noise"
        assert (pathlib.Path(model) / "config.json").read_text() == "{}"
        print("INFO {'noise': 1}")
        pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(settings))
    def generate(self, requests, params, use_tqdm):
        assert len(requests) == len(params)
        time.sleep(max(one.max_tokens for one in params) * 1e-4)
        tokens = [types.SimpleNamespace(token_ids=[0] * one.max_tokens) for one in params]
        return [types.SimpleNamespace(outputs=[output]) for output in tokens]
"""
SGLANG = """
import json, pathlib, time
class Engine:
    def __init__(self, **settings):
        from sglang.srt.model_loader import loader
        assert loader.initialize_dummy_weights.__name__ == "fill_with_noise"
        pathlib.Path(__file__).with_name("seen.json").write_text(json.dumps(settings))
    def generate(self, input_ids, sampling_params):
        assert len(input_ids) == len(sampling_params)
        numbers = [one["max_new_tokens"] for one in sampling_params]
        time.sleep(max(numbers) * 1e-4)
        return [{"output_ids": [0] * number} for number in numbers]
    def shutdown(self):
        pass
"""
TORCH = """
import types
Tensor = dtype = object
nn = types.SimpleNamespace(Module=object)
def no_grad():
    return lambda function: function
"""
"""What drivers name of PyTorch, which takes seconds to import; test_peer_noise.py has all of it."""
DUMMY_WEIGHTS = {
    "vllm": "model_executor/model_loader/dummy_loader.py",
    "sglang": "srt/model_loader/loader.py",
}
"""Where a peer looks up what fills its weights."""
BROKEN = "raise ImportError('no GPU here')"


def compare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "tiny.json").write_text("{}")
    log = "--log", str(folder / "log.jsonl")
    command = [sys.executable, "-m", "benchmarks.h200.compare", str(folder / "tiny.json"), *log]
    environment = {**os.environ, "PYTHONPATH": ""}
    return subprocess.run(
        [*command, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True
    )


def site(folder: Path, name: str, code: str) -> str:
    package = folder / name / name
    filler = package / DUMMY_WEIGHTS[name]
    filler.parent.mkdir(parents=True)
    filler.write_text("def initialize_dummy_weights(model): pass")
    (package / "__init__.py").write_text(code)
    (folder / name / "torch.py").write_text(TORCH)
    return f"{name}={folder / name}"


def settings_of(folder: Path, name: str) -> dict[str, object]:
    seen: dict[str, object] = json.loads((folder / name / name / "seen.json").read_text())
    return seen


def test_engines_run_in_several_calls_and_end_in_one_table(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", VLLM), "--site", site(tmp_path, "sglang", SGLANG)
    first = compare(tmp_path, *sites, "--engines", "vllm", "--workload", "decode")
    assert first.returncode == 0, first.stderr
    second = compare(tmp_path, *sites, "--engines", "sglang", "--workload", "decode")
    assert second.returncode == 0, second.stderr
    assert "| workload | tessera | vllm | sglang | ahead of vllm | ahead of sglang |" in (
        second.stdout
    )
    assert (tmp_path / "log.jsonl").read_text().count('"repeat": 1') == 12
    assert settings_of(tmp_path, "vllm")["enable_prefix_caching"] is False
    assert settings_of(tmp_path, "sglang")["disable_radix_cache"] is True


def test_prefix_rows_are_measured_with_the_prefix_cache_on(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", VLLM), "--site", site(tmp_path, "sglang", SGLANG)
    prefix = "--engines", "vllm", "sglang", "--workload", "prefix", "--repeats", "1", "--tp", "2"
    result = compare(tmp_path, *sites, *prefix)
    assert result.returncode == 0, result.stderr
    assert "prefix workload, prefix cache on" in result.stdout
    vllm, sglang = settings_of(tmp_path, "vllm"), settings_of(tmp_path, "sglang")
    assert vllm["enable_prefix_caching"] is True
    assert sglang["disable_radix_cache"] is False
    assert vllm["tensor_parallel_size"] == sglang["tp_size"] == 2
    assert vllm["gpu_memory_utilization"] == sglang["mem_fraction_static"] == 0.85
    assert vllm["max_num_seqs"] == sglang["max_running_requests"] == 256
    assert vllm["max_model_len"] == sglang["context_length"] == 8192


def test_experts_are_divided_over_the_gpus_and_the_table_says_so(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", VLLM), "--site", site(tmp_path, "sglang", SGLANG)
    decode = "--engines", "vllm", "sglang", "--workload", "decode", "--repeats", "1", "--tp", "2"
    cut = compare(tmp_path, *sites, *decode)
    assert cut.returncode == 0, cut.stderr
    assert settings_of(tmp_path, "vllm")["enable_expert_parallel"] is False
    divided = compare(tmp_path, *sites, *decode, "--ep", "2")
    assert divided.returncode == 0, divided.stderr
    vllm, sglang = settings_of(tmp_path, "vllm"), settings_of(tmp_path, "sglang")
    assert (vllm["tensor_parallel_size"], vllm["enable_expert_parallel"]) == (2, True)
    assert (sglang["tp_size"], sglang["ep_size"]) == (2, 2)
    assert "tiny TP 2, decode workload" in cut.stdout
    assert "tiny EP 2, decode workload" in divided.stdout
    rows = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert {row["model"] for row in rows} == {"tiny TP 2", "tiny EP 2"}


def test_an_expert_parallelism_that_vllm_has_not_is_an_error(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", VLLM)
    result = compare(tmp_path, *sites, "--engines", "vllm", "--tp", "4", "--ep", "2")
    assert result.returncode == 1
    assert "not ep_size=2" in result.stderr


def test_an_environment_keeps_the_kernels_that_it_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {"VLLM_USE_DEEP_GEMM": "1", "NCCL_NVLS_ENABLE": "1"})
    apply_environment(WITHOUT_MULTICAST)
    assert os.environ["VLLM_USE_DEEP_GEMM"] == "1"
    assert os.environ["VLLM_USE_FLASHINFER_SAMPLER"] == "0"
    assert os.environ["NCCL_NVLS_ENABLE"] == "0"


def test_an_engine_that_fails_is_named_and_the_others_still_run(tmp_path: Path) -> None:
    sites = "--site", site(tmp_path, "vllm", BROKEN), "--site", site(tmp_path, "sglang", SGLANG)
    engines = "--engines", "vllm", "sglang"
    result = compare(tmp_path, *sites, *engines, "--workload", "decode", "--repeats", "1")
    assert result.returncode == 1
    assert "vllm: exit status 1" in result.stderr
    assert "| workload | tessera | sglang | ahead of sglang |" in result.stdout


@pytest.mark.parametrize("engines", [("vllm",), ("nobody",)])
def test_an_engine_without_packages_is_a_usage_error(
    tmp_path: Path, engines: tuple[str, ...]
) -> None:
    assert compare(tmp_path, "--engines", *engines).returncode == 2
