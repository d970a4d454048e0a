"""One Ray for all integration tests, started where nothing can listen outside loopback.

Run them with `tests/integration/isolated.sh pytest tests/integration`: Ray binds every interface,
so a namespace that has only `lo` is what confines it.
"""

from pathlib import Path

import pytest

from tests.integration.ray_cluster import local_ray

_THIS_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items):
    for item in items:
        if _THIS_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.ray)


@pytest.fixture(scope="session")
def ray_session():
    """One Ray for the whole session."""
    with local_ray():
        yield
