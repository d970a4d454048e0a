"""How a profile looks. Knows no engine."""

from collections.abc import Iterable

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from service.bench.profile.kernel_groups import Group
from service.bench.profile.session import PhaseProfile

MAX_NAME = 72


def print_phase(phase: PhaseProfile, console: Console) -> None:
    """One phase: microseconds a step by group, share of the step, floor; then the largest names."""
    step_s = phase.breakdown.step_s
    table = Table(f"{phase.title}: us a step", "us", "share", "floor us", "of floor's rate")
    for column in table.columns[1:]:
        column.justify = "right"
    floors = _floors(phase)
    for group in Group:
        seconds = phase.breakdown.seconds[group]
        table.add_row(group.value, *_cells(seconds, step_s, floors.get(group)))
    whole = None if phase.floor is None else phase.floor.step_s
    table.add_row("step, profiled", *_cells(step_s, step_s, whole))
    table.add_row("step, not profiled", *_cells(phase.step_s, step_s, whole))
    console.print(table)
    for name, seconds in phase.breakdown.largest:
        text = f"  {seconds * 1e6:11,.1f} us  {escape(name[:MAX_NAME])}"
        console.print(text, highlight=False, soft_wrap=True)


def print_profile(phases: Iterable[PhaseProfile], console: Console) -> None:
    """Every phase as it is done."""
    for phase in phases:
        print_phase(phase, console)


def _floors(phase: PhaseProfile) -> dict[Group, float]:
    if phase.floor is None:
        return {}
    return {Group.ATTENTION: phase.floor.attention_s, Group.GEMM: phase.floor.gemm_s}


def _cells(seconds: float, step_s: float, floor_s: float | None) -> tuple[str, str, str, str]:
    share = f"{seconds / step_s:.1%}" if step_s > 0.0 else ""
    if floor_s is None:
        return f"{seconds * 1e6:,.1f}", share, "", ""
    reached = f"{floor_s / seconds:.0%}" if seconds > 0.0 else ""
    return f"{seconds * 1e6:,.1f}", share, f"{floor_s * 1e6:,.1f}", reached
