"""What experts get is counted where they are chosen, and read with every Nth step."""

from pathlib import Path

import pytest
import torch

from tests.fakes.tiny_models import MIXTURES, NATIVE, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import ExpertRecord, StepRecord
from workers.errors import ConfigError
from workers.layers.moe.tally import ExpertTally
from workers.runner.expert_loads import ExpertLoads
from workers.sampling.params import SamplingParams


def records_of(folder: Path, interval_steps: int) -> tuple[list[ExpertRecord], int]:
    """And the tokens of all steps."""
    told: list[StepRecord] = []
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        num_pages=32,
        num_cpu_threads=1,
        enable_overlap=False,
        expert_load_interval_steps=interval_steps,
    )
    engine = Engine.from_config(config, on_step=told.append)
    try:
        engine.generate([random_prompt(20)], SamplingParams(max_tokens=5, ignore_eos=True))
    finally:
        engine.close()
    num_tokens = sum(one.num_prefill_tokens or one.batch_size for one in told)
    return [one.experts for one in told if one.experts is not None], num_tokens


def test_every_token_counts_once_a_layer_and_expert(tmp_path: Path) -> None:
    """Three experts a token, in two of three layers; of the last one only what samples goes on."""
    folder = save_tiny_model(MIXTURES["qwen2_moe"], tmp_path)
    all_records, num_tokens = records_of(folder, 1)
    assert len(all_records) == 5
    assert sum(one.tokens_by_part[0] for one in all_records) == 3 * (num_tokens + 5)
    assert all(one.busiest_part == 1.0 for one in all_records)
    assert all(one.busiest_expert > 1.0 for one in all_records)
    assert len(records_of(folder, 2)[0]) == 2
    assert records_of(folder, 0)[0] == []


def test_a_record_tells_of_what_came_since_the_last_one() -> None:
    tally = ExpertTally.__new__(ExpertTally)
    tally.tokens = torch.tensor([[4, 0, 2, 2], [1, 1, 1, 1]])
    loads = ExpertLoads(tally, interval_steps=1, num_parts=2)
    read = loads.after_launch()
    assert read is not None
    assert read() == ExpertRecord((4 + 2, 4 + 2), (2.0 + 1.0) / 2, 1.0)
    tally.tokens = tally.tokens + torch.tensor([[3, 1, 0, 0], [0, 0, 0, 4]])
    read = loads.after_launch()
    assert read is not None
    assert read() == ExpertRecord((4, 4), (3.0 + 4.0) / 2, 2.0)
    read = loads.after_launch()
    assert read is not None
    assert read() == ExpertRecord((0, 0), 0.0, 0.0)


def test_a_model_without_experts_has_nothing_to_count(tmp_path: Path) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    with pytest.raises(ConfigError, match="this model has none there"):
        records_of(folder, 1)
    with pytest.raises(ConfigError, match="expert_load_interval_steps must not be negative"):
        EngineConfig(expert_load_interval_steps=-1)
