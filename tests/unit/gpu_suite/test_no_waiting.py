"""The guard of GPU tests against waiting for the device ends with its block, whatever happens."""

import warnings

import pytest
import torch

from tests.gpu.no_waiting import no_waiting


@pytest.fixture
def modes(monkeypatch):
    """torch's way: it warns the first time, after it has changed the mode."""
    set_to = []

    def set_mode(mode):
        set_to.append(mode)
        if len(set_to) == 1:
            warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)

    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    return set_to


def test_the_prototype_warning_is_no_error(modes):
    with no_waiting():
        assert modes == ["error"]
    assert modes == ["error", "default"]


def test_the_mode_ends_with_a_failure(modes):
    def fail():
        raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(RuntimeError, match="synchronizing"), no_waiting():
        fail()
    assert modes[-1] == "default"


def test_other_warnings_of_the_block_are_errors(modes):
    with pytest.raises(UserWarning, match="else"), no_waiting():
        warnings.warn("something else", stacklevel=1)
    assert modes[-1] == "default"
