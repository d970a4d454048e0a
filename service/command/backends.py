"""`tessera backends`: which attention backends work here, why others do not, which is chosen."""

from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.table import Table

from attention.capability import AttentionBackendError
from attention.preferences import DeviceFacts
from attention.registry import ATTENTION_BACKENDS
from attention.selection import AttentionNeeds, detect_device, select_attention_backend, why_unfit

Device = Annotated[
    str, typer.Option(help='"auto" takes CUDA where there is any; else a torch device.')
]


Model = Annotated[
    str | None,
    typer.Option(
        help="A model folder: measures its attention here, by each backend, as auto-tuned does."
    ),
]


def backends(device: Device = "auto", model: Model = None) -> None:
    """Show every attention backend and the automatic choice for this machine."""
    facts = detect_device(_resolve(device))
    needs = AttentionNeeds(dtype=_default_dtype(facts), kv_dtype=_default_dtype(facts))
    table = Table("backend", "usable here", "page size", "why not", title=str(facts))
    for backend in ATTENTION_BACKENDS:
        capability = backend.capability
        obstacle = why_unfit(capability, facts, needs)
        if obstacle is None:
            probe = backend.probe()
            hint = f"{probe.missing}; to install: {capability.install_hint}"
            obstacle = None if probe.is_available else hint
        usable = "no" if obstacle else "yes"
        table.add_row(capability.name, usable, str(capability.default_page_size), obstacle or "")
    console = Console()
    console.print(table)
    try:
        console.print(str(select_attention_backend(None, facts, needs)), highlight=False)
    except AttentionBackendError as error:
        console.print(str(error), highlight=False)
        raise typer.Exit(1) from error
    if model is not None:
        # Transformers and the engine: seconds that the table above does without.
        from service.command.measured_backends import show_measured

        show_measured(console, model, device)


def _resolve(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except RuntimeError as error:
        raise typer.BadParameter(f"{device!r} is no torch device") from error
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise typer.BadParameter("torch sees no CUDA device here")
    return resolved


def _default_dtype(facts: DeviceFacts) -> torch.dtype:
    return torch.bfloat16 if facts.device_type == "cuda" else torch.float32
