"""Makes the masks of a step's rows and waits for them no longer than it is told.

What is late is made all the same, by another thread, and kept until the row comes again. Rows that
were late together are asked for in smaller batches next time, in the end each on its own, so that a
slow grammar keeps no other row waiting for long.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from workers.constraints.mask_buffers import MaskBuffer, MaskBuffers
from workers.constraints.mask_deadline import NEVER, MaskDeadline
from workers.constraints.masks import (
    WORD_BITS,
    AskedMasks,
    Constrained,
    FillMasks,
    MaskRow,
    StepMasks,
)
from workers.constraints.matcher import MaskBits

NUM_SMALL_BATCH_THREADS = 4
"""For rows that were late before. Each asks native threads, which are as many as the compiler
has."""
BATCH_SHRINKAGE = 4
"""By which batches that were late are cut: rows that are late together need not be slow ones."""

Asked = tuple[MaskRow, int]
"""A row, and where its mask goes."""


@dataclass(frozen=True, slots=True)
class FilledRows:
    """masks: of rows. late: those that have none in this step, all of which can run again. slow:
    those that cannot, which the step waited for longer than for such as can."""

    rows: list[MaskRow]
    masks: StepMasks
    late: list[MaskRow]
    slow: list[MaskRow]


@dataclass(slots=True, eq=False)
class MaskBatch:
    """Masks that are made together: so many, into the buffer. future tells how many seconds they
    took. patience_s: for which they were waited at first."""

    future: Future[float]
    buffer: MaskBuffer
    num_masks: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class BegunMasks:
    """Of a step's rows: masks in the buffer that are there, or will be, from starts on, one of each
    row and of each draft; asked: rows whose grammar says what may follow; patient: those of them
    that cannot run again. deadline: of the others."""

    step_id: int
    rows: Sequence[MaskRow]
    starts: list[int]
    buffer: MaskBuffer
    asked: list[Asked]
    patient: list[Asked]
    deadline: MaskDeadline

    @property
    def last_until_s(self) -> float:
        """When the last of the rows is given up."""
        return self.deadline.until_s(len(self.asked))


class MaskFiller:
    """Only the thread that drives the engine calls it. vocab_size: columns of the logits. now: in
    seconds, on the axis of deadlines.

    While a mask is being made, nobody else may use its matcher: a request is in _under_way from the
    moment its mask is asked for until somebody takes it.
    """

    def __init__(
        self, vocab_size: int, fill: FillMasks, now: Callable[[], float] = time.perf_counter
    ) -> None:
        self._buffers = MaskBuffers(-(-vocab_size // WORD_BITS))
        self._fill = fill
        self._now = now
        self._together = ThreadPoolExecutor(1, thread_name_prefix="tessera-masks")
        self._apart = ThreadPoolExecutor(
            NUM_SMALL_BATCH_THREADS, thread_name_prefix="tessera-late-masks"
        )
        # Each with its row of the batch's buffer.
        self._under_way: dict[Constrained, tuple[MaskBatch, int]] = {}
        self._last_together: Future[float] | None = None
        # In batches of how many they are asked for next time.
        self._were_late: dict[Constrained, int] = {}

    def fill(
        self, step_id: int, rows: Sequence[MaskRow], deadline: MaskDeadline = NEVER
    ) -> FilledRows:
        """As begin and finish, one behind the other."""
        return self.finish(self.begin(step_id, rows, deadline))

    def begin(self, step_id: int, rows: Sequence[MaskRow], deadline: MaskDeadline) -> BegunMasks:
        """Have masks made by other threads; those of rows that cannot run again finish makes.
        deadline: when rows that can are given up. Masks of steps before may be overwritten."""
        self._forget_ended()
        self._buffers.begin_step({batch.buffer for batch, _ in self._under_way.values()})
        starts = [0, *accumulate(1 + len(row.drafts) for row in rows)]
        buffer = self._buffers.take(starts.pop())
        asked = _with_forced(rows, starts, buffer.bits)
        new = [(row, index) for row, index in asked if row.request not in self._under_way]
        self._start([(row, i) for row, i in new if row.can_run_again], buffer, deadline)
        # Of rows with drafts what is under way is of the first token only.
        patient = [(row, index) for row, index in new if not (row.can_run_again or row.drafts)]
        patient += [(row, index) for row, index in asked if row.drafts]
        return BegunMasks(step_id, rows, starts, buffer, asked, patient, deadline)

    def finish(self, begun: BegunMasks) -> FilledRows:
        """Of requests that have not ended since. Before the next begin."""
        slow = self._fill_patient(begun)
        late = self._take_asked(begun)
        ready, late_rows = [], []
        for start, row in zip(begun.starts, begun.rows, strict=True):
            if start in late:
                late_rows.append(row)
            elif not row.request.is_ended:
                ready.append((row, start))
        masks = self._step_masks(begun.step_id, ready, begun.buffer.bits)
        return FilledRows([row for row, _ in ready], masks, late_rows, slow)

    def close(self) -> None:
        """Waits for nothing: masks under way touch nothing but their own."""
        self._together.shutdown(wait=False, cancel_futures=True)
        self._apart.shutdown(wait=False, cancel_futures=True)

    def _fill_patient(self, begun: BegunMasks) -> list[MaskRow]:
        """All of them where this took longer than the step waits for so many rows."""
        patient = [(row, index) for row, index in begun.patient if not row.request.is_ended]
        if not patient:
            return []
        for row, _ in patient:
            under_way = self._under_way.pop(row.request, None)
            if under_way is not None:
                wait((under_way[0].future,))
        self._fill([_asked(row, index) for row, index in patient], begun.buffer.bits)
        is_slow = self._now() > begun.deadline.until_s(len(patient))
        return [row for row, _ in patient] if is_slow else []

    def _take_asked(self, begun: BegunMasks) -> set[int]:
        """Where masks of rows that are late would begin."""
        waiting = [
            (row, index, *self._under_way[row.request])
            for row, index in begun.asked
            if row.request in self._under_way and not row.request.is_ended
        ]
        needed = {batch for row, _, batch, _ in waiting if not row.can_run_again}
        num_waiting = Counter([batch for _, _, batch, _ in waiting])
        self._wait(needed, num_waiting, begun.deadline)
        # Looked at once: a batch is there for all of its rows, or for none.
        took_s = {one: one.future.result() for one in num_waiting if one.future.done()}
        late = set()
        for row, index, batch, place in waiting:
            if batch not in took_s:
                self._were_late[row.request] = max(batch.num_masks // BATCH_SHRINKAGE, 1)
                late.add(index)
                continue
            if took_s[batch] <= batch.patience_s:
                # It was late because it waited for slower ones, and would again among them.
                self._were_late.pop(row.request, None)
            del self._under_way[row.request]
            if batch.buffer is not begun.buffer:
                begun.buffer.bits[index] = batch.buffer.bits[place]
        return late

    def _start(self, new: Sequence[Asked], buffer: MaskBuffer, deadline: MaskDeadline) -> None:
        together: list[Asked] = []
        apart: dict[int, list[Asked]] = {}
        for one in new:
            # Whoever is in time again is taken for an ordinary one.
            size = self._were_late.pop(one[0].request, 0)
            (apart.setdefault(size, []) if size else together).append(one)
        self._submit_together(together, buffer, deadline)
        for size, rows in apart.items():
            for start in range(0, len(rows), size):
                self._submit(self._apart, rows[start : start + size], buffer, deadline)

    def _submit_together(
        self, batch: Sequence[Asked], buffer: MaskBuffer, deadline: MaskDeadline
    ) -> None:
        """A batch that finds one of an earlier step still being made goes to the other threads: it
        waits only where all of those are busy, too."""
        if not batch:
            return
        is_free = self._last_together is None or self._last_together.done()
        future = self._submit(self._together if is_free else self._apart, batch, buffer, deadline)
        if is_free:
            self._last_together = future

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        batch: Sequence[Asked],
        buffer: MaskBuffer,
        deadline: MaskDeadline,
    ) -> Future[float]:
        patience_s = deadline.until_s(len(batch)) - self._now()
        asked = [_asked(row, index) for row, index in batch]
        future = pool.submit(self._timed_fill, asked, buffer.bits)
        buffer.add_writer(future)
        made = MaskBatch(future, buffer, len(batch), patience_s)
        for row, index in batch:
            self._under_way[row.request] = made, index
        return future

    def _timed_fill(self, rows: Sequence[AskedMasks], bits: MaskBits) -> float:
        start_s = self._now()
        self._fill(rows, bits)
        return self._now() - start_s

    def _wait(
        self,
        needed: Iterable[MaskBatch],
        num_waiting: Mapping[MaskBatch, int],
        deadline: MaskDeadline,
    ) -> None:
        """For needed ones, then for each batch of so many rows until its own deadline."""
        for batch in needed:
            wait((batch.future,))
        # Whoever is waited for longest last: the others have had their time by then.
        for batch, num_rows in sorted(num_waiting.items(), key=lambda one: one[1]):
            if not batch.future.done():
                until_s = deadline.until_s(num_rows)
                timeout_s = None if until_s == float("inf") else max(until_s - self._now(), 0.0)
                wait((batch.future,), timeout_s)

    def _step_masks(self, step_id: int, rows: Sequence[Asked], bits: MaskBits) -> StepMasks:
        """Behind a draft that its grammar does not allow nothing is masked: nobody hears of it."""
        indices: list[int] = []
        slots: list[int] = []
        positions: list[int] = []
        for row, start in rows:
            for number in range(1 + len(row.drafts)):
                if number and not bits[start + number].any():
                    break
                indices.append(start + number)
                slots.append(row.slot)
                positions.append(row.position + number)
        if len(indices) < len(bits):
            whole, bits = bits, self._buffers.take(len(indices)).bits
            np.take(whole, indices, axis=0, out=bits, mode="clip")
        places = np.array([slots, positions], dtype=np.int32)
        return StepMasks(step_id, places[0], places[1], bits.reshape(-1))

    def _forget_ended(self) -> None:
        for request in [one for one in self._under_way if one.is_ended]:
            del self._under_way[request]
        for request in [one for one in self._were_late if one.is_ended]:
            del self._were_late[request]


def _asked(row: MaskRow, index: int) -> AskedMasks:
    return AskedMasks(row.request.matcher, index, row.drafts)


def _with_forced(rows: Sequence[MaskRow], starts: Sequence[int], bits: MaskBits) -> list[Asked]:
    """Write the masks that are known without asking, and nothing behind drafts: what was there is
    of other steps. Returns the rows that are to be asked for."""
    asked = []
    for index, row in zip(starts, rows, strict=True):
        forced = row.request.forced_token(row.position)
        if forced is None:
            asked.append((row, index))
        else:
            bits[index] = 0
            bits[index, forced // WORD_BITS] = np.uint32(1 << forced % WORD_BITS).view(np.int32)
        if row.drafts:
            bits[index + 1 : index + 1 + len(row.drafts)] = 0
    return asked
