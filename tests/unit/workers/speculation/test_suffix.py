"""What suffixes propose, by hand, and who may learn from whom."""

import numpy as np
import pytest
import torch

from tests.unit.workers.speculation.test_ngram import int32
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import AdmittedRequest
from workers.speculation.history import TokenHistory
from workers.speculation.proposer import DraftRows, ObservedStep
from workers.speculation.recent_outputs import MAX_SALTS, MAX_TOKENS, RecentOutputs
from workers.speculation.suffix import (
    MAX_CANDIDATES,
    MAX_MATCH,
    SuffixProposer,
    longest_match,
    voted,
)

CPU = torch.device("cpu")
OUTPUT = list(range(50, 62))


class Texts:
    """A proposer and the history it reads, told of texts as a runner tells of them."""

    def __init__(self) -> None:
        self._history = TokenHistory(4, 64, CPU)
        self._proposer = SuffixProposer(self._history)

    def start(self, slot: int, known: list[int], salt: str = "", num_output: int = 0) -> None:
        """known: the prompt, and num_output tokens that were said elsewhere before."""
        num_prompt_tokens = len(known) - num_output
        request = AdmittedRequest(
            slot,
            0,
            SamplingParams(),
            num_prompt_tokens,
            known_ids=int32(*known),
            cache_salt=salt,
        )
        self._proposer.admit([request])
        self._history.admit([request])

    def run(
        self, slot: int, known: list[int], output: list[int], salt: str = "", num_output: int = 0
    ) -> None:
        """One step that computes what is known, and one for each token but the last."""
        self.start(slot, known, salt, num_output)
        prefix_len, num_new = 0, len(known)
        for token_id in output:
            position = torch.tensor([prefix_len + num_new])
            self._history.extend(torch.tensor([slot]), position, torch.tensor([token_id]))
            self._proposer.observe(observed(slot, prefix_len, num_new, token_id))
            prefix_len, num_new = prefix_len + num_new, 1

    def outputs(self, salt: str = "") -> list[int]:
        """What others of the salt may repeat."""
        return self._proposer._outputs.tokens(salt).tolist()

    def proposed(self, slot: int, num_tokens: int, num_drafts: int = 8) -> list[int]:
        rows = DraftRows(int32(slot), int32(num_tokens), int32(num_drafts))
        drafts = self._proposer.propose(rows)
        return drafts.token_ids[0, : drafts.num_drafts[0]].tolist()


def observed(slot: int, prefix_len: int, num_new: int, next_id: int) -> ObservedStep:
    return ObservedStep(
        int32(slot), int32(prefix_len), torch.tensor([num_new]), torch.tensor([next_id])
    )


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        # As many as twice the match: one token, two tokens.
        ([1, 2, 3, 4, 5, 6, 7, 9, 1], [2, 3]),
        ([1, 2, 3, 4, 5, 6, 7, 9, 1, 2], [3, 4, 5, 6]),
        # The longer match wins over the later one, a place at the end goes on as it began.
        ([7, 1, 2, 3, 9, 2, 8, 7, 1, 2], [3, 9, 2, 8, 7, 1]),
        ([4, 4], [4, 4]),
        # Of places that match equally what most go on with, of equally many the latest.
        ([1, 5, 6, 1, 7, 8, 1, 5, 9, 1], [5, 9]),
        ([1, 5, 6, 1, 7, 8, 1], [7, 8]),
        # Nothing is known.
        ([1, 2, 3, 4], []),
    ],
)
def test_drafts_are_what_mostly_followed_the_longest_suffix(text: list[int], drafts: list[int]):
    texts = Texts()
    texts.start(1, text)
    assert texts.proposed(1, len(text)) == drafts


def test_drafts_end_where_they_become_unlikely():
    every_way = np.array([[5, first, second] for first in range(2) for second in range(3)])
    assert voted(every_way.astype(np.int32)) == [5, 1]


def test_what_another_request_said_is_known_under_its_salt_only():
    texts = Texts()
    texts.run(1, [1, 2, 3], OUTPUT, salt="a")
    texts.start(2, [9, 50, 51], salt="a")
    assert texts.proposed(2, 3) == [], "not before its slot has another request"
    texts.start(1, [8], salt="a")
    assert texts.proposed(2, 3) == [52, 53, 54, 55]
    assert texts.proposed(2, 3, num_drafts=2) == [52, 53]
    # Its prompt is nobody's.
    texts.start(2, [9, 1, 2], salt="a")
    assert texts.proposed(2, 3) == []
    for other in ("", "b"):
        texts.start(3, [9, 50, 51], salt=other)
        assert texts.proposed(3, 3) == []
    # An output's end is no place to go on from.
    texts.start(2, [9, 60, 61], salt="a")
    assert texts.proposed(2, 3) == []


def test_a_request_that_goes_on_in_another_slot_is_heard_once():
    texts = Texts()
    texts.run(1, [1, 2, 3], OUTPUT)
    more = [70, 71, 72, 73, 74, 75, 76, 77]
    texts.run(2, [1, 2, 3, *OUTPUT], more, num_output=len(OUTPUT))
    for slot in (1, 2):
        texts.start(slot, [9])
    assert texts.outputs().count(OUTPUT[0]) == texts.outputs().count(more[0]) == 1


def test_one_token_many_times_over_is_scanned_no_longer_than_others():
    same = np.full(1 << 15, 7, dtype=np.int32)
    ends, matched = longest_match(same, same[:MAX_MATCH])
    assert matched == MAX_MATCH
    assert ends.tolist() == list(range(len(same) - MAX_CANDIDATES, len(same)))


def test_the_requests_own_text_wins_where_it_matches_as_well():
    texts = Texts()
    texts.run(1, [1], OUTPUT)
    texts.start(1, [1])
    texts.start(2, [51, 7, 8, 51])
    assert texts.proposed(2, 4) == [7, 8]
    texts.start(2, [51, 7, 8, 50, 51])
    assert texts.proposed(2, 5) == [52, 53, 54, 55]


def test_old_outputs_and_old_salts_are_forgotten():
    outputs = RecentOutputs()
    outputs.add("long", np.arange(MAX_TOKENS, dtype=np.int32))
    outputs.add("long", int32(*OUTPUT))
    tokens = outputs.tokens("long")
    assert len(tokens) == MAX_TOKENS
    assert tokens[-13:].tolist() == [*OUTPUT, -1]
    outputs.add("short", int32(1, 2, 3))
    assert len(outputs.tokens("short")) == 0
    for number in range(MAX_SALTS):
        outputs.add(str(number), int32(*OUTPUT))
        assert len(outputs.tokens("0")) == 13, "what is used stays"
    assert len(outputs.tokens("long")) == 0
    assert len(outputs.tokens("1")) == 13
