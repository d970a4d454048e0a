"""Which adapters the device has: those of running requests, and as many others as have room.

A request that is admitted pins its adapter's slot until it leaves; a slot that nobody pins goes to
the next adapter that needs one, the one used longest ago first. Who finds no slot waits, in the way
of nobody but those who keep the slots taken: after MAX_OVERTAKING of them the others wait, too.
"""

from collections import OrderedDict
from collections.abc import Iterable

import msgspec

from workers.adapters.ref import AdapterRef
from workers.errors import IntegrityError
from workers.scheduler.adapter_plan import AdapterLoad, AdapterPlan, WornAdapter
from workers.scheduler.plan import StepPlan
from workers.scheduler.request import Request

MAX_OVERTAKING = 64


class AdapterMemory:
    """num_slots: adapters that the device has at a time, in slots 1 to num_slots."""

    def __init__(self, num_slots: int) -> None:
        self._free = list(range(num_slots, 0, -1))
        # By key: the slot, and running requests that have it.
        self._slots: dict[str, int] = {}
        self._num_pins: dict[str, int] = {}
        self._idle: OrderedDict[str, None] = OrderedDict()
        self._is_awaited = False
        self._num_overtaking = 0
        self._has_come_free = False
        self._bare: list[int] = []
        self._loads: list[AdapterLoad] = []
        self._worn: list[WornAdapter] = []

    def must_wait(self, request: Request) -> bool:
        """Whether the request, which has not been admitted, finds no slot for its adapter now."""
        adapter = request.adapter
        if adapter is None:
            return False
        if adapter.key in self._slots:
            return self._is_awaited and self._num_overtaking >= MAX_OVERTAKING
        if self._free or self._idle:
            return False
        self._is_awaited = True
        return True

    def take_free(self) -> bool:
        """Whether a slot has come free since the last time: those who wait may look again."""
        has_come_free, self._has_come_free = self._has_come_free, False
        if has_come_free:
            self._is_awaited = False
        return has_come_free

    def open(self, request: Request) -> None:
        """The request, which need not wait, has just got its slot."""
        adapter = request.adapter
        if adapter is None:
            return
        if adapter.key in self._slots:
            self._num_overtaking += 1
        else:
            self._load(adapter)
        self._idle.pop(adapter.key, None)
        self._num_pins[adapter.key] = self._num_pins.get(adapter.key, 0) + 1
        self._worn.append(WornAdapter(request.slot, self._slots[adapter.key]))

    def _load(self, adapter: AdapterRef) -> None:
        if self._free:
            slot = self._free.pop()
        else:
            evicted, _ = self._idle.popitem(last=False)
            slot = self._slots.pop(evicted)
        self._slots[adapter.key] = slot
        self._num_overtaking = 0
        # What a plan that was never made would have put there does not matter.
        self._loads = [load for load in self._loads if load.slot != slot]
        self._loads.append(AdapterLoad(slot, adapter))

    def close(self, request: Request) -> None:
        """The request gives its slot, which it still has, back."""
        adapter = request.adapter
        if adapter is None:
            return
        self._bare.append(request.slot)
        # A plan that has not been made yet must not dress whoever gets the slot next.
        self._worn = [one for one in self._worn if one.request_slot != request.slot]
        self._num_pins[adapter.key] -= 1
        if not self._num_pins[adapter.key]:
            del self._num_pins[adapter.key]
            self._idle[adapter.key] = None
            self._has_come_free = True

    def add_to(self, plan: StepPlan) -> StepPlan:
        """The plan, with what ranks must load and who has what."""
        if not (self._bare or self._worn):
            return plan
        adapters = AdapterPlan(tuple(self._bare), tuple(self._loads), tuple(self._worn))
        self._bare, self._loads, self._worn = [], [], []
        return msgspec.structs.replace(plan, adapters=adapters)

    def check_integrity(self, running: Iterable[Request]) -> None:
        """Raise IntegrityError unless what is pinned is pinned by running requests."""
        num_pins: dict[str, int] = {}
        for request in running:
            if request.adapter is not None:
                num_pins[request.adapter.key] = num_pins.get(request.adapter.key, 0) + 1
        if num_pins != self._num_pins or self._slots.keys() != num_pins.keys() | self._idle.keys():
            raise IntegrityError(
                f"running requests have adapters {num_pins}, {self._num_pins} are pinned of "
                f"{self._slots}"
            )
        if sorted([*self._slots.values(), *self._free]) != list(
            range(1, len(self._slots) + len(self._free) + 1)
        ):
            raise IntegrityError(f"slots {self._free} of adapters are free beside {self._slots}")


def adapter_memories(num_slots: int) -> tuple[AdapterMemory, ...]:
    """One where adapters are served."""
    return (AdapterMemory(num_slots),) if num_slots else ()
