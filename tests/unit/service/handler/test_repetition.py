"""Repetition is found where a slow search over the whole output finds it, and not before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.handler.repetition import MAX_PATTERN_SIZE, RepetitionDetection, RepetitionDetector


def repeats(token_ids, detection):
    """By its definition."""
    for size in range(detection.min_pattern_size, detection.max_pattern_size + 1):
        needed = size * detection.min_count
        if len(token_ids) >= needed:
            tail = token_ids[-needed:]
            if tail == tail[:size] * detection.min_count:
                return True
    return False


@given(
    token_ids=st.lists(st.integers(0, 2), max_size=40),
    sizes=st.tuples(st.integers(1, 6), st.integers(1, 6)).map(sorted),
    min_count=st.integers(2, 4),
)
def test_a_choice_ends_with_the_first_token_after_which_its_end_repeats(
    token_ids, sizes, min_count
):
    detection = RepetitionDetection(sizes[1], sizes[0], min_count)
    detector = RepetitionDetector(detection)
    found = [detector.push(token_id) for token_id in token_ids]
    assert found == [repeats(token_ids[: i + 1], detection) for i in range(len(token_ids))]


@pytest.mark.parametrize(
    ("sizes_and_count", "is_right"),
    [
        ((3, 1, 2), True),
        ((MAX_PATTERN_SIZE, 1, 2), True),
        ((MAX_PATTERN_SIZE + 1, 1, 2), False),
        ((3, 4, 2), False),
        ((3, 0, 2), False),
        ((3, 1, 1), False),
    ],
)
def test_what_cannot_be_a_pattern_is_named(sizes_and_count, is_right):
    assert (RepetitionDetection(*sizes_and_count).check() == "") == is_right
