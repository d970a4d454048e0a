"""Makes the masks of a step's rows and waits for them no longer than it is told.

What is late is made all the same, by another thread, and kept until the row comes again. Rows that
were late together are asked for in smaller batches next time, in the end each on its own, so that a
slow grammar keeps no other row waiting for long.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import numpy as np

from workers.constraints.mask_deadline import NEVER, MaskDeadline
from workers.constraints.masks import WORD_BITS, Constrained, FillMasks, MaskRow, StepMasks
from workers.constraints.matcher import MaskBits, TokenMatcher

NUM_SMALL_BATCH_THREADS = 4
"""For rows that were late before. Each asks native threads, which are as many as the compiler
has."""
BATCH_SHRINKAGE = 4
"""By which batches that were late are cut: rows that are late together need not be slow ones."""

Asked = tuple[MaskRow, int]
"""A row, and where its mask goes."""


@dataclass(frozen=True, slots=True)
class FilledRows:
    """masks: of rows. late: those that have none in this step, all of which can run again."""

    rows: list[MaskRow]
    masks: StepMasks
    late: list[MaskRow]


@dataclass(frozen=True, slots=True)
class _Filling:
    """Where one request's next mask appears: this row of bits, once future is done, which is of so
    many and tells how many seconds they took. patience_s: for which they were waited at first."""

    future: Future[float]
    bits: MaskBits
    row: int
    batch_size: int
    patience_s: float


@dataclass(frozen=True, slots=True)
class BegunMasks:
    """Of a step's rows: bits of those that are there, or will be; asked: rows whose grammar says
    what may follow; patient: those of them that cannot run again. deadline: of the others."""

    step_id: int
    rows: Sequence[MaskRow]
    bits: MaskBits
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
        self._num_words = -(-vocab_size // WORD_BITS)
        self._fill = fill
        self._now = now
        self._together = ThreadPoolExecutor(1, thread_name_prefix="tessera-masks")
        self._apart = ThreadPoolExecutor(
            NUM_SMALL_BATCH_THREADS, thread_name_prefix="tessera-late-masks"
        )
        self._under_way: dict[Constrained, _Filling] = {}
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
        deadline: when rows that can are given up."""
        bits = np.zeros((len(rows), self._num_words), dtype=np.int32)
        asked = []
        for index, row in enumerate(rows):
            forced = row.request.forced_token(row.position)
            if forced is None:
                asked.append((row, index))
            else:
                bits[index, forced // WORD_BITS] = np.uint32(1 << forced % WORD_BITS).view(np.int32)
        self._forget_ended()
        new = [(row, index) for row, index in asked if row.request not in self._under_way]
        self._start([(row, i) for row, i in new if row.can_run_again], bits, deadline)
        patient = [(row, index) for row, index in new if not row.can_run_again]
        return BegunMasks(step_id, rows, bits, asked, patient, deadline)

    def finish(self, begun: BegunMasks) -> FilledRows:
        """Of requests that have not ended since. Before the next begin."""
        step_id, rows, bits = begun.step_id, begun.rows, begun.bits
        ended = [index for index, row in enumerate(rows) if row.request.is_ended]
        late = self._take_asked(begun)
        if not (late or ended):
            return FilledRows(list(rows), _step_masks(step_id, rows, bits), [])
        ready = np.setdiff1d(np.arange(len(rows)), late + ended)
        own = [rows[index] for index in ready.tolist()]
        return FilledRows(
            own, _step_masks(step_id, own, bits[ready]), [rows[index] for index in late]
        )

    def close(self) -> None:
        """Waits for nothing: masks under way touch nothing but their own."""
        self._together.shutdown(wait=False, cancel_futures=True)
        self._apart.shutdown(wait=False, cancel_futures=True)

    def _take_asked(self, begun: BegunMasks) -> list[int]:
        """Indices of rows that are late."""
        bits = begun.bits
        asked = [(row, index) for row, index in begun.asked if not row.request.is_ended]
        patient = [(row, index) for row, index in begun.patient if not row.request.is_ended]
        if patient:
            self._fill([(row.request.matcher, index) for row, index in patient], bits)
        self._wait([row for row, _ in asked], begun.deadline)
        late = []
        for row, index in asked:
            filling = self._under_way.get(row.request)
            if filling is None:
                continue
            if not filling.future.done():
                self._were_late[row.request] = max(filling.batch_size // BATCH_SHRINKAGE, 1)
                late.append(index)
                continue
            if filling.future.result() <= filling.patience_s:
                # It was late because it waited for slower ones, and would again among them.
                self._were_late.pop(row.request, None)
            del self._under_way[row.request]
            if filling.bits is not bits:
                bits[index] = filling.bits[filling.row]
        return late

    def _start(self, new: Sequence[Asked], bits: MaskBits, deadline: MaskDeadline) -> None:
        together: list[Asked] = []
        apart: dict[int, list[Asked]] = {}
        for one in new:
            # Whoever is in time again is taken for an ordinary one.
            size = self._were_late.pop(one[0].request, 0)
            (apart.setdefault(size, []) if size else together).append(one)
        self._submit_together(together, bits, deadline)
        for size, rows in apart.items():
            for start in range(0, len(rows), size):
                self._submit(self._apart, rows[start : start + size], bits, deadline)

    def _submit_together(
        self, batch: Sequence[Asked], bits: MaskBits, deadline: MaskDeadline
    ) -> None:
        """A batch that finds one of an earlier step still being made goes to the other threads: it
        waits only where all of those are busy, too."""
        if not batch:
            return
        is_free = self._last_together is None or self._last_together.done()
        future = self._submit(self._together if is_free else self._apart, batch, bits, deadline)
        if is_free:
            self._last_together = future

    def _submit(
        self,
        pool: ThreadPoolExecutor,
        batch: Sequence[Asked],
        bits: MaskBits,
        deadline: MaskDeadline,
    ) -> Future[float]:
        patience_s = deadline.until_s(len(batch)) - self._now()
        future = pool.submit(
            self._timed_fill, [(row.request.matcher, index) for row, index in batch], bits
        )
        for row, index in batch:
            self._under_way[row.request] = _Filling(future, bits, index, len(batch), patience_s)
        return future

    def _timed_fill(self, rows: Sequence[tuple[TokenMatcher, int]], bits: MaskBits) -> float:
        start_s = self._now()
        self._fill(rows, bits)
        return self._now() - start_s

    def _wait(self, rows: Sequence[MaskRow], deadline: MaskDeadline) -> None:
        """For the masks of rows, each batch until its own deadline."""
        num_waiting: Counter[Future[float]] = Counter()
        needed = set()
        for row in rows:
            filling = self._under_way.get(row.request)
            if filling is not None:
                num_waiting[filling.future] += 1
                if not row.can_run_again:
                    needed.add(filling.future)
        wait(needed)
        # Whoever is waited for longest last: the others have had their time by then.
        for future, num_rows in sorted(num_waiting.items(), key=lambda one: one[1]):
            until_s = deadline.until_s(num_rows)
            timeout_s = None if until_s == float("inf") else max(until_s - self._now(), 0.0)
            wait((future,), timeout_s)

    def _forget_ended(self) -> None:
        for request in [one for one in self._under_way if one.is_ended]:
            del self._under_way[request]
        for request in [one for one in self._were_late if one.is_ended]:
            del self._were_late[request]


def _step_masks(step_id: int, rows: Sequence[MaskRow], bits: MaskBits) -> StepMasks:
    places = np.array([(row.slot, row.position) for row in rows], dtype=np.int32)
    slots, positions = places.reshape(-1, 2).T
    return StepMasks(step_id, slots.copy(), positions.copy(), bits.reshape(-1))
