"""How many files, and so connections, this process may have open."""

import logging
import resource

NUM_OTHER_FILES = 512
"""Listeners, channels to engines, Ray's own connections, logs."""

logger = logging.getLogger(__name__)


def allow_connections(num_wanted: int) -> int:
    """Raise this process's limit for so many connections; returns how many there is room for.

    Fewer than wanted, which is logged, where the system allows no more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = num_wanted + NUM_OTHER_FILES
    if soft != resource.RLIM_INFINITY and soft < wanted:
        soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return num_wanted
    room = max(soft - NUM_OTHER_FILES, soft // 2)
    logger.warning(
        "this process may open %d files (ulimit -Hn), so it takes %d connections instead of the "
        "%d of http.connections and grpc.connections",
        soft,
        room,
        num_wanted,
    )
    return room
