"""What fails a test that makes the host wait for the device."""

import warnings
from contextlib import contextmanager

import torch


def set_sync_mode(mode):
    """torch warns once that this is a prototype, after it has done it: not an error of a test."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode")
        torch.cuda.set_sync_debug_mode(mode)


@contextmanager
def no_waiting():
    """Within, torch raises where it would wait for the device."""
    try:
        set_sync_mode("error")
        yield
    finally:
        set_sync_mode("default")
