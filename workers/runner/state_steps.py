"""What a plan moves between slots and snapshots, as a rank's states take it. Knows of models
only that they keep some.
"""

from collections.abc import Iterator

import numpy as np
import torch

from attention.memory.slot_states import SlotStates, SnapshotOfRow
from workers.models.base import CausalLM
from workers.sampling.transfer import upload
from workers.scheduler.plan import StepPlan


def slot_states(
    model: CausalLM, num_slots: int, device: torch.device, num_snapshots: int
) -> tuple[SlotStates, ...]:
    """One where the model's modules keep states of requests."""
    if not model.state_entries:
        return ()
    states = SlotStates(model.state_entries, num_slots, device, num_snapshots)
    model.keep_states(states)
    return (states,)


def begin_step(states: SlotStates, plan: StepPlan, device: torch.device) -> None:
    """Before the model runs. Can be repeated, as the launch of a plan or of a part of it."""
    states.begin_step(tuple(_snapshots_of_rows(plan)) if len(plan.state_saves) else ())
    _restore(states, plan, device)


def begin_replay(states: SlotStates, plan: StepPlan, device: torch.device) -> None:
    """Before a graph that writes the states of the plan's rows at once."""
    states.begin_step()
    _restore(states, plan, device)


def save_behind_replay(states: SlotStates, plan: StepPlan, device: torch.device) -> None:
    """The snapshots that the plan wants of its rows, which have brought one token each."""
    saved = tuple(_snapshots_of_rows(plan)) if len(plan.state_saves) else ()
    if saved:
        slots = plan.slots[[one.row for one in saved]].astype(np.int64)
        snapshots = np.array([one.snapshot for one in saved], dtype=np.int64)
        states.save(*upload([slots, snapshots], device))


def _restore(states: SlotStates, plan: StepPlan, device: torch.device) -> None:
    restores = plan.state_restores
    if len(restores):
        indices = (restores.slots, restores.snapshots)
        states.restore(*upload([one.astype(np.int64) for one in indices], device))


def _snapshots_of_rows(plan: StepPlan) -> Iterator[SnapshotOfRow]:
    """Those of the plan's own tokens: a part of a plan names the saves of the whole."""
    row_of = {slot: row for row, slot in enumerate(plan.slots.tolist())}
    saves = plan.state_saves
    arrays = (saves.slots, saves.positions, saves.snapshots)
    for slot, position, snapshot in zip(*(one.tolist() for one in arrays), strict=True):
        row = row_of.get(slot)
        if row is None:
            continue
        num_tokens = position - int(plan.prefix_lens[row])
        if 0 < num_tokens <= plan.num_new_tokens[row]:
            yield SnapshotOfRow(row, num_tokens, snapshot)
