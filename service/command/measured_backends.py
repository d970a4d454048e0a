"""`tessera backends --model M`: what attention takes by each backend, and who is taken."""

import typer
from rich.console import Console
from rich.table import Table

from attention.capability import AttentionBackendError
from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED
from attention.tuning.choice import TunedRoutes
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.runner.attention_trial import try_attention


def show_measured(console: Console, model: str, device: str) -> None:
    """Measures what an earlier start has not. Exits where no backend works for the model."""
    config = EngineConfig(model=model, device=device, attention_backend=AUTO_TUNED)
    try:
        choice = try_attention(config)
    except (AttentionBackendError, ConfigError, ModelLoadError) as error:
        console.print(str(error), highlight=False)
        raise typer.Exit(1) from error
    tuned = choice.routes
    if not isinstance(tuned, TunedRoutes):
        raise TypeError(f"{AUTO_TUNED} led to no measured choice")
    console.print(f"{tuned}, page size {choice.page_size}", highlight=False)
    for phase in tuned.chosen:
        _show_phase(console, tuned, phase)
    for one in tuned.left_out:
        console.print(f"not {one.name} in {one.phase}: {one.reason}", highlight=False)


def _show_phase(console: Console, tuned: TunedRoutes, phase: AttentionPhase) -> None:
    points = [point for point in sorted(tuned.table.seconds) if point.phase is phase]
    names = tuned.table.contenders(phase)
    if not points:
        taken = ", ".join(tuned.chosen[phase])
        console.print(f"{phase}: {taken}, the only candidate; nothing was measured")
        return
    table = Table("step", *names, "taken", title=f"{phase}: us a layer")
    for point in points:
        seconds = tuned.table.seconds[point]
        times = (_micros(seconds.get(name), tuned.num_layers) for name in names)
        table.add_row(str(point), *times, tuned.choose(point).name)
    console.print(table)


def _micros(seconds: float | None, num_layers: int) -> str:
    return "" if seconds is None else f"{seconds / num_layers * 1e6:.1f}"
