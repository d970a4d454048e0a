"""For all tests: no traffic but loopback, and a closing line that counts by reason what was not
checked.
"""

import atexit
import gc
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.skips import skip_line

# A name that is no folder is an id of the hub, and no test may ask the real one. Set before
# anything imports the hub's library, which reads it once; subprocesses inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"
# Every client of HTTP reads all authorities when it is made, for 50 ms of CPU; no test asks anybody
# outside, so one that has signed nothing will do. Whoever tests TLS brings an authority of its own.
os.environ["SSL_CERT_FILE"] = str(Path(__file__).parent / "fakes" / "authority_of_nobody.pem")

# An example that a busy machine makes late is not wrong.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection():
    """Modules, tests and their parameters stay to the end: two million objects that the collector
    would look at again and again, for half a second each time.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish():
    """Before other hooks import anything. A failed task that a test left behind is reported when
    it is collected, with a traceback, for which Python parses; while a module is being parsed that
    is a SystemError before Python 3.11.8 (gh-106905), and pytest would end without its report.
    """
    gc.collect()


# What is still frozen when the interpreter ends is told of as leaked by nanobind's modules; what is
# not when pytest ends is looked at ten times more by its own last collections.
atexit.register(gc.unfreeze)


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(skip_line(skipped))
