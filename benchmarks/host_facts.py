"""What this host is, as far as it matters to threads: processors, their limits, other users."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

_STOLEN_FIELD = 8


def stolen_s() -> float:
    """By the machine underneath from all processors, since the start."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return int(fields[_STOLEN_FIELD]) / os.sysconf("SC_CLK_TCK")


def host_lines() -> Iterator[str]:
    num_own = len(os.sched_getaffinity(0))
    yield f"processors: {os.cpu_count()}, {num_own} of them ours; {platform.platform()}"
    yield f"Python {platform.python_version()}, {len(os.listdir('/proc/self/task'))} threads"
    wanted = ("model name", "siblings", "cpu cores", "cpu MHz", "cache size")
    text = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    for line in text.splitlines():
        if line.startswith(wanted):
            yield " ".join(line.split())
    for path in ("/sys/fs/cgroup/cpu.max", "/sys/fs/cgroup/cpu.stat", "/proc/loadavg"):
        try:
            yield f"{path}: {' '.join(Path(path).read_text().split())}"
        except OSError:
            yield f"{path}: none"
    yield f"stolen since the start: {stolen_s():.2f} s"
