"""The first process of a process namespace: runs one command, and with it everything ends.

    python3 first_process.py COMMAND...

The kernel kills all that is left in a namespace when its first process ends. Until then somebody
has to reap orphans, and to hand on the signals that the kernel keeps from a first process. The
command has a session of its own, so that a signal to the group of isolated.sh reaches it once.
Exit status: the command's, 128 + n if signal n ended it.
"""

import os
import signal
import subprocess
import sys

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def main() -> int:
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    command = subprocess.Popen(
        sys.argv[1:],
        start_new_session=True,
        preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED),
    )
    for number in FORWARDED:
        signal.signal(number, lambda received, _: command.send_signal(received))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    while True:
        # Orphans are reaped here, too; the command's end is the one that counts.
        pid, status = os.wait()
        if pid == command.pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
