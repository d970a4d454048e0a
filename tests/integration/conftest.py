"""One Ray for all integration tests, started where nothing can listen outside loopback.

Run them with `tests/integration/isolated.sh pytest tests/integration`: Ray binds every interface,
so a namespace that has only `lo` is what confines it.
"""

import os
from pathlib import Path

import pytest

OBJECT_STORE_BYTES = 100 << 20
_THIS_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if _THIS_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def ray_session():
    """A started Ray with Serve, no proxy, no dashboard; ended after the last test."""
    os.environ["RAY_AUTH_MODE"] = "disabled"
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    import ray
    from ray import serve

    ray.init(
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        num_cpus=4,
    )
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()
