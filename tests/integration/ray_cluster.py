"""A Ray of our own with Serve, for tests and for programs beside them."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from tests.integration.forked_workers import workers_are_forked

OBJECT_STORE_BYTES = 100 << 20


@contextmanager
def local_ray() -> Iterator[None]:
    """A started Ray with Serve, no proxy, no dashboard; ended at the end."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    with workers_are_forked():
        yield from _started_ray()


def _started_ray() -> Iterator[None]:
    import ray
    from ray import serve

    from service.command.own_ray import start_own_ray

    start_own_ray(
        {
            # A cluster that died may have left its address behind: join none.
            "address": "local",
            "include_dashboard": False,
            "object_store_memory": OBJECT_STORE_BYTES,
            "log_to_driver": False,
            "num_cpus": 4,
        }
    )
    serve.start(proxy_location="Disabled")
    try:
        yield
    finally:
        serve.shutdown()
        ray.shutdown()
