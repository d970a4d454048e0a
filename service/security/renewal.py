"""Loads again what files hold when they change: keys and certificates are renewed under a service.

Knows neither keys nor certificates.
"""

import asyncio
import hashlib
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from workers.errors import ConfigError

RENEWAL_INTERVAL_S = 10.0
"""Kubernetes itself takes about a minute to write a changed secret into a pod."""

T = TypeVar("T")
logger = logging.getLogger(__name__)


class Renewable(Generic[T]):
    """What is loaded from `files`. setting: what messages call it.

    Make it before the files are read for the first time: what changes from then on counts. load:
    may raise ConfigError or OSError, and then what is in use stays. It runs in a thread, and what
    uses its result where renew() is called.
    """

    def __init__(self, setting: str, files: Sequence[Path], load: Callable[[], T]) -> None:
        self._setting = setting
        self._files = tuple(files)
        self._load = load
        self._use: Callable[[T], None] | None = None
        self._seen = self._told = self._digests()

    def into(self, use: Callable[[T], None]) -> "Renewable[T]":
        """Give what is loaded to `use`."""
        self._use = use
        return self

    async def renew(self) -> None:
        """Load if a file has changed since it was loaded. A failure is logged once a change, and
        tried again each time: it may have been none of the file's."""
        # Taken before loading: what changes meanwhile is seen the next time.
        digests = await asyncio.to_thread(self._digests)
        if self._use is None:
            return
        if digests == self._seen:
            self._told = digests
            return
        try:
            value = await asyncio.to_thread(self._load)
        except (ConfigError, OSError) as error:
            self._tell(digests, error)
            return
        self._seen = self._told = digests
        self._use(value)
        logger.info("%s has been renewed", self._setting)

    def _tell(self, digests: tuple[bytes, ...], error: Exception) -> None:
        if digests != self._told:
            self._told = digests
            logger.error(
                "%s: the new files are of no use, the old ones hold: %s", self._setting, error
            )

    def _digests(self) -> tuple[bytes, ...]:
        """By content: of a mounted secret neither times nor inodes say whether it changed."""
        return tuple(_digest(file) for file in self._files)


async def keep_renewed(
    renewables: Iterable["Renewable[Any]"], interval_s: float = RENEWAL_INTERVAL_S
) -> None:
    """Until cancelled."""
    kept = tuple(renewables)
    while True:
        await asyncio.sleep(interval_s)
        for renewable in kept:
            await renewable.renew()


def _digest(file: Path) -> bytes:
    """Empty for a file that cannot be read: load() says why."""
    try:
        return hashlib.sha256(file.read_bytes()).digest()
    except OSError:
        return b""
