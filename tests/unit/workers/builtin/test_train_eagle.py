"""A head is trained as it is used, and what the command writes is served."""

import json
from pathlib import Path

import pytest
import torch

from tests.fakes.eagle_heads import HeadOracle
from tests.fakes.tiny_models import NATIVE, TinyModel, eager_reference, save_tiny_model
from tests.unit.workers.engine.test_eagle import made
from workers.builtin import eagle_fit, train_eagle
from workers.builtin.eagle_data import IGNORED, OwnText, TextReader, frequent_tokens, own_texts
from workers.builtin.eagle_model import HeadShape, TrainedHead
from workers.loading.model_folder import builtin_model_path

DEEP = TinyModel("qwen3", {**NATIVE["qwen3"].changes, "num_hidden_layers": 4})
DRAFT_IDS = [5, 7, 60, 61, 90]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory):
    return eager_reference(save_tiny_model(DEEP, tmp_path_factory.mktemp("target"))).eval()


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


def test_unrolled_the_head_proposes_what_it_proposes_in_use(target, tmp_path: Path) -> None:
    torch.manual_seed(0)
    shape = shape_of(target)
    head = TrainedHead(shape, target.get_input_embeddings().weight.detach())
    rows = target.get_output_embeddings().weight.detach()[DRAFT_IDS]
    head.begin_as(target.model.norm.weight.detach(), rows)
    train_eagle.save_head(head, DRAFT_IDS, tmp_path, shape, 64)
    prompt = [*range(20, 40)]
    oracle = HeadOracle(tmp_path, target)
    drafts = oracle.drafts(prompt, 3)
    batch = TextReader(target, (0, 1, 2), DRAFT_IDS).read([OwnText([*prompt, *drafts], 20)])
    head.bfloat16().float()
    with torch.no_grad():
        steps = head(batch.token_ids, batch.taps.float(), 3)
    anchor = len(prompt) - 2
    assert [DRAFT_IDS[int(logits[0, anchor].argmax())] for logits in steps] == drafts


def test_what_the_target_says_is_told_from_its_prompts_and_its_likeliest_known(target) -> None:
    texts = list(own_texts(target, [[3, 4, 5], [8, 9]], 6, [1], 8))
    assert sorted(text.num_prompt for text in texts) == [2, 3]
    assert frequent_tokens(texts, 131, 4) == sorted(frequent_tokens(texts, 131, 4))
    batch = TextReader(target, (0, 1, 2), [*range(131)]).read(texts)
    for row, text in enumerate(texts):
        said = text.token_ids[text.num_prompt :]
        places = batch.is_said[row].nonzero().flatten()
        assert batch.token_ids[row, places + 1].tolist() == said
        assert batch.likeliest[row, places].tolist() == said
    known = TextReader(target, (0, 1, 2), [130]).read(texts).likeliest
    assert set(known.flatten().tolist()) <= {IGNORED, 0}


def test_what_the_command_writes_is_served_and_better_for_it(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"def add{index}(a, b):" for index in range(24)))
    out = tmp_path / "head"
    train_eagle.main(
        ["--out", str(out), "--target", str(builtin_model_path()), "--prompts", str(prompts)]
        + ["--device", "cpu", "--answer-tokens", "8", "--epochs", "6", "--unrolled", "2"]
        + ["--draft-vocab-size", "16", "--intermediate-size", "32", "--num-q-heads", "2"]
    )
    report = json.loads((out / "training_report.json").read_text())
    assert report["curve"][-1]["train"] < report["curve"][0]["train"]
    assert report["held_out"]["length"] >= 1.0
    assert made("builtin", out).facts.name == "builtin"


def test_acceptance_counts_drafts_up_to_the_first_wrong_one(target) -> None:
    class Says(torch.nn.Module):
        """Right at the first step, wrong at the second one."""

        def forward(self, token_ids, taps, num_steps):
            own = torch.nn.functional.one_hot(token_ids[:, 2:], 131).float()
            first = torch.nn.functional.pad(own, (0, 0, 0, 1))
            return [first, first][:num_steps]

    texts = list(own_texts(target, [[3, 4, 5]], 6, [1], 8))
    batch = TextReader(target, (0, 1, 2), [*range(131)]).read(texts)
    found = eagle_fit.acceptance(Says(), [batch], 2)
    assert found.by_position[0] == 1.0
    assert found.length == pytest.approx(1 + sum(found.by_position), abs=1e-3)
