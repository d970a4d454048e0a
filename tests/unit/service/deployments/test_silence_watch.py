"""A process that stands still is killed by its watch, whatever it does; one that works never is."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[4]
TIMEOUT_S = 1.0
# Of processes that have to live: longer than a busy machine keeps one of them from running.
LONG_TIMEOUT_S = 4.0
# From the end of the silence until the kill, on a machine that is busy otherwise.
PATIENCE_S = 30.0
PRELUDE = """
import ctypes, os, sys, time
from service.deployments.silence_watch import SilenceWatch
SilenceWatch({timeout_s}).start()
print("watched", flush=True)
"""
HOLD_THE_INTERPRETER = "ctypes.PyDLL(None).sleep(600)"


@contextlib.contextmanager
def watched(program, timeout_s=LONG_TIMEOUT_S):
    """The process, once its watch is there; ended at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", PRELUDE.format(timeout_s=timeout_s) + program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
    )
    try:
        assert process.stdout.readline() == "watched\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def watch_of(process):
    (found,) = psutil.Process(process.pid).children()
    return found


def is_gone(process):
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_stopped_process_is_killed_and_its_log_says_why():
    with watched("time.sleep(600)", TIMEOUT_S) as process:
        stopped_s = time.monotonic()
        process.send_signal(signal.SIGSTOP)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == -signal.SIGKILL
        assert time.monotonic() - stopped_s > TIMEOUT_S / 2
        assert f"process {process.pid} has run no Python for 1 s: killed" in errors


def test_a_process_whose_interpreter_lock_is_held_is_killed():
    with watched(HOLD_THE_INTERPRETER, TIMEOUT_S) as process:
        assert process.wait(PATIENCE_S) == -signal.SIGKILL


@pytest.mark.parametrize("program", ["time.sleep(600)", "while True: pass"])
def test_a_process_that_waits_or_computes_lives(program):
    with watched(program) as process:
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.3 * LONG_TIMEOUT_S)
        assert not is_gone(watch_of(process))


def test_a_short_stop_is_survived():
    with watched("time.sleep(600)") as process:
        for _ in range(5):
            process.send_signal(signal.SIGSTOP)
            time.sleep(LONG_TIMEOUT_S / 4)
            process.send_signal(signal.SIGCONT)
            time.sleep(LONG_TIMEOUT_S / 8)
        assert process.poll() is None


@pytest.mark.nightly
def test_what_stood_still_with_the_watch_does_not_count():
    """As when the machine is paused."""
    with watched("time.sleep(600)") as process:
        watch = watch_of(process)
        for one in (watch, psutil.Process(process.pid)):
            one.suspend()
        time.sleep(1.5 * LONG_TIMEOUT_S)
        for one in (psutil.Process(process.pid), watch):
            one.resume()
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.5 * LONG_TIMEOUT_S)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_the_watch_ends_with_its_process(end):
    with watched("time.sleep(600)") as process:
        watch = watch_of(process)
        process.send_signal(end)
        process.wait(PATIENCE_S)
        psutil.wait_procs([watch], timeout=PATIENCE_S)
        assert is_gone(watch)


def test_the_watch_ends_though_a_forked_child_holds_the_pipe():
    fork = "\nif os.fork() == 0:\n    time.sleep(60)\n    os._exit(0)\ntime.sleep(600)"
    with watched(fork) as process:
        deadline_s = time.monotonic() + PATIENCE_S
        while len(children := psutil.Process(process.pid).children()) < 2:
            assert time.monotonic() < deadline_s
        process.kill()
        process.wait()
        watch, forked = children
        psutil.wait_procs([watch], timeout=PATIENCE_S)
        assert is_gone(watch)
        assert not is_gone(forked)
        forked.kill()


def test_a_process_lives_on_without_its_watch_and_says_so():
    program = (
        "import logging; logging.basicConfig(format='%(message)s', stream=sys.stdout, force=True)\n"
        "time.sleep(600)"
    )
    with watched(program) as process:
        watch_of(process).kill()
        assert process.stdout.readline() == "nobody watches over this process any longer\n"
        assert process.poll() is None
