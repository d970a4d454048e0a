"""What a run did not check: its skips in one line, by reason. Knows pytest's reports only."""

import re
from collections import Counter
from collections.abc import Iterable

from _pytest.reports import BaseReport

# Reasons that name the test's own surroundings say the same thing about many places.
_PATH = re.compile(r"\S*/\S+")


def skip_line(reports: Iterable[BaseReport]) -> str:
    """ "skipped: 803 no NVIDIA GPU, 2 no promtool (make tools)", most first; "skipped: 0"."""
    reasons = Counter(reason_of(report) for report in reports)
    if not reasons:
        return "skipped: 0"
    return "skipped: " + ", ".join(f"{count} {reason}" for reason, count in reasons.most_common())


def reason_of(report: BaseReport) -> str:
    """The reason as the test gave it, without paths: they would make one line of each."""
    longrepr = report.longrepr
    text = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
    return _PATH.sub("a path", text.removeprefix("Skipped: ")).strip() or "no reason given"
