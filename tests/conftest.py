"""For all tests: no traffic but loopback, and a closing line that counts by reason what was not
checked.
"""

import os

from tests.skips import skip_line

# A name that is no folder is an id of the hub, and no test may ask the real one. Set before
# anything imports the hub's library, which reads it once; subprocesses inherit it.
os.environ["HF_HUB_OFFLINE"] = "1"


def pytest_terminal_summary(terminalreporter):
    skipped = terminalreporter.stats.get("skipped", [])
    terminalreporter.write_line(skip_line(skipped))
