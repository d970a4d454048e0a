"""A model's folder of adapters, looked at again and again by one of all ingresses."""

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

from service.adapters.control import AdapterControl
from service.adapters.folder_reader import FolderContents, FolderReader
from service.adapters.folder_words import folder_words
from service.adapters.lease import FolderLease
from service.adapters.table import AdapterEntry, AdapterTable
from service.errors import ApiError
from workers.adapters.ref import AdapterInfo

logger = logging.getLogger(__name__)

_LEASE_INTERVALS = 3
_LEASE_S = 5.0
"""An ingress has so much time more to ask for its lease again."""
_EMPTY = "it is empty, and whether its file system is there nobody on this node has seen"


class FolderBoardClient(Protocol):
    """The registry's board, from afar. Raises ApiError where it does not answer."""

    async def lease_folder(self, model: str, for_s: float, device: int | None) -> FolderLease:
        """device: see FolderClaim."""
        ...

    async def set_from_folder(
        self, model: str, entries: Sequence[AdapterEntry], known: AdapterTable
    ) -> AdapterTable:
        """known: the table by which entries were chosen; names on which it is behind stay."""
        ...


class RefusalCounter(Protocol):
    def on_refusal(self) -> None: ...


class FolderWatch:
    """What is in the folder is served, what has gone is not; of one model in one ingress."""

    def __init__(
        self,
        model: str,
        reader: FolderReader,
        control: AdapterControl,
        board: FolderBoardClient,
        metrics: RefusalCounter,
        interval_s: float,
    ) -> None:
        self._model = model
        self._reader = reader
        self._control = control
        self._board = board
        self._metrics = metrics
        self._interval_s = interval_s
        self._left_out: Mapping[str, str] = {}
        self._trouble = ""

    async def run(self) -> None:
        """For ever."""
        while True:
            has_more = False
            try:
                has_more = await self.turn()
            except ApiError as error:
                logger.warning("folder of adapters of %s: %s", self._model, error)
            except Exception:
                # It looks again: a process that serves does not end with what it watches.
                logger.exception("folder of adapters of %s", self._model)
            if not has_more:
                await asyncio.sleep(self._interval_s)

    async def turn(self) -> bool:
        """Look once; returns whether there is more to read at once. Raises ApiError where the
        registry does not answer."""
        for_s = _LEASE_S + _LEASE_INTERVALS * self._interval_s
        lease = await self._board.lease_folder(self._model, for_s, self._reader.device)
        if not lease.has_it:
            self._reader.forget()
            self._left_out = {}
            return False
        contents = await self._read(lease.device)
        if contents is None:
            return False
        self._tell_refused(contents)
        await self._say(contents)
        return not contents.is_whole

    async def _say(self, contents: FolderContents) -> None:
        known = self._control.table
        # In a thread: a folder may have thousands. Shelves change as a whole, tables never.
        words = await asyncio.to_thread(
            folder_words, self._model, contents, self._control.shelves, known
        )
        self._tell_left_out(words.left_out)
        self._tell_trouble(_EMPTY if words.is_doubted else "")
        if words.entries:
            table = await self._board.set_from_folder(self._model, words.entries, known)
            await self._control.take(table)

    async def _read(self, device: int | None) -> FolderContents | None:
        info = self._info()
        if info is None:
            return None
        try:
            contents = await asyncio.to_thread(self._reader.read, info, device)
        except OSError as error:
            self._tell_trouble(str(error.strerror))
            return None
        if contents is None:
            self._tell_trouble("")
        return contents

    def _info(self) -> AdapterInfo | None:
        """None before a replica was seen, which says what fits."""
        try:
            return self._control.info_of(self._model)
        except ApiError:
            return None

    def _tell_trouble(self, trouble: str) -> None:
        if trouble and trouble != self._trouble:
            logger.warning(
                "engine.lora_folder of %s cannot be read, what is served stays: %s",
                self._model,
                trouble,
            )
        elif self._trouble and not trouble:
            logger.info("engine.lora_folder of %s can be read again", self._model)
        self._trouble = trouble

    def _tell_refused(self, contents: FolderContents) -> None:
        for name, refusal in contents.refused.items():
            self._metrics.on_refusal()
            reason = "\n".join(filter(None, (refusal.reason, refusal.trace)))
            logger.warning(
                "engine.lora_folder of %s: %r cannot be served: %s", self._model, name, reason
            )

    def _tell_left_out(self, left_out: Mapping[str, str]) -> None:
        for name, reason in left_out.items():
            if self._left_out.get(name) != reason:
                logger.warning(
                    "engine.lora_folder of %s: %r is left out: %s", self._model, name, reason
                )
        self._left_out = left_out
