"""A head is trained as it is used, and what the command writes is served."""

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.draft_acceptance import served
from tests.fakes.eagle_heads import HeadOracle
from tests.fakes.tiny_models import NATIVE, TinyModel, eager_reference, save_tiny_model
from workers import Engine
from workers.builtin import eagle_fit, eagle_texts, train_eagle
from workers.builtin.eagle_data import (
    IGNORED,
    OwnText,
    ReadBatch,
    TextBatches,
    TextReader,
    TextSet,
    frequent_tokens,
)
from workers.builtin.eagle_model import HeadShape, TrainedHead
from workers.builtin.eagle_writer import BestHead, save_head
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

DEEP = TinyModel("qwen3", {**NATIVE["qwen3"].changes, "num_hidden_layers": 4})
DRAFT_IDS = [5, 7, 60, 61, 90]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(DEEP, tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def target(folder: Path):
    return eager_reference(folder).eval()


@pytest.fixture(scope="module")
def texts(folder: Path) -> list[OwnText]:
    engine = Engine.from_config(EngineConfig(model=str(folder), device="cpu", num_cpu_threads=1))
    try:
        return list(eagle_texts.own_texts(engine, [[3, 4, 5], [8, 9]], 6))
    finally:
        engine.close()


def shape_of(target) -> HeadShape:
    return HeadShape(
        vocab_size=target.config.vocab_size,
        draft_vocab_size=len(DRAFT_IDS),
        target_hidden_size=target.config.hidden_size,
        intermediate_size=48,
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_norm_eps=target.config.rms_norm_eps,
        rope_theta=10000.0,
        taps=(0, 1, 2),
    )


def head_of(target) -> TrainedHead:
    torch.manual_seed(0)
    head = TrainedHead(shape_of(target), target.get_input_embeddings().weight.detach())
    rows = target.get_output_embeddings().weight.detach()[DRAFT_IDS]
    head.begin_as(target.model.norm.weight.detach(), rows)
    return head


def read(target, texts: list[OwnText], draft_ids: list[int]) -> ReadBatch:
    (batch,) = TextBatches(texts, 4096, "cpu").in_order()
    return TextReader(target, (0, 1, 2), draft_ids).read(batch)


def test_unrolled_the_head_proposes_what_it_proposes_in_use(target, tmp_path: Path) -> None:
    head = head_of(target)
    save_head(head, DRAFT_IDS, tmp_path, shape_of(target).config(64))
    prompt = [*range(20, 40)]
    oracle = HeadOracle(tmp_path, target)
    drafts = oracle.drafts(prompt, 3)
    batch = read(target, [OwnText([*prompt, *drafts], 20)], DRAFT_IDS)
    head.bfloat16().float()
    with torch.no_grad():
        steps = head(batch.token_ids, batch.taps, 3)
    anchor = len(prompt) - 2
    assert [DRAFT_IDS[int(logits[0, anchor].argmax())] for logits in steps] == drafts


def test_what_the_target_says_is_told_from_its_prompts_and_its_likeliest_known(
    target, texts: list[OwnText]
) -> None:
    assert [text.num_prompt for text in texts] == [3, 2]
    assert frequent_tokens(texts, 131, 4) == sorted(frequent_tokens(texts, 131, 4))
    batch = read(target, texts, [*range(131)])
    rows = {tuple(text.token_ids): text for text in texts}
    for row, token_ids in enumerate(batch.token_ids.tolist()):
        (text,) = (one for ids, one in rows.items() if [*ids] == token_ids[: len(ids)])
        said = text.token_ids[text.num_prompt :]
        places = batch.is_said[row].nonzero().flatten()
        assert batch.token_ids[row, places + 1].tolist() == said
        assert batch.likeliest[row, places].tolist() == said
    known = read(target, texts, [130]).likeliest
    assert set(known.flatten().tolist()) <= {IGNORED, 0}


def test_texts_are_stored_as_they_are(tmp_path: Path) -> None:
    texts = TextSet([OwnText([1, 2, 70_000], 2), OwnText([5], 1)], [OwnText([9, 8], 1)])
    texts.save(tmp_path / "texts.npz")
    assert TextSet.load(tmp_path / "texts.npz") == texts
    assert [one.name for one in tmp_path.iterdir()] == ["texts.npz"]


def test_a_pass_has_every_text_once_in_batches_of_the_size_asked() -> None:
    texts = [OwnText([1 + index] * (2 + index % 40), 1) for index in range(100)]
    batches = TextBatches(texts, 128, "cpu")
    shuffled = batches.shuffled(0)
    passes = [[next(shuffled) for _ in range(len(batches))] for _ in range(2)]
    for one in [[*batches.in_order()], *passes]:
        rows = [
            row[:num]
            for batch in one
            for row, num in zip(
                *(x.tolist() for x in (batch.token_ids, batch.lens[:, 0])), strict=True
            )
        ]
        assert sorted(rows) == sorted(text.token_ids for text in texts)
        assert all(batch.token_ids[:, 1:].numel() <= 128 for batch in one)
    company = [sorted(batch.token_ids[:, 0].tolist()) for batch in passes[0]]
    assert company != [sorted(batch.token_ids[:, 0].tolist()) for batch in passes[1]]


def test_what_the_commands_write_is_served_and_as_good_as_they_say(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"def add{index}(a, b):" for index in range(24)))
    texts, out = tmp_path / "texts.npz", tmp_path / "head"
    eagle_texts.main(
        ["--out", str(texts), "--prompts", str(prompts), "--num-held-out", "4"]
        + ["--answer-tokens", "12"]
    )
    held_out = TextSet.load(texts).held_out
    train_eagle.main(
        ["--texts", str(texts), "--out", str(out), "--device", "cpu", "--products", "float32"]
        + ["--epochs", "12", "--unrolled", "2", "--batch-tokens", "256", "--eval-every-s", "0.3"]
        + ["--draft-vocab-size", "32", "--intermediate-size", "32", "--num-q-heads", "4"]
    )
    report = json.loads((out / "training_report.json").read_text())
    assert report["curve"][-1]["train"] < report["curve"][0]["train"]
    assert {text.num_said for text in held_out} == {12}, "texts that end by their length"
    stats, _ = served(
        f"eagle3:{out}",
        [text.token_ids[: text.num_prompt] for text in held_out],
        max_draft_tokens=2,
        sampling=SamplingParams(temperature=0.0, max_tokens=12),
        enable_overlap=False,
    )
    by_position = [one / stats.num_drafted_runs for one in stats.accepted_by_position]
    assert report["held_out"]["by_position"] == pytest.approx(by_position, abs=1e-3)
    assert by_position[0] > 0.2, "right drafts are among those counted"


def test_the_clock_ends_a_run_annealed(target, texts: list[OwnText]) -> None:
    batches = TextBatches(texts, 64, "cpu")
    recipe = eagle_fit.HeadRecipe(10**9, 2, 64, 1e-3, 0.0, 4.0, 10.0, "float32", 0)
    reader = TextReader(target, (0, 1, 2), DRAFT_IDS)
    ticks = map(float, itertools.count(100))
    fitted = eagle_fit.HeadFit(
        head_of(target), reader, batches, batches, recipe, lambda: next(ticks)
    )
    points: list[eagle_fit.HeadPoint] = []
    fitted.run(points.append)
    assert [(point.update, point.elapsed_s) for point in points] == [(4, 4.0), (8, 8.0), (10, 10.0)]
    assert fitted._optimizer.param_groups[0]["lr"] < 0.1 * recipe.learning_rate


def test_the_folder_keeps_the_best_head(target, tmp_path: Path) -> None:
    head = head_of(target)
    best = BestHead(head, DRAFT_IDS, tmp_path, shape_of(target).config(64), {"fact": 1})
    weights = tmp_path / "model.safetensors"
    stored = []
    for update, length in enumerate((1.5, 1.4, 1.6)):
        with torch.no_grad():
            head.norm.weight.fill_(update)
        acceptance = eagle_fit.Acceptance([length - 1], length)
        best.see(eagle_fit.HeadPoint(update, 64, 1.0, 2.0, acceptance))
        stored.append(weights.read_bytes())
        report: dict[str, Any] = json.loads((tmp_path / "training_report.json").read_text())
        assert len(report["curve"]) == update + 1
    assert stored[0] == stored[1] != stored[2]
    assert (report["update"], report["held_out"]["length"], report["fact"]) == (2, 1.6, 1)


def test_acceptance_counts_drafts_up_to_the_first_wrong_one(target, texts: list[OwnText]) -> None:
    class Says(torch.nn.Module):
        """Right at the first step, wrong at the second one."""

        def forward(self, token_ids, taps, num_steps):
            own = torch.nn.functional.one_hot(token_ids[:, 2:], 131).float()
            first = torch.nn.functional.pad(own, (0, 0, 0, 1))
            return [first, first][:num_steps]

    found = eagle_fit.acceptance(Says(), [read(target, texts[:1], [*range(131)])], 2)
    assert found.by_position[0] == 1.0
    assert found.length == pytest.approx(1 + sum(found.by_position), abs=1e-3)
