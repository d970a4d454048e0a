"""vLLM's adapters are of the modules and shapes that ours are, and read by our own reader."""

import json
import subprocess
import sys

from benchmarks.h200.peers.run_vllm_adapters import projections, write_adapter
from workers.adapters.folder import adapter_at
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine

RANK = 4
FORKING = """
import json, os, sys
from pathlib import Path
from benchmarks.h200.peers.run_vllm_adapters import write_adapters

folders = write_adapters(Path(sys.argv[1]), json.loads(sys.argv[2]), 64, 2)
assert all((folder / "adapter_model.safetensors").is_file() for folder in folders)
import torch
child = os.fork()
if child == 0:
    torch.ones(1 << 20).mul(2)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_peers_adapter_is_one_of_ours(tmp_path):
    config = json.loads((builtin_model_path() / "config.json").read_text())
    engine = Engine.from_config(EngineConfig(device="cpu", max_loras=1, max_lora_rank=RANK))
    try:
        info = engine.info.adapters
        assert info is not None
        folder = write_adapter(tmp_path / "one", config, RANK, 0)
        assert adapter_at("one", folder, info).name == "one"
    finally:
        engine.close()
    layer = {
        name.removeprefix("model.layers.0."): shape
        for name, shape in info.modules.items()
        if name.startswith("model.layers.0.")
    }
    assert layer == projections(config)


def test_a_fork_behind_peers_adapters_has_all_threads_that_it_waits_for(tmp_path):
    """vLLM's engine is one: OpenMP's threads do not come along."""
    config = {
        "hidden_size": 2048,
        "intermediate_size": 4096,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "num_hidden_layers": 1,
    }
    command = [sys.executable, "-c", FORKING, str(tmp_path), json.dumps(config)]
    subprocess.run(command, timeout=120, check=True)
