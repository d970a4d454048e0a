"""Comparing greedy texts: where they part, and what excuses it."""

import pytest

from benchmarks.h200.text_comparison import (
    FirstDifference,
    Verdict,
    cut_prompts,
    first_differences,
    share_equal,
)


def test_only_the_first_difference_of_a_text_counts() -> None:
    ours, theirs = [[1, 2, 3, 4], [5, 6], [7]], [[1, 9, 3, 8], [5, 6], [0]]
    assert first_differences(ours, theirs) == [
        FirstDifference(0, 1, 2, 9),
        FirstDifference(2, 0, 7, 0),
    ]
    assert share_equal(ours, theirs) == pytest.approx(1 / 3)


def test_texts_of_different_lengths_are_not_compared() -> None:
    with pytest.raises(ValueError, match="zip"):
        first_differences([[1]], [[1, 2]])


@pytest.mark.parametrize(
    ("our_logit", "their_logit", "best", "is_near_tie"),
    [
        (5.0, 5.1, 5.1, True),
        (5.0, 5.3, 5.3, False),
        (5.3, 5.0, 5.3, False),
        # Close to each other, but both far below a token that neither engine should have passed.
        (5.0, 5.1, 6.0, False),
    ],
)
def test_a_near_tie_is_near_the_best_on_both_sides(
    our_logit: float, their_logit: float, best: float, is_near_tie: bool
) -> None:
    verdict = Verdict(FirstDifference(0, 0, 1, 2), our_logit, their_logit, best, bound=0.2)
    assert verdict.is_near_tie is is_near_tie


def test_prompts_are_pieces_of_the_documents_in_the_lengths_asked_for() -> None:
    documents = [list(range(100)), list(range(1000, 1020))]
    prompts = cut_prompts(documents, (4, 50), 20)
    assert [len(prompt) for prompt in prompts] == [4, 50] * 10
    for prompt in prompts:
        assert prompt == list(range(prompt[0], prompt[0] + len(prompt)))
    assert prompts == cut_prompts(documents, (4, 50), 20)
    with pytest.raises(ValueError, match="200 tokens"):
        cut_prompts(documents, (200,), 1)
