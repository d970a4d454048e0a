"""Drafts on their way from a rank's device to the host, which verifies them and makes masks.

From the thread that runs steps to the one that plans them. Knows no proposer and no model.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import msgspec
import numpy as np
import torch

from workers.errors import EngineFailedError
from workers.sampling.transfer import start_download
from workers.scheduler.plan import DRAFT_TOKEN, IntArray, StepPlan
from workers.speculation.device_step import DeviceDrafts

NO_DRAFT_TOKEN = 0
"""Stands for a draft that there was no memory to make: any token does, since it is verified."""
_NUM_KEPT_STEPS = 8
"""More than there are plans under way."""


class Passed(Protocol):
    """A point on the device's stream. torch.cuda.Event is one."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class PassedAtOnce:
    """Of a device whose work is done when its call returns."""

    def record(self) -> None:
        """Nothing runs behind the caller's back."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class SentDrafts(NamedTuple):
    """drafts: on the device; on_host: the same once passed has been waited for."""

    drafts: DeviceDrafts
    on_host: DeviceDrafts
    passed: Passed


@dataclass(frozen=True, slots=True)
class MadeDrafts:
    """slots: host int32 (n,). sent: of these."""

    slots: IntArray
    sent: SentDrafts


@dataclass(slots=True)
class _Step:
    """failure: that there will be no more drafts for."""

    made: list[MadeDrafts] = field(default_factory=list)
    is_whole: bool = False
    failure: BaseException | None = None


class DraftMailbox:
    """Of one rank. new_mark: makes marks of its device's stream."""

    def __init__(self, new_mark: Callable[[], Passed]) -> None:
        self._new_mark = new_mark
        self._changed = threading.Condition()
        self._steps: dict[int, _Step] = {}

    @contextmanager
    def launching(self, step_id: int) -> Iterator[None]:
        """A step is launched within, for the first time. What it raises before its drafts are
        whole is told to who waits for them."""
        step = _Step()
        with self._changed:
            self._steps[step_id] = step
        try:
            yield
        except BaseException as error:
            with self._changed:
                step.failure = error
                self._changed.notify_all()
            raise
        # Behind the launch, for which the device may wait.
        with self._changed:
            # A row that fails alone for want of memory may have got no drafts.
            step.is_whole = True
            self._changed.notify_all()
            for old in list(self._steps)[:-_NUM_KEPT_STEPS]:
                del self._steps[old]

    def send(self, drafts: DeviceDrafts) -> SentDrafts:
        """Their copy is on its way behind what the device has to do. Whose they are put tells."""
        parents = None if drafts.parents is None else start_download(drafts.parents)
        on_host, passed = DeviceDrafts(start_download(drafts.token_ids), parents), self._new_mark()
        passed.record()
        return SentDrafts(drafts, on_host, passed)

    def put(self, step_id: int, slots: IntArray, sent: SentDrafts) -> None:
        """Of some rows of the step."""
        with self._changed:
            self._steps[step_id].made.append(MadeDrafts(slots, sent))

    def end(self, step_id: int) -> None:
        """All drafts of the step are there, or on their way, or there is no memory to make them."""
        with self._changed:
            self._steps[step_id].is_whole = True
            self._changed.notify_all()

    def made(self, step_id: int, slots: IntArray) -> DeviceDrafts | None:
        """What was put for these slots before the step was launched again, in their order; None
        where some lack."""
        with self._changed:
            found = list(self._steps[step_id].made)
        for one in found:
            if np.isin(slots, one.slots).all():
                rows = [int(np.flatnonzero(one.slots == slot)[0]) for slot in slots.tolist()]
                return _of_rows(one.sent.drafts, rows)
        return None

    def named(self, plan: StepPlan) -> StepPlan:
        """The plan with tokens in place of DRAFT_TOKEN, and with the parents that trees were made
        with. Waits for the device to have made them.
        Raises EngineFailedError where the step's launch has failed before."""
        is_draft = plan.input_ids == DRAFT_TOKEN
        if not is_draft.any():
            return plan
        with self._changed:
            self._changed.wait_for(lambda: self._is_settled(plan.step_id))
            step = self._steps[plan.step_id]
            made = list(step.made)
        if not step.is_whole:
            raise EngineFailedError(
                f"step {plan.step_id} has failed before its drafts were made"
            ) from step.failure
        starts = np.cumsum(plan.num_new_tokens) - plan.num_new_tokens
        row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
        input_ids, parents = plan.input_ids.copy(), plan.parents.copy()
        input_ids[is_draft] = NO_DRAFT_TOKEN
        for one in made:
            on_host = one.sent.on_host
            one.sent.passed.synchronize()
            token_ids = on_host.token_ids.numpy()
            rows = np.array([row_of[slot] for slot in one.slots.tolist()], dtype=np.int64)
            columns = np.arange(token_ids.shape[1])
            filled = columns < plan.num_new_tokens[rows, None] - 1
            places = (starts[rows, None] + 1 + columns)[filled]
            input_ids[places] = token_ids[filled]
            if plan.has_trees and on_host.parents is not None:
                parents[places] = on_host.parents.numpy()[filled]
        return msgspec.structs.replace(plan, input_ids=input_ids, parents=parents)

    def _is_settled(self, step_id: int) -> bool:
        """Of a step that may not have begun."""
        step = self._steps.get(step_id)
        return step is not None and (step.is_whole or step.failure is not None)


def _of_rows(drafts: DeviceDrafts, rows: list[int]) -> DeviceDrafts:
    """Rows one by one: which they are is no tensor, so that nobody waits."""
    token_ids = torch.stack([drafts.token_ids[row] for row in rows])
    if drafts.parents is None:
        return DeviceDrafts(token_ids)
    return DeviceDrafts(token_ids, torch.stack([drafts.parents[row] for row in rows]))
