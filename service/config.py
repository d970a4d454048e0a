"""The service's whole configuration: frozen, typed, validated once.

YAML file, environment and command line meet here and nowhere else; the command line wins over the
environment, which wins over the file. Unknown keys are errors wherever they come from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import ErrorDetails

from service.admission import AdmissionSettings
from service.channel.settings import ChannelSettings
from service.limits import Limits
from service.request_log.settings import LoggingSettings
from service.routing_policy import RouterSettings
from service.security.api_keys import ApiKey, check_distinct, parse_key_file
from service.security.quota import KeyLimits
from service.security.tls import TlsSettings
from service.tracing.settings import TracingSettings
from workers.config import DType, EngineConfig, KVCacheDType, LoadFormat, ModelImpl
from workers.errors import ConfigError

ENV_PREFIX = "TESSERA_"
ENV_SEPARATOR = "__"


class _Settings(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())


class EngineSettings(_Settings):
    """The fields of workers.config.EngineConfig, which says what they mean."""

    model: str = "builtin"
    model_impl: ModelImpl = "auto"
    device: str = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    load_format: LoadFormat = "safetensors"
    tp_size: int = 1
    attention_backend: str | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int = 1 << 30
    gpu_memory_fraction: float = 0.85
    num_cpu_threads: int | None = None
    max_context_len: int | None = None
    max_running_requests: int = 256
    max_step_tokens: int = 8192
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 22
    enable_prefix_cache: bool = True
    enable_mixed_batches: bool = True
    enable_overlap: bool = True
    enable_cuda_graphs: bool = True
    attention_timing_interval_steps: int = 128
    check_integrity_when_idle: bool = False
    seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.to_engine_config()
        return self

    def to_engine_config(self) -> EngineConfig:
        """Raises ConfigError if a value is out of range."""
        return EngineConfig(**self.model_dump())


class HttpSettings(_Settings):
    """Where HTTP is served and who accepts the connections.

    proxy "direct": each ingress replica listens itself, sharing the port. "serve": Ray Serve's
    Python proxy. "haproxy": Ray Serve's HAProxy mode, which also opens its statistics and metrics
    ports on every interface (docs/decisions/0020-http-proxy.md). tls: of the ingress's own
    listeners, so for "direct" only.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    proxy: Literal["direct", "serve", "haproxy"] = "direct"
    keep_alive_timeout_s: int = Field(default=90, ge=1)
    tls: TlsSettings | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tls is not None and self.proxy != "direct":
            raise ValueError('tls needs proxy "direct": the proxies of Ray Serve speak plain HTTP')
        return self


class GrpcSettings(_Settings):
    """Where gRPC is served; every ingress replica of a node shares the port."""

    host: str = "127.0.0.1"
    port: int = Field(default=9000, ge=1, le=65535)
    tls: TlsSettings | None = None


class MetricsSettings(_Settings):
    """Where Prometheus scrapes, and how often processes push to there.

    peak_bytes_per_s, peak_flops_per_s: limits of one device, for the roofline ratio; both or none,
    which takes what was measured on a GPU of that name, where something was.
    """

    host: str = "127.0.0.1"
    port: int = Field(default=9400, ge=1, le=65535)
    push_interval_s: float = Field(default=1.0, gt=0)
    expire_after_s: float = Field(default=15.0, gt=0)
    peak_bytes_per_s: float | None = Field(default=None, gt=0)
    peak_flops_per_s: float | None = Field(default=None, gt=0)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.peak_bytes_per_s is None) != (self.peak_flops_per_s is None):
            raise ValueError("give both peak_bytes_per_s and peak_flops_per_s, or neither")
        return self


class ReplicaSettings(_Settings):
    """What one engine replica asks of Ray and how it is watched.

    gpus_per_rank: None takes one where the engine runs on CUDA. step_timeout_s: a loop that does
    not turn for so long is dead. startup_timeout_s: for `tessera serve` to give up.
    """

    cpus_per_rank: float = Field(default=1.0, ge=0)
    gpus_per_rank: float | None = Field(default=None, ge=0)
    health_check_period_s: float = Field(default=1.0, gt=0)
    health_check_timeout_s: float = Field(default=10.0, gt=0)
    step_timeout_s: float = Field(default=120.0, gt=0)
    startup_timeout_s: float = Field(default=1800.0, gt=0)


class AuthSettings(_Settings):
    """API keys that clients may present; none means no authentication.

    api_key_file: one key a line, with limits of its own if it has any (service/security/api_keys).
    api_keys: comma-separated when given by environment. limits: of every key, in each ingress
    process, unless the file says otherwise. salt_prefix_cache_by_key: clients with different keys
    share no cached prefix, so none can tell from its latency what another has sent.
    """

    api_key_file: Path | None = None
    api_keys: tuple[SecretStr, ...] = ()
    limits: KeyLimits = KeyLimits()
    salt_prefix_cache_by_key: bool = False

    @model_validator(mode="before")
    @classmethod
    def _split(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("api_keys"), str):
            keys = [key.strip() for key in data["api_keys"].split(",")]
            return {**data, "api_keys": keys}
        return data

    @field_validator("api_keys")
    @classmethod
    def _refuse_empty_keys(cls, keys: tuple[SecretStr, ...]) -> tuple[SecretStr, ...]:
        # An unset secret must not open the service, nor an empty key match an empty header.
        if not all(key.get_secret_value().strip() for key in keys):
            raise ValueError("an API key is empty")
        return keys

    @model_validator(mode="after")
    def _check(self) -> Self:
        has_keys = bool(self.api_keys) or self.api_key_file is not None
        if not has_keys and (self.limits != KeyLimits() or self.salt_prefix_cache_by_key):
            raise ValueError("limits and salts by key need API keys")
        return self

    def load_keys(self) -> tuple[ApiKey, ...]:
        """All keys. Raises ConfigError if the file cannot be read or holds none."""
        keys = [
            ApiKey(key.get_secret_value().strip(), f"key-{number}", self.limits)
            for number, key in enumerate(self.api_keys, 1)
        ]
        try:
            if self.api_key_file is not None:
                found = parse_key_file(self.api_key_file.read_text(), self.limits)
                if not found:
                    raise ConfigError(f"{self.api_key_file} holds no key")
                keys += found
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"auth.api_key_file: {error}") from error
        check_distinct(keys)
        return tuple(keys)


class ServeConfig(_Settings):
    """Everything `tessera serve` and build_app need to know.

    drain_timeout_s: how long streams under way may go on after a shutdown began.
    num_tokenizer_processes: per ingress.
    """

    engine: EngineSettings = EngineSettings()
    num_replicas: int = Field(default=1, ge=1)
    num_ingresses: int = Field(default=1, ge=1)
    num_tokenizer_processes: int = Field(default=1, ge=1)
    drain_timeout_s: float = Field(default=60.0, gt=0)
    app_name: str = Field(default="tessera", pattern=r"^[A-Za-z0-9_-]{1,64}$")
    http: HttpSettings = HttpSettings()
    grpc: GrpcSettings = GrpcSettings()
    metrics: MetricsSettings = MetricsSettings()
    replica: ReplicaSettings = ReplicaSettings()
    channel: ChannelSettings = ChannelSettings()
    router: RouterSettings = RouterSettings()
    admission: AdmissionSettings = AdmissionSettings()
    limits: Limits = Limits.model_validate({})
    auth: AuthSettings = AuthSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        ports = [self.http.port, self.grpc.port, self.metrics.port]
        if len(set(ports)) < len(ports):
            raise ValueError("http.port, grpc.port and metrics.port must differ")
        return self

    def check_files(self) -> None:
        """Raise ConfigError if keys, certificates or packages cannot be used here."""
        self.auth.load_keys()
        self.tracing.check()
        for name, tls in (("http.tls", self.http.tls), ("grpc.tls", self.grpc.tls)):
            if tls is not None:
                tls.check(name)


def load_config(
    file: Path | None, environment: Mapping[str, str], overrides: Mapping[str, Any]
) -> ServeConfig:
    """Merge the three sources. Raises ConfigError with every problem found.

    environment: TESSERA_HTTP__PORT sets http.port. overrides: dotted names to values.
    """
    merged = _read_yaml(file) if file is not None else {}
    for name, text in environment.items():
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split(ENV_SEPARATOR)
            _set(merged, path, None if text == "null" else text)
    for name, value in overrides.items():
        _set(merged, name.split("."), value)
    return parse_config(merged)


def parse_config(data: Mapping[str, Any]) -> ServeConfig:
    """Raises ConfigError with every problem found."""
    try:
        return ServeConfig.model_validate(data)
    except ValidationError as error:
        problems = [
            f"{'.'.join(str(part) for part in problem['loc'])}: {_reason(problem)}"
            for problem in error.errors(include_url=False, include_input=False)
        ]
        raise ConfigError("; ".join(problems)) from error


def _reason(problem: ErrorDetails) -> str:
    if problem["type"] == "extra_forbidden":
        return "no such setting"
    return problem["msg"].removeprefix("Value error, ")


def _read_yaml(file: Path) -> dict[str, Any]:
    try:
        data = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file}: {error}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{file}: expected a mapping at the top")
    return data


def _set(target: dict[str, Any], path: list[str], value: Any) -> None:
    *parents, leaf = path
    for parent in parents:
        child = target.setdefault(parent, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{'.'.join(path)}: {parent} is no section")
        target = child
    target[leaf] = value
