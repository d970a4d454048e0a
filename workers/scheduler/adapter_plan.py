"""What a plan says of adapters: which slots of the device take one, and who has one."""

import msgspec

from workers.adapters.ref import AdapterRef


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """The adapter takes this slot of the device, 1 and up."""

    slot: int
    adapter: AdapterRef


class WornAdapter(msgspec.Struct, frozen=True, array_like=True):
    """The request in request_slot has the adapter in slot, until its slot is bare."""

    request_slot: int
    slot: int


class AdapterPlan(msgspec.Struct, frozen=True):
    """bare: slots whose request with an adapter has left. It takes effect first, then loads, then
    worn, all before the step. Carrying a plan out again changes nothing."""

    bare: tuple[int, ...] = ()
    loads: tuple[AdapterLoad, ...] = ()
    worn: tuple[WornAdapter, ...] = ()


NO_ADAPTERS = AdapterPlan()
