"""The service's whole configuration: frozen, typed, validated once.

YAML file, environment and command line meet here and nowhere else; the command line wins over the
environment, which wins over the file. Unknown keys are errors wherever they come from.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from service.autoscaling.settings import AutoscalingSettings, check_either
from service.channel.settings import ChannelSettings
from service.chat.settings import ChatSettings
from service.config_sources import read_yaml, set_at
from service.limits import Limits
from service.listening import FrozenSettings, GrpcSettings, HttpSettings, MetricsSettings
from service.model_names import is_hub_id, model_name
from service.observability.request_log.settings import LoggingSettings
from service.observability.tracing.settings import TracingSettings
from service.remote.settings import MediaSettings
from service.routing.admission import AdmissionSettings
from service.routing.policy import RouterSettings
from service.security.settings import AuthSettings
from workers.config import (
    DType,
    EngineConfig,
    KVCacheDType,
    LoadFormat,
    ModelImpl,
    Quantization,
    QuantizedProducts,
)
from workers.errors import ConfigError
from workers.speculation.config import DraftPolicyName, DraftQuantization, SpeculativeConfig

ENV_PREFIX = "TESSERA_"
ENV_SEPARATOR = "__"


# A name of a model as clients write it. Unlike a folder's own name it is free of what URLs escape.
ServedName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$")]


# Of EngineSettings: what is of the hub, and of requests before engines get them.
_NOT_THE_ENGINES = {
    "revision",
    "generation_config",
    "lora",
    "lora_folder",
    "lora_folder_interval_s",
}


def _checked_method(text: str) -> str:
    """Named by its own key where it is none."""
    SpeculativeConfig.parse(text, 1, "fixed")
    return text


class EngineSettings(FrozenSettings):
    """The fields of workers.config.EngineConfig, which says what they mean.

    model: an id of the Hugging Face hub too. revision: of such a model, a branch, tag or commit.
    generation_config: whether requests that leave sampling open take generation_config.json's.
    target_inter_token_ms: what a service promises its streams; an engine without clients has none.
    lora: folders of adapters that are served from the start, by the names that clients call them.
    lora_folder: a folder whose subfolders are adapters, called like them: those that are there at
    the moment, looked for every lora_folder_interval_s.
    """

    model: str = "builtin"
    generation_config: Literal["auto", "none"] = "auto"
    revision: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,254}$")] | None = None
    served_model_name: ServedName | None = None
    model_impl: ModelImpl = "auto"
    device: str = "auto"
    dtype: DType = "auto"
    kv_cache_dtype: KVCacheDType = "auto"
    load_format: LoadFormat = "safetensors"
    quantization: Quantization | None = None
    quantized_products: QuantizedProducts = "native"
    weights_cache_dir: str | None = None
    weights_cache_bytes: int = 200 << 30
    tp_size: int = 1
    ep_size: int = 1
    attention_backend: str | None = None
    prefill_attention_backend: str | None = None
    decode_attention_backend: str | None = None
    page_size: int | None = None
    num_pages: int | None = None
    kv_cache_bytes: int = 1 << 30
    num_state_snapshots: int | None = None
    gpu_memory_fraction: float = 0.85
    num_cpu_threads: int | None = None
    max_context_len: int | None = None
    max_running_requests: int = 256
    max_step_tokens: int = 8192
    target_inter_token_ms: float | None = 55.0
    max_waiting_requests: int = 4096
    max_waiting_tokens: int = 1 << 22
    media_store_bytes: int = 1 << 28
    max_media_bytes: int = 1 << 30
    enable_prefix_cache: bool = True
    enable_mixed_batches: bool = True
    enable_overlap: bool = True
    enable_cuda_graphs: bool = True
    enable_peer_memory: bool = True
    speculative: Annotated[str, AfterValidator(_checked_method)] | None = None
    max_draft_tokens: int = 4
    draft_policy: DraftPolicyName = "adaptive"
    draft_tree: tuple[int, ...] = ()
    draft_quantization: DraftQuantization | None = None
    max_loras: int = 0
    max_lora_rank: int = 64
    max_cpu_loras: int = 256
    lora_embeddings: bool = False
    lora_experts: bool = False
    lora: dict[ServedName, str] = {}
    lora_folder: Annotated[str, Field(min_length=1)] | None = None
    lora_folder_interval_s: float = Field(default=5.0, gt=0)
    deterministic: bool = False
    attention_timing_interval_steps: int = 128
    expert_load_interval_steps: int = 0
    expert_load_file: str | None = None
    num_redundant_experts: int = 0
    check_integrity_when_idle: bool = False
    seed: int | None = None
    dummy_weights_seed: int = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.to_engine_config()
        if self.revision is not None and not is_hub_id(self.model):
            raise ValueError(f"revision is for models of the hub; {self.model!r} is a folder")
        if self.lora and not self.max_loras:
            raise ValueError("lora: adapters need slots of the device; set max_loras")
        if self.lora_folder is not None and not self.max_loras:
            raise ValueError("lora_folder: adapters need slots of the device; set max_loras")
        return self

    def to_engine_config(self) -> EngineConfig:
        """Raises ConfigError if a value is out of range. See service.hub.resolve for ids."""
        return EngineConfig(**self.model_dump(exclude=_NOT_THE_ENGINES))


class ReplicaSettings(FrozenSettings):
    """What one engine replica asks of Ray and how it is watched.

    gpus_per_rank: None takes one where the engine runs on CUDA. step_timeout_s: a loop that does
    not turn for so long is dead, and so is a process that runs no Python for so long.
    startup_timeout_s: for `tessera serve` to give up.
    """

    cpus_per_rank: float = Field(default=1.0, ge=0)
    gpus_per_rank: float | None = Field(default=None, ge=0)
    health_check_period_s: float = Field(default=1.0, gt=0)
    health_check_timeout_s: float = Field(default=10.0, gt=0)
    step_timeout_s: float = Field(default=120.0, gt=0)
    startup_timeout_s: float = Field(default=1800.0, gt=0)


class ModelSettings(FrozenSettings):
    """One of several models. What its `replica` leaves out comes from ServeConfig.replica."""

    engine: EngineSettings = EngineSettings()
    num_replicas: int = Field(default=1, ge=1)
    replica: ReplicaSettings = ReplicaSettings()
    autoscaling: AutoscalingSettings | None = None
    chat: ChatSettings = ChatSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        check_either(self.autoscaling, self.model_fields_set)
        return self


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """One served model with everything decided.

    name: what clients call it, and engine.served_model_name. deployment: Serve's name of its engine
    replicas.
    """

    name: str
    deployment: str
    engine: EngineSettings
    num_replicas: int
    replica: ReplicaSettings
    autoscaling: AutoscalingSettings | None
    chat: ChatSettings = ChatSettings()

    @property
    def max_replicas(self) -> int:
        return self.autoscaling.max_replicas if self.autoscaling else self.num_replicas


_OF_ONE_MODEL = ("engine", "num_replicas", "autoscaling", "chat")


class ServeConfig(FrozenSettings):
    """Everything `tessera serve` and build_app need to know.

    engine, num_replicas, autoscaling, chat: of the only model; models: of several, by the name that
    clients call each. One form excludes the other; served_models() is the same view of both.
    drain_timeout_s: how long streams under way may go on after a shutdown began.
    num_ingresses: None chooses by the cluster's CPUs (service/deployments/ingress_processes.py).
    num_tokenizer_processes: per ingress and model; one more is kept for short texts.
    """

    engine: EngineSettings = EngineSettings()
    num_replicas: int = Field(default=1, ge=1)
    autoscaling: AutoscalingSettings | None = None
    chat: ChatSettings = ChatSettings()
    models: dict[ServedName, ModelSettings] = {}
    num_ingresses: int | None = Field(default=None, ge=1)
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
    media: MediaSettings = MediaSettings()
    auth: AuthSettings = AuthSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings = TracingSettings()

    @model_validator(mode="after")
    def _check(self) -> Self:
        ports = [self.http.port, self.grpc.port, self.metrics.port]
        if len(set(ports)) < len(ports):
            raise ValueError("http.port, grpc.port and metrics.port must differ")
        check_either(self.autoscaling, self.model_fields_set)
        return self

    @model_validator(mode="after")
    def _check_models(self) -> Self:
        given = [name for name in _OF_ONE_MODEL if name in self.model_fields_set]
        if self.models and given:
            raise ValueError(
                f"{', '.join(given)} and models exclude each other: what is said of a model goes "
                "under models.<name>"
            )
        for name, model in self.models.items():
            if model.engine.served_model_name not in (None, name):
                raise ValueError(f"models.{name} is served by that name; leave served_model_name")
        served = self.served_models()
        names = [one.name for one in served]
        names += [name for one in served for name in one.engine.lora]
        if len(set(names)) < len(names):
            raise ValueError("models and adapters (engine.lora) must have different names")
        stated = [one.engine.lora_folder for one in served if one.engine.lora_folder is not None]
        folders = [os.path.realpath(os.path.expanduser(one)) for one in stated]
        if len(set(folders)) < len(folders):
            raise ValueError("models must have different engine.lora_folder")
        deployments = [model.deployment for model in served]
        if len(set(deployments)) < len(deployments):
            raise ValueError('names of models must differ in more than "/" and "_"')
        return self

    def served_models(self) -> tuple[ModelConfig, ...]:
        """Every model, at least one, in the order of the configuration."""
        if not self.models:
            name = self.engine.served_model_name or model_name(self.engine.model)
            given: dict[str, Any] = {
                field: getattr(self, field)
                for field in _OF_ONE_MODEL
                if field in self.model_fields_set
            }
            return (self._served(name, "Engine", ModelSettings(**given)),)
        return tuple(
            self._served(name, f"Engine-{name.replace('/', '_')}", model)
            for name, model in self.models.items()
        )

    def _served(self, name: str, deployment: str, model: ModelSettings) -> ModelConfig:
        return ModelConfig(
            name=name,
            deployment=deployment,
            engine=model.engine.model_copy(update={"served_model_name": name}),
            num_replicas=model.num_replicas,
            replica=self.replica.model_copy(update=model.replica.model_dump(exclude_unset=True)),
            autoscaling=model.autoscaling,
            chat=model.chat,
        )

    def check_files(self) -> None:
        """Raise ConfigError if keys, certificates or packages cannot be used here."""
        self.auth.check_files()
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
    merged = read_yaml(file) if file is not None else {}
    for name, text in environment.items():
        if name.startswith(ENV_PREFIX):
            path = name.removeprefix(ENV_PREFIX).lower().split(ENV_SEPARATOR)
            set_at(merged, path, None if text == "null" else text)
    for name, value in overrides.items():
        set_at(merged, name.split("."), value)
    return parse_config(merged)


def parse_config(data: Mapping[str, Any]) -> ServeConfig:
    """Raises ConfigError with every problem found."""
    try:
        return ServeConfig.model_validate(data)
    except ValidationError as error:
        problems = map(_describe, error.errors(include_url=False, include_input=False))
        raise ConfigError("; ".join(problems)) from error


def _describe(problem: ErrorDetails) -> str:
    is_unknown = problem["type"] == "extra_forbidden"
    reason = "no such setting" if is_unknown else problem["msg"].removeprefix("Value error, ")
    # What several settings have in common is no one's.
    return ": ".join(filter(None, (".".join(map(str, problem["loc"])), reason)))
