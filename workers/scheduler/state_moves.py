"""What a plan says of states: which slots go on from snapshots, and which snapshots it takes.

Arrays are int32 and flat, one entry a move. Of models that keep states only.
"""

import msgspec

from workers.kv_cache.radix_node import EMPTY, IntArray


class StateRestores(msgspec.Struct, frozen=True):
    """Before the step, the states of each of slots (n,) become what one of snapshots (n,) holds."""

    slots: IntArray = EMPTY
    snapshots: IntArray = EMPTY

    def __len__(self) -> int:
        return len(self.slots)


class StateSaves(msgspec.Struct, frozen=True):
    """Once the row of each of slots (n,) has computed the first of positions (n,) tokens of its
    request, its states go to one of snapshots (n,). A position is that of a token of the step, or
    the one behind its last."""

    slots: IntArray = EMPTY
    positions: IntArray = EMPTY
    snapshots: IntArray = EMPTY

    def __len__(self) -> int:
        return len(self.slots)


NO_RESTORES = StateRestores()
NO_SAVES = StateSaves()
