"""What experts get is counted where they are chosen, and read with every Nth step."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import MIXTURES, NATIVE, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import ExpertRecord, StepRecord
from workers.errors import ConfigError
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.tally import ExpertTally
from workers.loading.expert_load_file import read_expert_loads, write_expert_loads
from workers.loading.loader import load_model
from workers.parallel.expert_copies import ExpertHolders
from workers.parallel.expert_group import ExpertShare
from workers.parallel.group import SingleRank, TPGroup
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
    loads = ExpertLoads(tally, 1, [ExpertHolders.of_owners(4, 2)] * 2, 2)
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


def test_copies_share_what_their_expert_gets_and_loads_are_kept(tmp_path: Path) -> None:
    """At most once a minute."""
    now = [0.0]
    tally = ExpertTally.__new__(ExpertTally)
    tally.tokens, file = torch.tensor([[6, 0, 1, 1]]), tmp_path / "loads.json"
    holders = [ExpertHolders(((0, 1), (0,), (1,), (1,)))]
    loads = ExpertLoads(tally, 1, holders, 2, file, clock=lambda: now[0])
    for seconds, kept in ((0.0, 6), (59.0, 6), (61.0, 8)):
        now[0] = seconds
        read = loads.after_launch()
        assert read is not None
        record = read()
        assert read_expert_loads(file, 1, 4)[0][0] == kept
        if seconds == 0.0:
            assert record.tokens_by_part == (3, 3 + 2)
        tally.tokens = tally.tokens + torch.tensor([[1, 0, 0, 0]])
    with pytest.raises(ConfigError, match="not of 2 mixtures of 4 experts"):
        read_expert_loads(file, 2, 4)
    file.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no loads of experts"):
        read_expert_loads(file, 1, 4)
    assert read_expert_loads(tmp_path / "none.json", 1, 2) == [[0, 0]]


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, *(f'{{"tokens": [[{one}, 1]]}}' for one in ("1e400", "-1", 2**63, "2.5"))],
)
def test_a_file_of_something_else_is_refused(tmp_path: Path, text: str) -> None:
    file = tmp_path / "loads.json"
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match="holds no loads of experts"):
        read_expert_loads(file, 1, 2)
    with pytest.raises(ConfigError, match="holds no loads of experts"):
        read_expert_loads(tmp_path, 1, 2)


def test_loads_that_cannot_be_kept_are_told_of_and_end_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tally = ExpertTally.__new__(ExpertTally)
    tally.tokens = torch.tensor([[4, 0, 2, 2]])
    file = tmp_path / "loads.json"
    file.mkdir()
    read = ExpertLoads(tally, 1, [ExpertHolders.of_owners(4, 2)], 2, file).after_launch()
    assert read is not None
    assert read().tokens_by_part == (4, 4)
    assert f"expert_load_file {file} is not written" in caplog.text
    assert list(tmp_path.iterdir()) == [file]
    folder = save_tiny_model(MIXTURES["qwen2_moe"], tmp_path / "model")
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        num_pages=32,
        expert_load_interval_steps=1,
        expert_load_file=str(tmp_path / "nowhere" / "loads.json"),
    )
    with pytest.raises(ConfigError, match="expert_load_file: there is no folder"):
        Engine.from_config(config)


def test_copies_go_where_there_is_least_to_do() -> None:
    """Of the busiest, as often as pays; parts 0 to 2 own two each."""
    holders = ExpertHolders.of_loads([90, 10, 10, 10, 40, 10], 3, 3)
    assert holders.by_expert == ((0, 1, 2), (0,), (1,), (1,), (2, 0), (2,))
    assert [holders.copies_of(part) for part in range(3)] == [(4,), (0,), (0,)]
    nothing = ExpertHolders.of_loads([0] * 6, 3, 3)
    assert nothing == ExpertHolders.of_owners(6, 3)


def logits_of(folder: Path, tp: TPGroup, **changes: Any) -> torch.Tensor:
    config = EngineConfig(model=str(folder), model_impl="native", **changes)
    with torch.inference_mode(mode=False):
        loaded = load_model(config, tp, torch.device("cpu"), torch.float32)
    copies = [one.copies for one in shares_of(loaded.model)]
    assert any(copies) == ("num_redundant_experts" in changes)
    rows = ModelRows(loaded, torch_native_backend(loaded))
    return torch.cat([rows.step({0: random_prompt(20)})[0], rows.step({0: [5]})[0]])


def shares_of(model: torch.nn.Module) -> list[ExpertShare]:
    return [one.experts.share for one in model.modules() if isinstance(one, MixtureOfExperts)]


@pytest.mark.parametrize("name", ["qwen2_moe", "llama4"])
def test_ranks_with_copies_compute_what_one_does(name: str, tmp_path: Path) -> None:
    """Experts in tensors of their own and in one; shared ones lie behind the copies."""
    folder, file = save_tiny_model(MIXTURES[name], tmp_path / "model"), tmp_path / "loads.json"
    num_experts = 8 if name == "qwen2_moe" else 4
    write_expert_loads(file, [[9, 1] + [0] * (num_experts - 3) + [5]] * 2)
    want = logits_of(folder, SingleRank())
    settings = {"tp_size": 2, "ep_size": 2}
    copies = {"num_redundant_experts": 4, "expert_load_file": str(file)}
    got = ThreadRanks(2).run(lambda tp: logits_of(folder, tp, **settings, **copies))
    assert torch.equal(got[0], got[1])
    torch.testing.assert_close(got[0], want, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"num_redundant_experts": 3}, "no multiple of ep_size=2"),
        ({"num_redundant_experts": 2}, "needs an expert_load_file"),
        ({"num_redundant_experts": 1, "tp_size": 1, "ep_size": 1}, "needs an ep_size above 1"),
        (
            {"num_redundant_experts": 2, "expert_load_file": "f", "deterministic": True},
            "deterministic and num_redundant_experts",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], reason: str) -> None:
    settings: dict[str, Any] = {"tp_size": 2, "ep_size": 2, **changes}
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(model="m", **settings)
