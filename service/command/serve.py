"""`tessera serve`: start the service, show how far it is, drain it on SIGTERM or SIGINT.

Knows flags and the terminal; service.command.launcher does the work.
"""

import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from service.command.announcement import announce
from service.command.launcher import Launcher, LaunchError, RayTarget, prepare_environment
from service.command.start_display import make_start_display
from service.config import ServeConfig, load_config
from service.deployments.engine_factory import EngineFactory, create_engine
from workers.errors import ConfigError

_SIGNAL_POLL_S = 0.2
_WATCH_PERIOD_S = 5.0
_MAX_SILENT = 3

Model = Annotated[
    str | None,
    typer.Argument(
        help='"builtin" (default), "builtin-draft", a model folder, or an id of the Hugging Face '
        "hub such as Qwen/Qwen3-0.6B."
    ),
]
Revision = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model of the hub; default main.")
]
ConfigFile = Annotated[Path | None, typer.Option("--config", help="YAML file of ServeConfig.")]
Host = Annotated[str | None, typer.Option(help="Where HTTP and gRPC listen; default 127.0.0.1.")]
Port = Annotated[int | None, typer.Option(help="HTTP port; default 8000.")]
GrpcPort = Annotated[int | None, typer.Option(help="gRPC port; default 9000.")]
MetricsPort = Annotated[int | None, typer.Option(help="Metrics port; default 9400.")]
Replicas = Annotated[int | None, typer.Option(help="Engine replicas; default 1.")]
TpSize = Annotated[int | None, typer.Option(help="Ranks per replica; default 1.")]
WeightsFormat = Annotated[
    str | None,
    typer.Option(
        "--quantization", help="fp8: round an unquantised checkpoint's weights while loading."
    ),
]
KVCache = Annotated[
    str | None,
    typer.Option("--kv-cache-dtype", help="auto (the weights') or fp8_e4m3; default auto."),
]
Drafts = Annotated[
    str | None,
    typer.Option(
        "--speculative",
        help="Who proposes drafts: ngram, suffix, draft:MODEL, eagle3:FOLDER, mtp, dflash:FOLDER; "
        "draft:builtin-draft and eagle3:builtin-head are the built-in model's.",
    ),
]
DraftWeights = Annotated[
    str | None,
    typer.Option(
        "--draft-quantization",
        help="fp8: round the draft model's or EAGLE-3 head's weights while loading; texts stay.",
    ),
]
Deterministic = Annotated[
    bool | None,
    typer.Option(
        "--deterministic",
        help="The same bits of a request whatever shares its batch; slower; default off.",
    ),
]
Attention = Annotated[
    str | None,
    typer.Option(
        "--attention-backend",
        help="A name of `tessera backends`, or auto-tuned; default the best that works here.",
    ),
]
PrefillAttention = Annotated[
    str | None,
    typer.Option("--prefill-attention-backend", help="Another one for steps that read prompts."),
]
DecodeAttention = Annotated[
    str | None,
    typer.Option(
        "--decode-attention-backend", help="Another one for steps of one new token a request."
    ),
]
Adapters = Annotated[
    list[str] | None,
    typer.Option(
        "--lora-modules",
        help="NAME=FOLDER of a LoRA adapter to serve from the start; needs engine.max_loras. "
        "Repeatable.",
    ),
]
ToolParser = Annotated[
    str | None,
    typer.Option(
        "--tool-call-parser",
        help="How the model writes tool calls: hermes, llama3_json, mistral, pythonic, ...; "
        "default auto, by its chat template.",
    ),
]
ReasoningParser = Annotated[
    str | None,
    typer.Option(
        "--reasoning-parser", help="think, mistral, granite, harmony or none; default auto."
    ),
]
Proxy = Annotated[str | None, typer.Option(help="direct, serve or haproxy; default direct.")]
RayAddress = Annotated[
    str | None, typer.Option(help="A running Ray to join; default RAY_ADDRESS, else a new one.")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", help="Any setting by its dotted name: engine.page_size=16. Repeatable."),
]


class StopSignal:
    """Counts SIGTERM and SIGINT: the first drains, the second does not wait."""

    def __init__(self) -> None:
        self._count = 0

    def install(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)

    def is_raised(self) -> bool:
        return self._count > 0

    def is_urgent(self) -> bool:
        return self._count > 1

    def wait(self, timeout_s: float) -> bool:
        """True as soon as a signal came, False after timeout_s without one."""
        # Not signal.pause(): a signal between the test and the pause would be slept through.
        end_s = time.monotonic() + timeout_s
        while not self._count and time.monotonic() < end_s:
            time.sleep(_SIGNAL_POLL_S)
        return self.is_raised()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._count += 1


def serve(  # noqa: PLR0913  one parameter a flag
    model: Model = None,
    revision: Revision = None,
    config: ConfigFile = None,
    host: Host = None,
    port: Port = None,
    grpc_port: GrpcPort = None,
    metrics_port: MetricsPort = None,
    replicas: Replicas = None,
    tp_size: TpSize = None,
    quantization: WeightsFormat = None,
    kv_cache_dtype: KVCache = None,
    speculative: Drafts = None,
    draft_quantization: DraftWeights = None,
    deterministic: Deterministic = None,
    attention_backend: Attention = None,
    prefill_attention_backend: PrefillAttention = None,
    decode_attention_backend: DecodeAttention = None,
    lora_modules: Adapters = None,
    tool_call_parser: ToolParser = None,
    reasoning_parser: ReasoningParser = None,
    proxy: Proxy = None,
    ray_address: RayAddress = None,
    setting: Settings = None,
) -> None:
    """Serve a model over HTTP and gRPC."""
    flags: dict[str, Any] = {
        "engine.model": model,
        "engine.revision": revision,
        "http.host": host,
        "grpc.host": host,
        "http.port": port,
        "grpc.port": grpc_port,
        "metrics.port": metrics_port,
        "num_replicas": replicas,
        "engine.tp_size": tp_size,
        "engine.quantization": quantization,
        "engine.kv_cache_dtype": kv_cache_dtype,
        "engine.speculative": speculative,
        "engine.draft_quantization": draft_quantization,
        "engine.deterministic": deterministic,
        "engine.attention_backend": attention_backend,
        "engine.prefill_attention_backend": prefill_attention_backend,
        "engine.decode_attention_backend": decode_attention_backend,
        "chat.tool_call_parser": tool_call_parser,
        "chat.reasoning_parser": reasoning_parser,
        "http.proxy": proxy,
    }
    console = Console(stderr=True)
    try:
        flags["engine.lora"] = _folders_by_name(lora_modules or [])
        loaded = load_config(config, os.environ, _overrides(flags, setting or []))
    except ConfigError as error:
        _complain(console, error)
        raise typer.Exit(2) from error
    address = ray_address or os.environ.get("RAY_ADDRESS")
    raise typer.Exit(run_service(loaded, RayTarget(address), console))


def _folders_by_name(modules: list[str]) -> dict[str, str] | None:
    """Raises ConfigError for a module that is not NAME=FOLDER, or whose name another one has."""
    folders: dict[str, str] = {}
    for module in modules:
        name, _, folder = module.partition("=")
        if not folder or name in folders:
            raise ConfigError(f"--lora-modules {module}: expected NAME=FOLDER, each name once")
        folders[name] = folder
    return folders or None


def _overrides(flags: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Raises ConfigError for a setting that is not NAME=VALUE."""
    overrides = {name: value for name, value in flags.items() if value is not None}
    for setting in settings:
        name, separator, value = setting.partition("=")
        if not separator:
            raise ConfigError(f"--set {setting}: expected NAME=VALUE")
        overrides[name] = None if value == "null" else value
    return overrides


def run_service(
    config: ServeConfig,
    target: RayTarget,
    console: Console,
    create_engine: EngineFactory = create_engine,
) -> int:
    """Everything between flags and exit code."""
    prepare_environment(config, target, os.environ)
    launcher = Launcher(config, target, create_engine)
    stop = StopSignal()
    try:
        with make_start_display(console, "starting Ray") as bar:
            launcher.connect()
            stop.install()  # after Ray, which installs handlers of its own
            launcher.deploy()
            is_ready = launcher.wait_until_ready(bar.update, stop.is_raised)
        if is_ready:
            announce(config, launcher.tasks(), Console())
            _watch(launcher, stop)
        with make_start_display(console, "draining") as bar:
            if not launcher.drain(bar.update, stop.is_urgent):
                console.print("some requests were still running")
    except LaunchError as error:
        _complain(console, error)
        return 1
    finally:
        launcher.stop()
    return 0


def _complain(console: Console, error: Exception) -> None:
    console.print(
        f"tessera serve: {error}", style="red", highlight=False, markup=False, soft_wrap=True
    )


def _watch(launcher: Launcher, stop: StopSignal) -> None:
    """Return at a signal. Raises LaunchError when the control plane is gone for good."""
    num_silent = 0
    while not stop.wait(_WATCH_PERIOD_S):
        num_silent = 0 if launcher.is_answering() else num_silent + 1
        if num_silent == _MAX_SILENT:
            raise LaunchError("Ray does not answer any more; the service is gone")
