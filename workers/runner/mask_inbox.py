"""How a step that is under way gets the masks which the host makes while its forward pass runs."""

import threading
from typing import Protocol

from workers.constraints.masks import StepMasks
from workers.kv_cache.radix_node import EMPTY


class MaskSource(Protocol):
    def wait(self, step_id: int) -> StepMasks:
        """The masks of a step, as often as it is asked for; steps are asked for in their order."""
        ...


class MaskInbox:
    """From the thread that makes masks to the one that runs steps."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._masks: dict[int, StepMasks] = {}
        self._is_closed = False

    def put(self, masks: StepMasks) -> None:
        with self._changed:
            self._masks[masks.step_id] = masks
            self._changed.notify_all()

    def wait(self, step_id: int) -> StepMasks:
        """After close: masks of no row, for a step that nobody wants any more."""
        with self._changed:
            self._changed.wait_for(lambda: step_id in self._masks or self._is_closed)
            for old in [known for known in self._masks if known < step_id]:
                del self._masks[old]
            return self._masks.get(step_id) or StepMasks(step_id, EMPTY, EMPTY, EMPTY)

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
