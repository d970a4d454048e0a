"""What prompt lookup proposes, by hand."""

import numpy as np
import pytest
import torch

from workers.sampling.params import SamplingParams
from workers.scheduler.plan import AdmittedRequest
from workers.speculation.history import TokenHistory
from workers.speculation.ngram import NgramProposer
from workers.speculation.proposer import DraftRows

CPU = torch.device("cpu")


def int32(*values: int) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def history_of(*texts: list[int]) -> TokenHistory:
    """In slots from 1 on."""
    history = TokenHistory(len(texts) + 1, 64, CPU)
    history.admit(
        [
            AdmittedRequest(
                slot + 1, 0, SamplingParams(), len(text), known_ids=np.array(text, dtype=np.int32)
            )
            for slot, text in enumerate(texts)
        ]
    )
    return history


def proposed(text: list[int], num_drafts: int) -> list[int]:
    rows = DraftRows(int32(1), int32(len(text)), int32(num_drafts))
    drafts = NgramProposer(history_of(text)).propose(rows)
    assert drafts.token_ids.dtype == torch.int64
    assert drafts.num_drafts.tolist() == [num_drafts]
    return drafts.token_ids[0].tolist()


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        # The only place.
        ([1, 2, 3, 4, 5, 1, 2], [3, 4, 5]),
        # The longer match wins over the later one.
        ([7, 1, 2, 3, 9, 2, 8, 7, 1, 2], [3, 9, 2]),
        # Of equal ones the latest.
        ([1, 5, 6, 1, 7, 8, 1], [7, 8, 1]),
        # A place at the end goes on as it began.
        ([4, 4], [4, 4, 4]),
        ([1, 2, 3, 2, 3], [2, 3, 2]),
        # Nothing ends alike.
        ([1, 2, 3, 4], [1, 2, 3]),
        ([9], [9, 9, 9]),
    ],
)
def test_drafts_are_what_followed_the_best_earlier_place(text: list[int], drafts: list[int]):
    assert proposed(text, 3) == drafts


def test_rows_have_lengths_of_their_own_and_what_is_sampled_counts():
    history = history_of([1, 2, 3, 1], [5, 6, 7, 8, 9, 5, 6])
    history.extend(torch.tensor([1, 2]), torch.tensor([4, 7]), torch.tensor([2, 0]))
    rows = DraftRows(int32(2, 1), int32(7, 5), int32(2, 1))
    drafts = NgramProposer(history).propose(rows)
    assert drafts.token_ids.tolist() == [[7, 8], [3, 1]]


def test_tokens_beyond_the_length_are_not_looked_at():
    proposer = NgramProposer(history_of([1, 2, 3, 1, 9, 9, 9]))
    drafts = proposer.propose(DraftRows(int32(1), int32(4), int32(2)))
    assert drafts.token_ids.tolist() == [[2, 3]]
