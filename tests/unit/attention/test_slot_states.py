"""States by slot: read, staged, and a slot's own only once they are committed."""

import pytest
import torch

from attention.memory.slot_states import SlotStates, SnapshotOfRow, StateEntry, StateTensor

CONV = StateTensor((2, 3), torch.float32)
RECURRENT = StateTensor((4,), torch.bfloat16)
ENTRIES = (StateEntry((CONV, RECURRENT)), StateEntry((CONV,)))


def new_states() -> SlotStates:
    return SlotStates(ENTRIES, 5, torch.device("cpu"))


def filled(value: float, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.full((rows, 2, 3), value), torch.full((rows, 4), value, dtype=torch.bfloat16)


def test_bytes_are_those_of_every_slot() -> None:
    assert ENTRIES[0].bytes_per_slot == 6 * 4 + 4 * 2
    assert new_states().num_bytes == 5 * (6 * 4 + 4 * 2 + 6 * 4)


def test_what_is_staged_is_read_after_the_commit_only() -> None:
    states, slots = new_states(), torch.tensor([4, 1])
    states.stage(0, slots, filled(7.0, 2))
    assert not any(tensor.any() for tensor in states.read(0, slots))
    states.commit()
    conv, recurrent = states.read(0, torch.tensor([1, 2]))
    assert (conv[0] == 7.0).all()
    assert (recurrent[0] == 7.0).all()
    assert not conv[1].any()
    assert not recurrent[1].any()
    assert not states.read(1, slots)[0].any()


def test_a_launch_that_failed_leaves_nothing_to_commit() -> None:
    states, slots = new_states(), torch.tensor([3])
    states.stage(0, slots, filled(1.0, 1))
    states.commit()
    states.stage(0, slots, filled(2.0, 1))
    states.begin_step()
    states.commit()
    assert (states.read(0, slots)[0] == 1.0).all()


def test_what_is_read_can_be_changed_in_place() -> None:
    """Transformers' kernels for one token do so."""
    states, slots = new_states(), torch.tensor([0])
    states.read(0, slots)[0].fill_(9.0)
    assert not states.read(0, slots)[0].any()


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"entry 1 have shapes \[\(1, 2, 4\)\]"):
        new_states().stage(1, torch.tensor([0]), [torch.zeros(1, 2, 4)])


def test_slots_go_on_from_snapshots_and_the_other_way_round() -> None:
    states = SlotStates(ENTRIES, 2, torch.device("cpu"), num_snapshots=3)
    states.begin_step([SnapshotOfRow(0, 1, 2), SnapshotOfRow(0, 2, 1)])
    for entry, width in ((0, 2), (1, 1)):
        states.stage_snapshots(entry, torch.tensor([2, 1]), filled(5.0, 2)[:width])
        states.stage(entry, torch.tensor([0]), filled(6.0, 1)[:width])
    states.commit()
    states.begin_step()
    states.restore(torch.tensor([1]), torch.tensor([2]))
    for entry in (0, 1):
        of_slots = states.read(entry, torch.tensor([0, 1]))[0]
        assert of_slots[:, 0, 0].tolist() == [6.0, 5.0]
    states.restore(torch.tensor([1]), torch.tensor([0]))
    assert not states.read(0, torch.tensor([1]))[0].any()


def test_a_captured_step_writes_at_once_and_snapshots_are_saved_behind_it() -> None:
    """Its padding rows share a slot."""
    states = SlotStates(ENTRIES, 3, torch.device("cpu"), num_snapshots=2)
    states.begin_step()
    for entry, width in ((0, 2), (1, 1)):
        states.write(entry, torch.tensor([1, 2, 2]), filled(4.0, 3)[:width])
    states.save(torch.tensor([1]), torch.tensor([1]))
    states.write(0, torch.tensor([1]), filled(8.0, 1))
    states.restore(torch.tensor([0]), torch.tensor([1]))
    of_slots, recurrent = states.read(0, torch.tensor([0, 1, 2]))
    assert of_slots[:, 0, 0].tolist() == [4.0, 8.0, 4.0]
    assert recurrent[:, 0].tolist() == [4.0, 8.0, 4.0]
    assert states.read(1, torch.tensor([0]))[0].eq(4.0).all()
    with pytest.raises(ValueError, match="entry 1 have shapes"):
        states.write(1, torch.tensor([0]), [torch.zeros(1, 2, 4)])


def test_a_step_that_leaves_out_a_snapshot_is_an_error_and_changes_nothing() -> None:
    states = SlotStates(ENTRIES, 2, torch.device("cpu"), num_snapshots=3)
    states.begin_step([SnapshotOfRow(0, 1, 2)])
    states.stage_snapshots(0, torch.tensor([2]), filled(5.0, 1))
    states.stage(0, torch.tensor([0]), filled(6.0, 1))
    with pytest.raises(RuntimeError, match="1 states of snapshots are staged, not 2"):
        states.commit()
    assert not states.read(0, torch.tensor([0]))[0].any()


def test_bytes_count_snapshots() -> None:
    states = SlotStates(ENTRIES, 2, torch.device("cpu"), num_snapshots=3)
    assert states.num_bytes == new_states().num_bytes
