"""GPUs that no other test of this machine computes on meanwhile.

Ranks that wait for each other on the device take turns with other processes there, some
milliseconds at every meeting.
"""

import fcntl
import os
import tempfile
import time
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import torch

PAIR_POLL_S = 0.1


@contextmanager
def own_gpus(num_gpus):
    """CUDA_VISIBLE_DEVICES of num_gpus GPUs, in pairs."""
    num_pairs = -(-num_gpus // 2)
    names = visible_gpus()
    while True:
        with ExitStack() as stack:
            free = (pair for pair in range(len(names) // 2) if _lock(pair, stack))
            pairs = list(islice(free, num_pairs))
            if len(pairs) == num_pairs:
                yield ",".join(name for pair in pairs for name in names[2 * pair : 2 * pair + 2])
                return
        time.sleep(PAIR_POLL_S)


def visible_gpus():
    """CUDA's names of the GPUs that this process sees."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]


def _lock(pair, stack):
    """Whether the pair is this test's until the stack ends."""
    path = Path(tempfile.gettempdir()) / f"tessera-test-gpus-{os.getuid()}-{pair}.lock"
    lock = stack.enter_context(path.open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
