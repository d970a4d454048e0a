"""Kills this process when it has run no Python for too long: stopped, or its interpreter lock held.

A small process beside it hears a beat from a thread of this one. Serve's health checks do the same
for replicas that run, but Serve waits without limit for one that starts, and asks nothing of anyone
while its controller is down. Knows no Ray and no engine.

The other process runs this file as a script, with the standard library only.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from typing import IO, cast

logger = logging.getLogger(__name__)

LOOKS_PER_TIMEOUT = 20
_STDIN = 0


class SilenceWatch:
    """start() once; it lasts as long as this process.

    Silence is counted in looks of the other process, timeout_s / LOOKS_PER_TIMEOUT apart: what
    stands still together with this process (a paused machine, an overloaded one) counts as one.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s

    def start(self) -> None:
        """Raises OSError if no process can be started."""
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(self._timeout_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            bufsize=0,
            # Signals that a terminal sends are for this process.
            start_new_session=True,
        )
        threading.Thread(
            target=self._beat, args=(process,), name="tessera-beat", daemon=True
        ).start()

    def _beat(self, process: subprocess.Popen[bytes]) -> None:
        with process, cast(IO[bytes], process.stdin) as pipe:
            while True:
                try:
                    pipe.write(b".")
                except BrokenPipeError:
                    logger.warning("nobody watches over this process any longer")
                    return
                time.sleep(self._timeout_s / LOOKS_PER_TIMEOUT / 2)


def watch(pid: int, timeout_s: float) -> None:
    """Kill process `pid`, our parent, after timeout_s without a byte from it on standard input.

    Returns when it has ended.
    """
    num_silent = 0
    while num_silent < LOOKS_PER_TIMEOUT:
        heard, _, _ = select.select([_STDIN], [], [], timeout_s / LOOKS_PER_TIMEOUT)
        # Its end of the pipe may live on in a process that it has forked.
        if os.getppid() != pid:
            return
        if not heard:
            num_silent += 1
        elif os.read(_STDIN, select.PIPE_BUF):
            num_silent = 0
        else:
            return
    print(f"process {pid} has run no Python for {timeout_s:g} s: killed", file=sys.stderr)
    os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    watch(int(sys.argv[1]), float(sys.argv[2]))
