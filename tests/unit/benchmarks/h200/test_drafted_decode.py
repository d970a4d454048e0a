"""Decode time a token with drafts: what an engine is asked for, and what comes of its time."""

from types import SimpleNamespace

import pytest

from benchmarks.h200 import drafted_decode
from benchmarks.h200.drafted_decode import DraftedDecode, DraftsAsked, HeldRuns, peer_parser

ASKED = DraftsAsked("peer", "chain of 3", 4, 3.0)


def test_ms_a_token_is_the_difference_of_many_tokens_and_few(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine that takes 0.5 s for prompts and 10 ms a token, by a clock of its own."""
    clock, held = [0.0], [HeldRuns()]

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        clock[0] += 0.5 + 0.01 * (max_tokens[0] - 1)
        steps = len(prompts) * (max_tokens[0] - 1) // 3
        held[0] = HeldRuns(held[0].num_rows + steps, held[0].num_tokens + 3 * steps)
        return max_tokens

    monkeypatch.setattr(drafted_decode, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    row = DraftedDecode(generate, lambda: held[0]).row(ASKED, 8, 192, 2)
    assert row["ms_a_token"] == pytest.approx(10.0)
    assert row["tokens_a_step"] == 3.0
    assert (row["engine"], row["drafts"], row["verified"], row["streams"]) == (
        *("peer", "chain of 3"),
        *(4, 8),
    )


def test_tokens_behind_the_last_one_asked_for_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an engine that ends requests with a whole run, ten tokens of 10 ms each."""
    clock = [0.0]

    def generate(prompts: list[list[int]], max_tokens: list[int]) -> list[int]:
        brought = [-(-n // 10) * 10 for n in max_tokens]
        clock[0] += 0.01 * brought[0]
        return brought

    monkeypatch.setattr(drafted_decode, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    row = DraftedDecode(generate, HeldRuns).row(ASKED, 2, 6, 1)
    assert row["ms_a_token"] == pytest.approx(10.0)
    assert row["tokens_a_step"] is None


def test_fewer_tokens_than_asked_for_are_an_error() -> None:
    decode = DraftedDecode(lambda prompts, max_tokens: [n - 1 for n in max_tokens], HeldRuns)
    with pytest.raises(RuntimeError, match="tokens were asked for"):
        decode.row(ASKED, 2, 6, 1)


def test_a_peer_without_a_head_decodes_plainly() -> None:
    arguments = peer_parser("a peer").parse_args(["config.json"])
    assert arguments.head is None
    assert arguments.streams == [1, 8, 32, 64, 256]
