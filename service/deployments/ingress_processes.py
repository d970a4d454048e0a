"""How many ingress processes serve an application, and how Serve runs them. Knows no requests."""

import os
from typing import Any

from service.config import ServeConfig
from service.security.quota import KeyLimits

# A process spends 10 to 40 us of CPU on a streamed token (docs/performance.md); four keep up with
# any one engine, and an engine needs cores of its own.
MAX_AUTOMATIC = 4
CPUS_PER_INGRESS = 4
# Serve would pass every chunk of a response between two threads of the process otherwise.
ONE_THREAD = {"RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}


def num_ingresses(config: ServeConfig, num_cpus: float | None) -> int:
    """What is configured, else one for every CPUS_PER_INGRESS of the cluster, at most four.

    Where keys may have limits it is one: limits hold in each process, so more processes must be
    the operator's decision. num_cpus: of the cluster; None takes this machine's.
    """
    if config.num_ingresses is not None:
        return config.num_ingresses
    if config.auth.api_key_file is not None or config.auth.limits != KeyLimits():
        return 1
    cpus = os.cpu_count() or 1 if num_cpus is None else int(num_cpus)
    return max(1, min(MAX_AUTOMATIC, cpus // CPUS_PER_INGRESS))


def ingress_actor_options(config: ServeConfig) -> dict[str, Any]:
    """Of Ray. With HAProxy, Serve's own server takes the requests and hands them to ours."""
    if config.http.proxy == "haproxy":
        return {"num_cpus": 0, "runtime_env": {"env_vars": dict(ONE_THREAD)}}
    return {"num_cpus": 0}
