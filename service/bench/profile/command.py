"""`tessera bench --profile`: flags to a session, its phases to tables, failures to exit codes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.console import Console

from service.deployments.engine_options import parse_engine_options
from service.hub.resolve import resolve_engine
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError

if TYPE_CHECKING:
    from attention.roofline import HardwareLimits

DEFAULT_STREAMS = (1, 64, 256)
DEFAULT_CPU_STREAMS = (1, 16)
"""Prompts of more streams would take minutes on a CPU."""


def engine_config(model: str | None, options: Sequence[str]) -> EngineConfig:
    """The engine that --model and --engine ask for, its model fetched if it is one of the hub.

    Raises typer.BadParameter; exits with 1, in one line, where the model cannot be had.
    """
    try:
        settings = parse_engine_options(model or "builtin", options)
        with Console(stderr=True).status("looking for the model") as status:

            def show(done: int, total: int) -> None:
                status.update(f"fetching the model: {done / total:.0%} of {total / 1e9:.2f} GB")

            return resolve_engine(settings.to_engine_config(), settings.revision, show)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    except ModelLoadError as error:
        typer.echo(f"tessera bench: {error}", err=True)
        raise typer.Exit(1) from error


def peak_limits(bandwidth: float | None, flops: float | None) -> "HardwareLimits | None":
    """Limits in TB/s and TFLOP/s, both or none. Raises typer.BadParameter for one alone."""
    if bandwidth is None and flops is None:
        return None
    if bandwidth is None or flops is None:
        raise typer.BadParameter("--peak-bandwidth and --peak-flops go together")
    from attention.roofline import HardwareLimits

    return HardwareLimits(bandwidth * 1e12, flops * 1e12)


def run_profile(
    config: EngineConfig,
    streams: Sequence[int] | None,
    context_tokens: int,
    limits: "HardwareLimits | None",
) -> None:
    """Profile and print. Exits with 1, in one line, where the engine cannot start.

    The engine's code, and torch with it, is imported here and not before.
    """
    from attention.capability import AttentionBackendError
    from service.bench.profile.report import print_profile
    from service.bench.profile.session import ProfilePlan, ProfileSession
    from workers.runner.sizing import resolve_device

    try:
        is_cpu = resolve_device(config).type == "cpu"
        default = DEFAULT_CPU_STREAMS if is_cpu else DEFAULT_STREAMS
        plan = ProfilePlan(tuple(streams or default), context_tokens)
        session = ProfileSession(config, plan, limits)
    except (ConfigError, ModelLoadError, AttentionBackendError) as error:
        typer.echo(f"tessera bench: the engine cannot start: {error}", err=True)
        raise typer.Exit(1) from error
    try:
        print_profile(session.phases(), Console())
    finally:
        session.close()
