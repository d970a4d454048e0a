"""`tessera bench`: flags to plan and transport, result to table and JSON, failures to exit codes.

Exit codes: 0 if any request ended well, 1 if none did or there is no target, 2 for wrong flags.
"""

import asyncio
import math
import secrets
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console

from service.bench import flags
from service.bench.engine_transport import EngineTransport, engine_factory
from service.bench.grpc_transport import GrpcTransport
from service.bench.http_transport import HttpTransport
from service.bench.lengths import LengthDistribution, LengthSpecError, parse_length
from service.bench.load import Extent, MonotonicClock
from service.bench.profile.command import engine_config, peak_limits, run_profile
from service.bench.report import BenchReport, print_report
from service.bench.runner import BenchPlan, ClosedLoop, LoadPattern, OpenLoop, run_bench
from service.bench.transport import GenerationSettings, TargetError, Transport
from service.security.client_tls import ClientTls
from service.security.settings import AuthSettings
from workers.errors import ConfigError

DEFAULT_HTTP_URL = "http://127.0.0.1:8000"
DEFAULT_GRPC_ADDRESS = "127.0.0.1:9000"
DEFAULT_CONCURRENCY = 16
DEFAULT_NUM_REQUESTS = 200


@dataclass(frozen=True, slots=True)
class _Target:
    """Flags that say where requests go."""

    kind: flags.TransportKind
    url: str | None
    model: str | None
    use_chat: bool
    api_key: str | None
    tls: ClientTls | None
    engine_options: list[str]

    @property
    def address(self) -> str:
        match self.kind:
            case flags.TransportKind.HTTP:
                return self.url or DEFAULT_HTTP_URL
            case flags.TransportKind.GRPC:
                return self.url or DEFAULT_GRPC_ADDRESS
            case flags.TransportKind.IN_PROCESS:
                return "this process"


def bench(  # noqa: PLR0913  one parameter a flag
    transport: flags.Transport = flags.TransportKind.HTTP,
    url: flags.Url = None,
    model: flags.Model = None,
    chat: flags.Chat = False,
    api_key_file: flags.ApiKeyFile = None,
    ca_file: flags.CaFile = None,
    client_certificate_file: flags.ClientCertificateFile = None,
    client_key_file: flags.ClientKeyFile = None,
    engine: flags.EngineOptions = None,
    concurrency: flags.Concurrency = None,
    rate: flags.Rate = None,
    arrivals: flags.Arrivals = flags.ArrivalKind.POISSON,
    num_requests: flags.NumRequests = None,
    duration: flags.Duration = None,
    warmup: flags.Warmup = 4,
    timeout: flags.Timeout = 600.0,
    input_len: flags.InputLen = "128",
    output_len: flags.OutputLen = "64",
    prefix_share: flags.PrefixShare = 0.0,
    prefix_groups: flags.PrefixGroups = 1,
    reuse_cache: flags.ReuseCache = False,
    temperature: flags.Temperature = 0.0,
    respect_eos: flags.RespectEos = False,
    seed: flags.Seed = 0,
    vocab_size: flags.VocabSize = None,
    output: flags.Output = flags.OutputKind.TABLE,
    json_file: flags.JsonFile = None,
    profile: flags.Profile = False,
    profile_streams: flags.ProfileStreams = None,
    profile_context: flags.ProfileContext = 1024,
    peak_bandwidth: flags.PeakBandwidth = None,
    peak_flops: flags.PeakFlops = None,
) -> None:
    """Measure a server, or the engine in this process, under a seeded load."""
    if profile:
        _refuse_server(url, chat)
        config = engine_config(model, engine or [])
        limits = peak_limits(peak_bandwidth, peak_flops)
        return run_profile(config, profile_streams, profile_context, limits)
    tls = _client_tls(ca_file, client_certificate_file, client_key_file)
    target = _Target(transport, url, model, chat, _read_key(api_key_file), tls, engine or [])
    plan = BenchPlan(
        _pattern(concurrency, rate, arrivals),
        _extent(num_requests, duration, rate, timeout),
        warmup,
        _length(input_len, "--input-len"),
        _length(output_len, "--output-len"),
        prefix_share,
        prefix_groups,
        seed,
        vocab_size,
    )
    settings = GenerationSettings(temperature, not respect_eos, _salt(reuse_cache))
    way = _make_transport(target, settings)
    report = _run(plan, target, way, {"input_len": input_len, "output_len": output_len}, settings)
    _write(report, output, json_file)
    if report.result.num_ok == 0:
        raise typer.Exit(1)
    return None


def _refuse_server(url: str | None, use_chat: bool) -> None:
    if url is not None or use_chat:
        raise typer.BadParameter("--profile runs an engine in this process")


def _pattern(
    concurrency: int | None, rate: float | None, arrivals: flags.ArrivalKind
) -> LoadPattern:
    if rate is None:
        return ClosedLoop(concurrency or DEFAULT_CONCURRENCY)
    if concurrency is not None:
        raise typer.BadParameter("--rate and --concurrency exclude each other")
    if not rate > 0:
        raise typer.BadParameter("--rate must be above 0")
    return OpenLoop(rate, arrivals is flags.ArrivalKind.POISSON)


def _extent(
    num_requests: int | None, duration: float | None, rate: float | None, timeout: float
) -> Extent:
    if num_requests is None and duration is None:
        num_requests = DEFAULT_NUM_REQUESTS
    if num_requests is None and rate is not None and math.isinf(rate):
        raise typer.BadParameter("--rate inf needs --num-requests")
    return Extent(num_requests, duration, timeout)


def _length(text: str, flag: str) -> LengthDistribution:
    try:
        return parse_length(text)
    except LengthSpecError as error:
        raise typer.BadParameter(f"{flag}: {error}") from error


def _read_key(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return AuthSettings(api_key_file=file).load_keys()[0].key
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error


def _salt(reuse_cache: bool) -> str:
    return "" if reuse_cache else secrets.token_hex(8)


def _client_tls(ca: Path | None, certificate: Path | None, key: Path | None) -> ClientTls | None:
    if ca is None:
        if certificate is not None or key is not None:
            raise typer.BadParameter("a client certificate needs --ca-file")
        return None
    try:
        tls = ClientTls(ca, certificate, key)
        tls.to_ssl_context()
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from error
    return tls


def _make_transport(target: _Target, settings: GenerationSettings) -> Transport:
    is_in_process = target.kind is flags.TransportKind.IN_PROCESS
    if target.use_chat and target.kind is not flags.TransportKind.HTTP:
        raise typer.BadParameter("--chat is for --transport http")
    if target.engine_options and not is_in_process:
        raise typer.BadParameter("--engine is for --transport in-process")
    match target.kind:
        case flags.TransportKind.HTTP:
            return HttpTransport(
                target.address,
                settings,
                model=target.model,
                use_chat=target.use_chat,
                api_key=target.api_key,
                tls=target.tls,
            )
        case flags.TransportKind.GRPC:
            return GrpcTransport(
                target.address,
                settings,
                model=target.model,
                api_key=target.api_key,
                tls=target.tls,
            )
        case flags.TransportKind.IN_PROCESS:
            config = engine_config(target.model, target.engine_options)
            return EngineTransport(engine_factory(config), settings)


def _run(
    plan: BenchPlan,
    target: _Target,
    way: Transport,
    lengths: dict[str, str],
    settings: GenerationSettings,
) -> BenchReport:
    notes = Console(stderr=True)
    try:
        with notes.status("starting") as status:
            info, result = asyncio.run(run_bench(plan, way, MonotonicClock(), status.update))
    except TargetError as error:
        message = f"tessera bench: {error}"
        notes.print(message, style="red", highlight=False, markup=False, soft_wrap=True)
        raise typer.Exit(1) from error
    return BenchReport(
        target=f"{target.kind} ({target.address})",
        model=info.model,
        load=plan.pattern.describe(),
        workload={
            **lengths,
            "vocab_size": plan.vocab_size or info.vocab_size or 0,
            "prefix_share": plan.prefix_share,
            "prefix_groups": plan.num_prefix_groups,
            "chat": target.use_chat,
            "temperature": settings.temperature,
            "ignore_eos": settings.ignore_eos,
            "reuse_cache": not settings.cache_salt,
            "warmup_requests": plan.num_warmup_requests,
            "seed": plan.seed,
        },
        result=result,
    )


def _write(report: BenchReport, output: flags.OutputKind, json_file: Path | None) -> None:
    if output is flags.OutputKind.JSON:
        typer.echo(report.to_json())
    else:
        print_report(report, Console())
    if json_file is not None:
        try:
            json_file.write_bytes(report.to_json() + b"\n")
        except OSError as error:
            typer.echo(f"tessera bench: the JSON could not be written: {error}", err=True)
            raise typer.Exit(1) from error
