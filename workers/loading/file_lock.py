"""Advisory locks between the processes of a node. A process that dies lets go of its locks.

Knows no cache. Linux' flock on a local file system; network file systems may not honour it.
"""

import fcntl
import os
import weakref
from pathlib import Path


class FileLock:
    """An flock of its own on a file, which is made if it is not there and never removed.

    Free at first. Gives its lock back when it is closed or no longer referred to. Raises OSError
    where the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        self._close = weakref.finalize(self, os.close, self._descriptor)

    def share(self) -> None:
        """Hold it together with others that share it; waits for one that holds it alone."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def try_alone(self) -> bool:
        """Hold it with nobody beside, if that can be had at once; whether it could."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def close(self) -> None:
        """Give the lock back. May be called again."""
        self._close()
