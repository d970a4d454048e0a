"""The flags of `tessera bench`, each with its help. Types only."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from service.bench.lengths import FORMS

_LOAD = "Load"
_WORKLOAD = "Workload"
_TARGET = "Target"
_OUTPUT = "Output"
_PROFILE = "Profile"


class TransportKind(StrEnum):
    """How requests reach the model."""

    HTTP = "http"
    GRPC = "grpc"
    IN_PROCESS = "in-process"


class ArrivalKind(StrEnum):
    """Spacing of open-loop requests."""

    POISSON = "poisson"
    FIXED = "fixed"


class OutputKind(StrEnum):
    """What goes to standard output."""

    TABLE = "table"
    JSON = "json"


Transport = Annotated[
    TransportKind, typer.Option(help="How requests travel.", rich_help_panel=_TARGET)
]
Url = Annotated[
    str | None,
    typer.Option(
        help="Server; http://127.0.0.1:8000 or, for gRPC, 127.0.0.1:9000 when not given.",
        rich_help_panel=_TARGET,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(
        help="Served model's name; in process, a model folder or an id of the hub. Default: the "
        "server's first, or "
        "the built-in model.",
        rich_help_panel=_TARGET,
    ),
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="HTTP: chat completions, whose prompts are text of as many words, instead of "
        "completions with token ids.",
        rich_help_panel=_TARGET,
    ),
]
ApiKeyFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Its first key is sent as a bearer token; the server's own file will do.",
        rich_help_panel=_TARGET,
    ),
]
CaFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Authorities to trust, as PEM; gRPC speaks TLS when it is given, HTTP to https URLs.",
        rich_help_panel=_TARGET,
    ),
]
ClientCertificateFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Certificate to present for mutual TLS, as PEM; needs --ca-file and the key.",
        rich_help_panel=_TARGET,
    ),
]
ClientKeyFile = Annotated[
    Path | None,
    typer.Option(
        exists=True,
        dir_okay=False,
        help="Key of the client certificate, as PEM.",
        rich_help_panel=_TARGET,
    ),
]
EngineOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--engine",
        metavar="KEY=VALUE",
        help="In process: a setting of the engine, such as page_size=16. Repeatable.",
        rich_help_panel=_TARGET,
    ),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Closed loop: requests under way at any time. 16 unless --rate is given.",
        rich_help_panel=_LOAD,
    ),
]
Rate = Annotated[
    float | None,
    typer.Option(
        help="Open loop: requests per second; inf sends all at once.", rich_help_panel=_LOAD
    ),
]
Arrivals = Annotated[
    ArrivalKind, typer.Option(help="Open loop: spacing of requests.", rich_help_panel=_LOAD)
]
NumRequests = Annotated[
    int | None,
    typer.Option(
        min=1, help="Stop sending after so many. 200 unless --duration.", rich_help_panel=_LOAD
    ),
]
Duration = Annotated[
    float | None,
    typer.Option(min=0.001, help="Stop sending after so many seconds.", rich_help_panel=_LOAD),
]
Warmup = Annotated[
    int,
    typer.Option(
        min=0, help="Requests sent before, with other prompts, not counted.", rich_help_panel=_LOAD
    ),
]
Timeout = Annotated[
    float,
    typer.Option(min=0.001, help="Seconds that one request may take.", rich_help_panel=_LOAD),
]
InputLen = Annotated[
    str,
    typer.Option(metavar="LENGTH", help=f"Prompt tokens: {FORMS}.", rich_help_panel=_WORKLOAD),
]
OutputLen = Annotated[
    str,
    typer.Option(metavar="LENGTH", help=f"Output tokens: {FORMS}.", rich_help_panel=_WORKLOAD),
]
PrefixShare = Annotated[
    float,
    typer.Option(
        min=0.0,
        max=1.0,
        help="Share of each prompt that its group has in common.",
        rich_help_panel=_WORKLOAD,
    ),
]
PrefixGroups = Annotated[
    int, typer.Option(min=1, help="Groups with a prefix of their own.", rich_help_panel=_WORKLOAD)
]
ReuseCache = Annotated[
    bool,
    typer.Option(
        "--reuse-cache",
        help="Find what earlier runs of this seed left in the server's prefix cache; otherwise a "
        "cache salt of its own keeps every run apart.",
        rich_help_panel=_WORKLOAD,
    ),
]
Temperature = Annotated[
    float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=_WORKLOAD)
]
RespectEos = Annotated[
    bool,
    typer.Option(
        "--respect-eos",
        help="Let the model end early; otherwise outputs are exactly as long as asked.",
        rich_help_panel=_WORKLOAD,
    ),
]
Seed = Annotated[
    int,
    typer.Option(
        min=0, help="Same seed, same prompts, lengths and arrivals.", rich_help_panel=_WORKLOAD
    ),
]
VocabSize = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Prompt token ids lie below it. Default: what the server says.",
        rich_help_panel=_WORKLOAD,
    ),
]
Output = Annotated[
    OutputKind, typer.Option(help="What goes to standard output.", rich_help_panel=_OUTPUT)
]
JsonFile = Annotated[
    Path | None,
    typer.Option(dir_okay=False, help="Write the JSON here too.", rich_help_panel=_OUTPUT),
]
Profile = Annotated[
    bool,
    typer.Option(
        "--profile",
        help="Instead of a load: where the time of prefill and decode steps goes, in an engine in "
        "this process. Takes --model, --engine and the flags below.",
        rich_help_panel=_PROFILE,
    ),
]
ProfileStreams = Annotated[
    list[int] | None,
    typer.Option(
        "--profile-streams",
        min=1,
        help="Streams that decode at once. Repeatable. Default: 1, 64 and 256; 1 and 16 on a CPU.",
        rich_help_panel=_PROFILE,
    ),
]
ProfileContext = Annotated[
    int,
    typer.Option(
        min=2,
        help="Prompt tokens of each stream, at most half of the model's context.",
        rich_help_panel=_PROFILE,
    ),
]
PeakBandwidth = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="TB/S",
        help="Memory rate for the floor, with --peak-flops. Default: the device's, if it is known.",
        rich_help_panel=_PROFILE,
    ),
]
PeakFlops = Annotated[
    float | None,
    typer.Option(
        min=0.001,
        metavar="TFLOP/S",
        help="Rate of matrix products for the floor, with --peak-bandwidth.",
        rich_help_panel=_PROFILE,
    ),
]
