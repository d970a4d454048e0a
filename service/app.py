"""build_app: the only place where the service's parts are put together.

Everything else receives its collaborators. `build` is the same for Serve's YAML (import_path
"service.app:build").
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray import serve

from service.autoscaling.serve_options import scaling_options
from service.config import ModelConfig, ReplicaSettings, ServeConfig, load_config
from service.deployments.engine_factory import EngineFactory, create_engine
from service.deployments.ingress import Ingress
from service.deployments.ingress_processes import ingress_actor_options, num_ingresses
from service.deployments.replica import EngineReplica

# Serve's own limits must never be met before ours: its refusals are plain text.
UNLIMITED_REQUESTS = 1_000_000
SHUTDOWN_MARGIN_S = 15.0


def build_app(
    config: ServeConfig, create_engine: EngineFactory = create_engine
) -> serve.Application:
    """The Serve application: engine replicas of each model, and the ingresses before all."""
    models = config.served_models()
    engines = [_engine(model, config).bind(config, model, create_engine) for model in models]
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=num_ingresses(config, _cluster_resources().get("CPU")),
        ray_actor_options=ingress_actor_options(config),
        **_common_options(config, config.replica),
    )
    # Engines are not called through Serve: their handles only make them part of the application.
    app: serve.Application = ingress.bind(config, models, *engines)
    return app


def build(args: Mapping[str, Any]) -> serve.Application:
    """For Serve's YAML: args are dotted configuration names, `config_file` names a YAML file."""
    overrides = dict(args)
    file = overrides.pop("config_file", None)
    return build_app(load_config(None if file is None else Path(file), os.environ, overrides))


def _engine(model: ModelConfig, config: ServeConfig) -> Any:
    return serve.deployment(
        EngineReplica,
        name=model.deployment,
        **_engine_options(model),
        **scaling_options(config.app_name, model),
        **_common_options(config, model.replica),
    )


def _common_options(config: ServeConfig, replica: ReplicaSettings) -> dict[str, Any]:
    return {
        "max_ongoing_requests": UNLIMITED_REQUESTS,
        "max_queued_requests": -1,
        "health_check_period_s": replica.health_check_period_s,
        "health_check_timeout_s": replica.health_check_timeout_s,
        "graceful_shutdown_timeout_s": config.drain_timeout_s + SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 3,
    }


def _engine_options(model: ModelConfig) -> dict[str, Any]:
    """One bundle per rank, all on one node; the replica itself sits in the first."""
    bundle = {"CPU": model.replica.cpus_per_rank, "GPU": _gpus_per_rank(model)}
    tp_size = model.engine.tp_size
    options: dict[str, Any] = {
        "ray_actor_options": {"num_cpus": bundle["CPU"], "num_gpus": bundle["GPU"]},
    }
    if tp_size > 1:
        needed = {name: amount for name, amount in bundle.items() if amount > 0}
        options["placement_group_bundles"] = [needed] * tp_size
        options["placement_group_strategy"] = "STRICT_PACK"
    return options


def _gpus_per_rank(model: ModelConfig) -> float:
    if model.replica.gpus_per_rank is not None:
        return model.replica.gpus_per_rank
    device = model.engine.device
    if device == "auto":
        return 1.0 if _cluster_resources().get("GPU", 0) > 0 else 0.0
    return 1.0 if device.startswith("cuda") else 0.0


def _cluster_resources() -> dict[str, float]:
    """Empty before Ray was started."""
    if not ray.is_initialized():
        return {}
    resources: dict[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return resources
