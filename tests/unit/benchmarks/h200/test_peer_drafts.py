"""Peers' drafts: what engines are asked for, what fills a head, and how runs are counted."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.h200.drafted_decode import HeldRuns, config_folders, peer_parser
from benchmarks.h200.peers import run_sglang_drafts, run_vllm_drafts

HEAD = ["--head", "head.json"]
FOLDERS = ["model", "head"]


class Head(nn.Module):
    """As vLLM's or SGLang's: ids of the model's tokens, which no file has given."""

    def __init__(self, **ids: Any) -> None:
        super().__init__()
        self.lm_head = nn.Linear(16, 12)
        self.config = SimpleNamespace(draft_vocab_size=12)
        for name, value in ids.items():
            setattr(self, name, value)


class FakeScheduler:
    def make_spec_decoding_stats(self, stats: object, **named: Any) -> object:
        return stats


def test_a_head_of_vllm_keeps_its_own_output_layer() -> None:
    zeros = nn.Parameter(torch.zeros(12, dtype=torch.long), requires_grad=False)
    head, other = Head(draft_id_to_target_id=zeros), Head()
    for module in (head, other):
        run_vllm_drafts.fill_with_noise_of_its_own(module, object())
    assert head.has_own_lm_head is True
    assert not hasattr(other, "has_own_lm_head")
    assert head.draft_id_to_target_id.tolist() == [0] * 12
    assert 0.01 < head.lm_head.weight.std().item() < 0.03


def test_tokens_of_a_sglang_head_are_the_first_of_the_model() -> None:
    head, other = Head(hot_token_id=None), Head()
    for module in (head, other):
        run_sglang_drafts.fill_with_noise_and_ids(module)
    assert head.hot_token_id.tolist() == list(range(12))
    assert not hasattr(other, "hot_token_id")


def test_runs_of_vllm_are_counted_where_its_scheduler_makes_statistics() -> None:
    class Counted(FakeScheduler):
        pass

    held = run_vllm_drafts.count_runs(Counted)
    named = {"num_invalid_spec_tokens": None, "request_id": "a"}
    for drafts, accepted in ((3, 2), (0, 0), (3, 1)):
        made = Counted().make_spec_decoding_stats(
            "stats", num_draft_tokens=drafts, num_accepted_tokens=accepted, **named
        )
        assert made == "stats"
    assert held() == HeldRuns(2, 5)


def test_runs_of_sglang_are_counted_by_request() -> None:
    runs = run_sglang_drafts.CountedRuns()
    runs.add({"spec_verify_ct": 10, "spec_num_correct_drafts": 20})
    runs.add({"completion_tokens": 1})
    assert runs.held == HeldRuns(10, 30)


def test_vllm_is_asked_for_chains() -> None:
    arguments = peer_parser("").parse_args(["config.json", *HEAD, "--steps", "5"])
    assert run_vllm_drafts.speculation(FOLDERS, arguments) == {
        "method": "eagle3",
        "model": "head",
        "num_speculative_tokens": 5,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 3.0,
    }
    asked = run_vllm_drafts.asked_of(arguments)
    assert (asked.drafts, asked.verified, asked.acceptance) == ("chain of 5", 6, 3.0)
    plain = peer_parser("").parse_args(["config.json"])
    assert run_vllm_drafts.speculation(FOLDERS[:1], plain) is None
    assert run_vllm_drafts.asked_of(plain).acceptance is None


@pytest.mark.parametrize(
    ("shape", "settings", "name"),
    [
        (["--steps", "3"], (3, 1, 4), "chain of 3"),
        (["--steps", "4", "--topk", "4", "--verified", "16"], (4, 4, 16), "tree of 15, 4 deep"),
    ],
)
def test_sglang_is_asked_for_chains_and_trees(
    shape: list[str], settings: tuple[int, int, int], name: str
) -> None:
    arguments = run_sglang_drafts.parse_arguments(["config.json", *HEAD, *shape])
    asked = run_sglang_drafts.speculation(FOLDERS, arguments)
    keys = "speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens"
    assert tuple(asked[key] for key in keys) == settings
    assert asked["speculative_draft_model_path"] == "head"
    assert run_sglang_drafts.simulation(arguments)["SGLANG_SIMULATE_ACC_LEN"] == "3.0"
    row = run_sglang_drafts.asked_of(arguments)
    assert (row.drafts, row.verified) == (name, settings[2])


def test_sglang_without_a_head_decodes_plainly() -> None:
    plain = run_sglang_drafts.parse_arguments(["config.json"])
    assert run_sglang_drafts.speculation(FOLDERS[:1], plain) == {}
    assert run_sglang_drafts.simulation(plain) == {}
    assert run_sglang_drafts.asked_of(plain).drafts == "plain"


def test_half_a_tree_is_refused() -> None:
    for shape in (["--topk", "4"], ["--verified", "16"]):
        with pytest.raises(SystemExit):
            run_sglang_drafts.parse_arguments(["config.json", *HEAD, *shape])


def test_each_config_has_a_folder_of_its_own(tmp_path: Path) -> None:
    model, head = tmp_path / "model.json", tmp_path / "head.json"
    model.write_text('{"of": "model"}')
    head.write_text('{"of": "head"}')
    with config_folders(model, head) as folders:
        texts = [(Path(folder) / "config.json").read_text() for folder in folders]
        assert texts == ['{"of": "model"}', '{"of": "head"}']
    with config_folders(model, None) as folders:
        assert len(folders) == 1
    assert not Path(folders[0]).exists()
