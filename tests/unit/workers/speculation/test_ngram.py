"""What prompt lookup proposes, by hand."""

import numpy as np
import pytest
import torch

from workers.sampling.params import SamplingParams
from workers.scheduler.plan import AdmittedRequest
from workers.speculation.ngram import NgramProposer

CPU = torch.device("cpu")


def proposer_of(*texts: list[int]) -> NgramProposer:
    proposer = NgramProposer(len(texts) + 1, 64, CPU)
    proposer.admit(
        [
            AdmittedRequest(
                slot + 1, 0, SamplingParams(), len(text), known_ids=np.array(text, dtype=np.int32)
            )
            for slot, text in enumerate(texts)
        ]
    )
    return proposer


def proposed(text: list[int], num_drafts: int) -> list[int]:
    lens = np.array([len(text)], dtype=np.int32)
    drafts = proposer_of(text).propose(np.array([1], dtype=np.int32), lens, num_drafts)
    assert drafts.dtype == torch.int64
    return drafts[0].tolist()


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
    proposer = proposer_of([1, 2, 3, 1], [5, 6, 7, 8, 9, 5, 6])
    slots = torch.tensor([1, 2])
    proposer.extend(slots, torch.tensor([4, 7]), torch.tensor([2, 0]))
    own = np.array([2, 1], dtype=np.int32)
    drafts = proposer.propose(own, np.array([7, 5], dtype=np.int32), 2)
    assert drafts.tolist() == [[7, 8], [3, 1]]


def test_tokens_beyond_the_length_are_not_looked_at():
    proposer = proposer_of([1, 2, 3, 1, 9, 9, 9])
    drafts = proposer.propose(np.array([1], dtype=np.int32), np.array([4], dtype=np.int32), 2)
    assert drafts.tolist() == [[2, 3]]
