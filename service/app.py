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

from service.config import ServeConfig, load_config
from service.engine_factory import EngineFactory, create_engine
from service.ingress import Ingress
from service.replica import EngineReplica

# Serve's own limits must never be met before ours: its refusals are plain text.
UNLIMITED_REQUESTS = 1_000_000
SHUTDOWN_MARGIN_S = 15.0


def build_app(
    config: ServeConfig, create_engine: EngineFactory = create_engine
) -> serve.Application:
    """The Serve application of one model: engine replicas and the ingresses before them."""
    engine: Any = serve.deployment(
        EngineReplica, name="Engine", **_engine_options(config), **_common_options(config)
    )
    ingress: Any = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=config.num_ingresses,
        ray_actor_options={"num_cpus": 0},
        **_common_options(config),
    )
    # The engine is not called through Serve: its handle only makes it part of the application.
    app: serve.Application = ingress.bind(config, engine.bind(config, create_engine))
    return app


def build(args: Mapping[str, Any]) -> serve.Application:
    """For Serve's YAML: args are dotted configuration names, `config_file` names a YAML file."""
    overrides = dict(args)
    file = overrides.pop("config_file", None)
    return build_app(load_config(None if file is None else Path(file), os.environ, overrides))


def _common_options(config: ServeConfig) -> dict[str, Any]:
    return {
        "max_ongoing_requests": UNLIMITED_REQUESTS,
        "max_queued_requests": -1,
        "health_check_period_s": config.replica.health_check_period_s,
        "health_check_timeout_s": config.replica.health_check_timeout_s,
        "graceful_shutdown_timeout_s": config.drain_timeout_s + SHUTDOWN_MARGIN_S,
        "graceful_shutdown_wait_loop_s": 0.1,
        "max_constructor_retry_count": 3,
    }


def _engine_options(config: ServeConfig) -> dict[str, Any]:
    """One bundle per rank, all on one node; the replica itself sits in the first."""
    bundle = {"CPU": config.replica.cpus_per_rank, "GPU": _gpus_per_rank(config)}
    tp_size = config.engine.tp_size
    options: dict[str, Any] = {
        "num_replicas": config.num_replicas,
        "ray_actor_options": {"num_cpus": bundle["CPU"], "num_gpus": bundle["GPU"]},
    }
    if tp_size > 1:
        needed = {name: amount for name, amount in bundle.items() if amount > 0}
        options["placement_group_bundles"] = [needed] * tp_size
        options["placement_group_strategy"] = "STRICT_PACK"
    return options


def _gpus_per_rank(config: ServeConfig) -> float:
    if config.replica.gpus_per_rank is not None:
        return config.replica.gpus_per_rank
    device = config.engine.device
    if device == "auto":
        resources: dict[str, float] = {}
        if ray.is_initialized():
            resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        return 1.0 if resources.get("GPU", 0) > 0 else 0.0
    return 1.0 if device.startswith("cuda") else 0.0
