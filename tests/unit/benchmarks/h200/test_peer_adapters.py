"""vLLM's adapters are of the modules and shapes that ours are, and read by our own reader."""

import json

from benchmarks.h200.peers.run_vllm_adapters import projections, write_adapter
from workers.adapters.folder import adapter_at
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.engine import Engine

RANK = 4


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
