"""The limit of open files follows the ceilings of connections."""

import resource

import pytest

from service.deployments.open_files import NUM_OTHER_FILES, allow_connections


@pytest.fixture
def limits(monkeypatch):
    """The process's limits as they would be; nothing is really set."""
    held = {"limits": (1024, 4096)}
    monkeypatch.setattr(resource, "getrlimit", lambda which: held["limits"])
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: held.update(limits=new))
    return held


def test_the_soft_limit_is_raised_as_far_as_it_has_to_be(limits):
    assert allow_connections(2000) == 2000
    assert limits["limits"] == (2000 + NUM_OTHER_FILES, 4096)
    assert allow_connections(10) == 10
    assert limits["limits"] == (2000 + NUM_OTHER_FILES, 4096)


def test_where_the_hard_limit_is_lower_there_are_fewer_connections_and_a_warning(limits, caplog):
    assert allow_connections(8192) == 4096 - NUM_OTHER_FILES
    assert "instead of the 8192" in caplog.text
    limits["limits"] = (256, 256)
    assert allow_connections(8192) == 128


def test_no_limit_is_no_limit(limits):
    limits["limits"] = (1024, resource.RLIM_INFINITY)
    assert allow_connections(8192) == 8192
    limits["limits"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert allow_connections(1 << 20) == 1 << 20
