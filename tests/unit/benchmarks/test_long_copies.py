"""The copying model copies, drafters that see all of its context are always right, and others are
not: acceptance in long contexts says something."""

import json

import pytest

from benchmarks import copying_model, long_copies
from benchmarks.copying_model import CopyingModel, check_positions
from benchmarks.long_copies import METHODS, NUM_DRAFTS, NUM_OUTPUT_TOKENS, tokens_a_step

CONTEXT = 256


@pytest.mark.parametrize("method", METHODS)
def test_every_draft_is_right(tmp_path, method):
    # The first token comes with the prompt.
    fewest_steps = -(-(NUM_OUTPUT_TOKENS - 1) // (NUM_DRAFTS + 1))
    most = 1.0 if method == "none" else (NUM_OUTPUT_TOKENS - 1) / fewest_steps
    assert tokens_a_step(tmp_path, CONTEXT, method, "cpu") == pytest.approx(most)


def test_a_head_that_counts_positions_otherwise_is_hardly_ever_right(tmp_path, monkeypatch):
    save_head = CopyingModel.save_head

    def save_with_other_rotation(model, folder):
        config = save_head(model, folder) / "config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "rope_theta": 2.0}))
        return folder

    monkeypatch.setattr(CopyingModel, "save_head", save_with_other_rotation)
    assert tokens_a_step(tmp_path, CONTEXT, "eagle3", "cpu") < 2.0


def test_a_text_that_is_no_copy_ends_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(long_copies, "prompt_of", lambda num_tokens, _: list(range(num_tokens)))
    assert long_copies.main(["--context", str(CONTEXT), "--methods", "none"]) == 1
    assert f"none in {CONTEXT} tokens" in capsys.readouterr().err


def test_positions_that_look_alike_are_refused(monkeypatch):
    check_positions(1 << 17)
    monkeypatch.setattr(copying_model, "_LEAST_GAP", 1.0)
    with pytest.raises(ValueError, match="more than the rotary pairs tell apart"):
        check_positions(1 << 10)
