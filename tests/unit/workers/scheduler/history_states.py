"""The states of the history runner: what one token leaves for the next, by slot, and snapshots."""

from collections.abc import Callable, Iterable

import numpy as np

from workers.scheduler.plan import StepPlan

STATE_TOKENS = 2


class StateWindow:
    """A state as a retention: the values of the last two tokens, each made of the one before."""

    num_tokens = STATE_TOKENS

    def first_visible(self, position: int) -> int:
        return max(position - 1, 0)


class HistoryStates:
    """Anything stands where nothing was saved; value_of: the value of a token after others."""

    def __init__(self, num_snapshots: int, value_of: Callable[[int, np.ndarray], int]) -> None:
        self._rng = np.random.default_rng(2)
        self._value_of = value_of
        self._snapshots = [self._anything() for _ in range(num_snapshots)]
        # By slot, after each number of tokens that the last step went through.
        self._slots: dict[int, dict[int, np.ndarray]] = {}

    def admit(self, slot: int) -> None:
        self._slots[slot] = {0: np.zeros(0, dtype=np.uint64)}

    def restore(self, plan: StepPlan) -> None:
        prefix_lens = dict(zip(plan.slots.tolist(), plan.prefix_lens.tolist(), strict=True))
        restores = plan.state_restores
        admitted = {one.slot for one in plan.admitted}
        assert len(set(restores.slots.tolist())) == len(restores.slots)
        for slot, snapshot in zip(
            restores.slots.tolist(), restores.snapshots.tolist(), strict=True
        ):
            assert slot in admitted
            self._slots[slot] = {prefix_lens[slot]: self._snapshots[snapshot]}

    def start(self, slot: int, length: int) -> None:
        """The slot's row goes on after length tokens, which must be where its state stands."""
        *_, stands_at = self._slots[slot]
        assert stands_at == length, "a state of another place"
        self._slots[slot] = {length: self._slots[slot][length]}

    def add(self, slot: int, length: int, token_id: int) -> None:
        """A token after length others."""
        before = self._slots[slot][length]
        value = np.uint64(self._value_of(token_id, before[-1:]))
        self._slots[slot][length + 1] = np.append(before, value)[-STATE_TOKENS:]

    def at(self, slot: int, length: int) -> np.ndarray:
        return self._slots[slot][length]

    def save(self, plan: StepPlan) -> None:
        """After the rows have run."""
        saves = plan.state_saves
        assert len(set(saves.snapshots.tolist())) == len(saves.snapshots)
        places = list(zip(saves.slots.tolist(), saves.positions.tolist(), strict=True))
        assert len(set(places)) == len(places), "a state is saved twice"
        ranges = {
            slot: range(start + 1, start + length + 1)
            for slot, start, length in zip(
                plan.slots.tolist(),
                plan.prefix_lens.tolist(),
                plan.num_new_tokens.tolist(),
                strict=True,
            )
        }
        for slot, position, snapshot in zip(
            saves.slots.tolist(), saves.positions.tolist(), saves.snapshots.tolist(), strict=True
        ):
            assert position in ranges[slot], "a save beside the row's tokens"
            self._snapshots[snapshot] = self._slots[slot][position]

    def spoil_slot(self, plan: StepPlan, slot: int) -> None:
        """The slot's row failed: what it should have made or saved is anything."""
        length = max(self._slots[slot])
        self._slots[slot][length] = self._anything()
        saves = plan.state_saves
        self.spoil(saves.snapshots[saves.slots == slot].tolist())

    def spoil(self, snapshots: Iterable[int]) -> None:
        for snapshot in snapshots:
            self._snapshots[snapshot] = self._anything()

    def _anything(self) -> np.ndarray:
        return self._rng.integers(0, 2**63, STATE_TOKENS, dtype=np.uint64)
