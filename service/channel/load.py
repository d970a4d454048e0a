"""What an ingress knows of one replica's load: its last report, and how old its last step is.

Pure accounting with an injected clock; knows no sockets.
"""

import time
from collections.abc import Callable

from service.channel.messages import ReplicaLoad
from workers.engine.protocol import EngineStats


class LoadView:
    """The replica's last report. What was sent since is not part of it."""

    def __init__(self, stall_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._stall_timeout_s = stall_timeout_s
        self._clock = clock
        self.clear()

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed."""
        return self._stats.queued_tokens

    @property
    def running_tokens(self) -> int:
        return self._stats.running_tokens

    @property
    def written_tokens(self) -> int:
        """Tokens that the replica has ever written to its KV memory."""
        return self._stats.num_written_tokens

    @property
    def evicted_ordinary(self) -> int:
        """Prefixes that the replica last used with no more written_tokens than these are gone."""
        return self._stats.evicted_ordinary

    @property
    def evicted_shared(self) -> int:
        """The same for what requests went on from in different ways."""
        return self._stats.evicted_shared

    @property
    def num_waiting(self) -> int:
        return self._stats.num_waiting

    @property
    def seen_sequence(self) -> int:
        """Of the last Submit message that the report includes."""
        return self._seen_sequence

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    @property
    def sleep_level(self) -> int:
        """0 for awake."""
        return self._stats.sleep_level

    @property
    def is_stalled(self) -> bool:
        """True when the replica has work but has finished no step for the stall timeout."""
        has_work = self._stats.num_running + self._stats.num_waiting > 0
        return has_work and self._clock() - self._progress_s > self._stall_timeout_s

    def clear(self) -> None:
        """Forget everything: the connection is new."""
        self._stats = EngineStats()
        self._is_draining = False
        self._seen_sequence = 0
        self._progress_s = self._clock()

    def update(self, load: ReplicaLoad) -> None:
        had_work = self._stats.num_running + self._stats.num_waiting > 0
        if load.stats.num_steps != self._stats.num_steps or not had_work:
            self._progress_s = self._clock()
        self._stats = load.stats
        self._is_draining = load.is_draining
        self._seen_sequence = load.seen_sequence
