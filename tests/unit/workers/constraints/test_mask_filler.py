"""Masks are waited for until they are late; late ones come with a later step."""

import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from workers.constraints.mask_deadline import MaskDeadline
from workers.constraints.mask_filler import (
    NUM_SMALL_BATCH_THREADS,
    FilledRows,
    MaskFiller,
)
from workers.constraints.masks import AskedMasks, MaskRow

NOW = MaskDeadline(0.0)
VOCAB_SIZE = 64


class Request:
    """matcher: any object, which is all that a filler asks for."""

    def __init__(self, number: int) -> None:
        self.matcher: Any = number
        self.is_ended = False

    def forced_token(self, position: int) -> int | None:
        return None

    def look_ahead(self, token_id: int) -> None: ...


class Masks:
    """The mask of request n is n + 1 in its first word. Those of slow ones take until release."""

    def __init__(self, *slow: int) -> None:
        self.slow = set(slow)
        self.release = threading.Event()
        self.batches: list[list[int]] = []
        self._asked = threading.Condition()

    def __call__(self, rows: Sequence[AskedMasks], bits: Any) -> None:
        numbers: list[Any] = [asked.matcher for asked in rows]
        with self._asked:
            self.batches.append(numbers)
            self._asked.notify_all()
        if self.slow & set(numbers):
            assert self.release.wait(60)
        for number, (_, row, drafts) in zip(numbers, rows, strict=True):
            for ahead in range(1 + len(drafts)):
                bits[row + ahead, 0] = number + 1

    def have_begun(self, num_batches: int) -> bool:
        with self._asked:
            return self._asked.wait_for(lambda: len(self.batches) >= num_batches, 60)


@pytest.fixture
def masks() -> Iterator[Masks]:
    made = Masks(0)
    yield made
    made.release.set()


def rows_of(requests: Sequence[Request], can_run_again: bool = True) -> list[MaskRow]:
    return [MaskRow(slot, 5, one, can_run_again) for slot, one in enumerate(requests)]


def words(filled: FilledRows) -> dict[int, int]:
    return dict(zip(filled.masks.slots.tolist(), filled.masks.rows[:, 0].tolist(), strict=True))


def late(filled: FilledRows) -> list[int]:
    return [row.slot for row in filled.late]


def test_a_late_mask_is_made_once_and_comes_with_a_later_step(masks: Masks) -> None:
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([Request(0), Request(1)])
    assert late(filler.fill(0, rows, NOW)) == [0, 1]
    assert late(filler.fill(1, rows, NOW)) == [0, 1]
    masks.release.set()
    filled = filler.fill(2, rows)
    assert (words(filled), filled.masks.step_id, filled.late) == ({0: 1, 1: 2}, 2, [])
    assert masks.batches == [[0, 1]]


def test_who_was_late_is_asked_for_apart_and_keeps_nobody_waiting(masks: Masks) -> None:
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([Request(n) for n in range(6)])
    filler.fill(0, rows[:4], NOW)
    masks.release.set()
    filler.fill(1, rows[:4])
    masks.release.clear()
    filled = filler.fill(2, rows, MaskDeadline(time.perf_counter() + 5.0))
    assert (late(filled), words(filled)) == ([0], {1: 2, 2: 3, 3: 4, 4: 5, 5: 6})
    assert [row.slot for row in filled.rows] == [1, 2, 3, 4, 5]
    assert sorted(masks.batches[1:]) == [[0], [1], [2], [3], [4, 5]]
    masks.batches.clear()
    filler.fill(3, rows[1:])
    assert masks.batches == [[1, 2, 3, 4, 5]]


def test_who_only_waited_for_slow_ones_is_an_ordinary_one_again(masks: Masks) -> None:
    clock_s = 0.0
    masks.slow = set(range(NUM_SMALL_BATCH_THREADS))
    quick, new = len(masks.slow), len(masks.slow) + 1
    rows = rows_of([Request(n) for n in range(new + 1)])
    filler, known = MaskFiller(VOCAB_SIZE, masks, lambda: clock_s), rows[:new]
    filler.fill(0, known, MaskDeadline(-1.0))
    masks.release.set()
    filler.fill(1, known)
    masks.release.clear()
    masks.batches.clear()
    filled = filler.fill(2, known, MaskDeadline(0.1))
    assert quick in late(filled), "every thread is taken by slow ones"
    assert masks.have_begun(NUM_SMALL_BATCH_THREADS)
    clock_s = 1.0
    masks.release.set()
    filler.fill(3, known)
    masks.batches.clear()
    filler.fill(4, rows)
    assert sorted(masks.batches) == [*([n] for n in sorted(masks.slow)), [quick, new]]


def test_a_row_that_cannot_run_again_is_waited_for(masks: Masks) -> None:
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([Request(0)], can_run_again=False)
    threading.Timer(0.05, masks.release.set).start()
    filled = filler.fill(0, rows, NOW)
    assert words(filled) == {0: 1}
    assert filled.slow == rows
    assert not filler.fill(1, rows).slow


def test_nothing_is_kept_of_who_has_ended(masks: Masks) -> None:
    filler, ended = MaskFiller(VOCAB_SIZE, masks), Request(0)
    filler.fill(0, rows_of([ended]), NOW)
    ended.is_ended = True
    filler.fill(1, rows_of([Request(1)], can_run_again=False))
    assert not filler._under_way
    assert not filler._were_late


def test_a_batch_is_waited_for_by_how_many_rows_it_keeps(masks: Masks) -> None:
    rows = rows_of([Request(n) for n in range(4)])
    filler = MaskFiller(VOCAB_SIZE, masks, lambda: 0.0)
    filler.fill(0, rows[:1], NOW)
    # The one of before is given up at once, the three that are asked for together are not.
    deadline = MaskDeadline(-100.0, 60.0)
    threading.Timer(0.05, masks.release.set).start()
    begun = filler.begin(1, rows, deadline)
    assert begun.last_until_s == 140.0
    assert set(words(filler.finish(begun))) >= {1, 2, 3}


def test_masks_of_later_steps_are_written_where_nobody_reads(masks: Masks) -> None:
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([Request(n) for n in range(4)])
    first = filler.fill(0, rows[1:])
    second = filler.fill(1, rows[1:])
    assert words(second) == {1: 2, 2: 3, 3: 4}
    # What the first has is read by now.
    assert np.shares_memory(first.masks.bits, second.masks.bits)


def test_a_late_mask_writes_over_nobodys(masks: Masks) -> None:
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([Request(n) for n in range(3)])
    late_step = filler.begin(0, rows[:1], NOW)
    assert late(filler.finish(late_step)) == [0]
    steps = [filler.fill(step, rows[1:]) for step in (1, 2, 3)]
    assert [words(one) for one in steps] == [{1: 2, 2: 3}] * 3
    assert not any(np.shares_memory(late_step.buffer.bits, one.masks.bits) for one in steps)
    masks.release.set()
    assert words(filler.fill(4, rows)) == {0: 1, 1: 2, 2: 3}


def test_a_mask_of_who_has_ended_writes_over_nobodys(masks: Masks) -> None:
    ended = Request(0)
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([ended, Request(1)])
    late_step = filler.begin(0, rows[:1], NOW)
    filler.finish(late_step)
    ended.is_ended = True
    during = filler.fill(1, rows[1:])
    assert not np.shares_memory(late_step.buffer.bits, during.masks.bits)
    masks.release.set()
    filler._together.shutdown()
    assert words(during) == {1: 2}


def test_rows_that_are_there_move_together_where_others_are_late(masks: Masks) -> None:
    """The late one's mask is still being written to where it was."""
    filler, rows = MaskFiller(VOCAB_SIZE, masks), rows_of([Request(n) for n in range(3)])
    filler.fill(0, rows[:1], NOW)
    begun = filler.begin(1, rows, MaskDeadline(time.perf_counter() + 5.0))
    filled = filler.finish(begun)
    assert (late(filled), words(filled)) == ([0], {1: 2, 2: 3})
    assert not np.shares_memory(begun.buffer.bits, filled.masks.bits)


def test_nothing_of_steps_before_is_left_in_a_mask(masks: Masks) -> None:
    """Neither beside a forced token, nor behind a draft that the grammar does not allow."""

    def fill_all(rows: Sequence[AskedMasks], bits: Any) -> None:
        bits[:] = -1

    def fill_first(rows: Sequence[AskedMasks], bits: Any) -> None:
        for _, row, _ in rows:
            bits[row] = 1

    filler = MaskFiller(VOCAB_SIZE, fill_all)
    filler.fill(0, rows_of([Request(n) for n in range(4)]))
    filler._fill = fill_first
    forced, drafted = Request(0), Request(1)
    forced.forced_token = lambda position: 33  # type: ignore[method-assign]
    rows = [MaskRow(0, 5, forced), MaskRow(1, 5, drafted, drafts=(7, 8))]
    assert filler.fill(1, rows).masks.rows.tolist() == [[0, 2], [1, 1]]
