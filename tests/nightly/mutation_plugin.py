"""pytest plugin of a mutation run: which tests reach a function, in which order they run.

mutmut learns the first by running all tests once, with STATS not there yet. It credits what a
fixture of a module calls to the first of its tests only, and sees nothing of processes that tests
start; both are made good here: a function that no test calls in its own process may be called in
another one by any test.
"""

import gc
import json
from pathlib import Path

import pytest
from hypothesis import Phase, settings
from mutmut.state import state

# In the folder that mutmut runs tests in, and above it: names of functions.
STATS = Path("mutmut-stats.json")
JUDGED = Path("../judged.json")

settings.register_profile(
    "mutation",
    phases=(Phase.explicit, Phase.generate),
    database=None,
    derandomize=True,
    deadline=None,
)


class FixtureCalls:
    """What fixtures call that several tests share counts for all of these."""

    def __init__(self):
        self._called = {}

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef):
        before = state()._stats.copy()
        state()._stats.clear()
        result = yield
        if fixturedef.scope != "function":
            self._called[fixturedef.baseid, fixturedef.argname] = state()._stats.copy()
        state()._stats.update(before)
        return result

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item):
        for (baseid, name), functions in self._called.items():
            if name in item.fixturenames and item.nodeid.startswith(baseid):
                state()._stats.update(functions)

    def pytest_sessionfinish(self, session):
        reached = state().tests_by_mangled_function_name
        everywhere = {item.nodeid for item in session.items}
        for function in json.loads(JUDGED.read_text()):
            if not reached[function]:
                reached[function] = everywhere


def pytest_configure(config):
    # Each mutant has a process of its own, forked with all that tests import. pytest collects
    # garbage where it ends; without this it would go through all of that, longer than most tests.
    gc.freeze()
    if not STATS.exists():
        config.pluginmanager.register(FixtureCalls())


def pytest_collection_modifyitems(items):
    """Quick tests first."""
    if STATS.exists():
        durations_s = json.loads(STATS.read_text())["duration_by_test"]
        items.sort(key=lambda item: durations_s.get(item.nodeid, 0.0))
