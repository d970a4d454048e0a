"""pytest plugin of a mutation run: quick tests first, no search for a smaller counterexample."""

import gc
import json
from pathlib import Path

from hypothesis import Phase, settings

# mutmut's, in the folder that it runs tests in; not there yet while it measures them.
STATS = Path("mutmut-stats.json")

settings.register_profile(
    "mutation", phases=(Phase.explicit, Phase.generate), database=None, derandomize=True
)


def pytest_configure():
    # Each mutant has a process of its own, forked with all that tests import. pytest collects
    # garbage where it ends; without this it would go through all of that, longer than most tests.
    gc.freeze()


def pytest_collection_modifyitems(items):
    if STATS.exists():
        durations_s = json.loads(STATS.read_text())["duration_by_test"]
        items.sort(key=lambda item: durations_s.get(item.nodeid, 0.0))
