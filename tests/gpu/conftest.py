"""What every test on a GPU leaves behind: no strict mode, no memory."""

import gc

import pytest
import torch

from tests.gpu.no_waiting import set_sync_mode

MAX_KEPT_BYTES = 1 << 30


@pytest.fixture(scope="session", autouse=True)
def memory_share(request):
    """Of the device's memory, no more than this process's share, if it was told of one."""
    share = request.config.getoption("gpu_memory_share", None)
    if share is not None and torch.cuda.is_available():
        torch.cuda.set_per_process_memory_fraction(share)


@pytest.fixture(scope="module", autouse=True)
def _no_engine_stays():
    """Engines that a module's tests dropped are cycles of objects."""
    yield
    if torch.cuda.is_available():
        gc.collect()
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def _clean_device():
    """The next test finds torch as this one should have, whatever became of this one."""
    yield
    if not torch.cuda.is_available():
        return
    set_sync_mode("default")
    if torch.cuda.memory_reserved() > MAX_KEPT_BYTES:
        torch.cuda.empty_cache()
