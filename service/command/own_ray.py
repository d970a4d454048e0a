"""A Ray on this machine that ends with this process, begun again where it was late.

Ray 2.60's raylet gives the agents beside it, which are Python and import for seconds, 15 s to say
where they listen, and ends without them (ray-project/ray#65983). On a busy machine, or from a disk
that nobody has read from, that is too little; what one start has read makes the next one quicker.
"""

import logging
from typing import Any

import psutil

_MAX_STARTS = 3
_END_TIMEOUT_S = 10.0

logger = logging.getLogger(__name__)


def start_own_ray(options: dict[str, Any]) -> None:
    """ray.init(**options), up to three times. Of a start that failed no process is left.

    Raises ValueError for options that Ray refuses, at once, and RuntimeError if it did not start.
    """
    import ray

    this_process = psutil.Process()
    others = set(this_process.children())
    for number in range(1, _MAX_STARTS + 1):
        try:
            ray.init(**options)
        except ValueError:
            raise
        # What Ray raises for a late start has no class of its own.
        except Exception as error:
            # Where it failed behind its connection, the next one would be told of that alone.
            ray.shutdown()
            _end_children(this_process, others)
            if number == _MAX_STARTS:
                raise RuntimeError(f"did not start, {number} times: {error}") from error
            logger.warning("Ray did not start, trying again: %s", error)
        else:
            return


def _end_children(parent: psutil.Process, others: set[psutil.Process]) -> None:
    """All children but others, and theirs. Ray forgets them when its start fails."""
    own = [child for child in parent.children() if child not in others]
    doomed = [*own, *(grandchild for child in own for grandchild in _descendants(child))]
    for process in doomed:
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(doomed, _END_TIMEOUT_S)


def _descendants(process: psutil.Process) -> list[psutil.Process]:
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []
