"""Loading and unloading while serving: an operator's calls, checked here, told to all ingresses."""

import asyncio
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from service.adapters.paths import UNTELLABLE, is_tellable
from service.adapters.shelf import AdapterShelf
from service.adapters.table import AdapterEntry, AdapterTable
from service.errors import ApiError, ApiErrorCode
from workers.adapters.folder import adapter_at
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.errors import AdapterError

NAME_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._/-]{0,127}$"


class AdapterBoardClient(Protocol):
    """The registry's board, from afar. Raises ApiError where it does not answer."""

    async def set(
        self, entry: AdapterEntry, known: AdapterTable, action: str, by: str
    ) -> AdapterTable:
        """known: the caller's own table. action, by: for the audit log."""
        ...

    async def restore(self, table: AdapterTable) -> None: ...


AdapterInfoOf = Callable[[str], AdapterInfo | None]
"""What a model of that name takes; None: no adapters. Raises ApiError before a replica was seen."""

ReadAdapter = Callable[[str, Path, AdapterInfo], AdapterRef]


class AdapterControl:
    """Of one ingress. shelves: by model."""

    def __init__(
        self,
        shelves: Mapping[str, AdapterShelf],
        info_of: AdapterInfoOf,
        board: AdapterBoardClient,
        read: ReadAdapter = adapter_at,
    ) -> None:
        self._shelves = shelves
        self._info_of = info_of
        self._board = board
        self._read = read
        self._table = AdapterTable()

    @property
    def table(self) -> AdapterTable:
        """What this ingress was told last."""
        return self._table

    @property
    def shelves(self) -> Mapping[str, AdapterShelf]:
        return self._shelves

    def info_of(self, model: str) -> AdapterInfo | None:
        """See AdapterInfoOf."""
        return self._info_of(model)

    async def take(self, table: AdapterTable) -> None:
        """What the registry tells. One that knows less than this ingress has lost its memory."""
        if table.version >= self._table.version:
            self._table = table
            for shelf in self._shelves.values():
                shelf.take(table)
        else:
            await self._board.restore(self._table)

    async def load(self, model: str, name: str, folder: str, by: str, *, in_place: bool) -> None:
        """Serve the adapter in a folder under a name. model: "" is the only one. in_place: where
        the name has an adapter, this one takes its place; requests under way keep theirs.

        Raises ApiError.
        """
        shelf = self._shelf_of(model)
        self._check_name(shelf, name)
        if shelf.find(name) is not None and not in_place:
            raise _invalid(
                f"the adapter {name!r} is loaded already; load_inplace replaces it", "lora_name"
            )
        info = self._info_of(shelf.model)
        if info is None:
            raise _invalid(f"the model {shelf.model!r} takes no adapters (engine.max_loras)", None)
        try:
            adapter = await asyncio.to_thread(self._read, name, Path(folder), info)
        except AdapterError as error:
            raise _invalid(
                f"the adapter {name!r} cannot be served: {error}", "lora_path"
            ) from error
        if not is_tellable(adapter.folder):
            raise _invalid(f"the adapter {name!r} cannot be served: {UNTELLABLE}", "lora_path")
        await self._set(AdapterEntry(shelf.model, name, adapter), f"load_lora_adapter {name}", by)

    async def unload(self, model: str, name: str, by: str) -> None:
        """Serve it no longer, one of the folder until its files hold something else. Requests under
        way go on. Raises ApiError, also for unknown names."""
        found = [shelf for shelf in self._shelves.values() if shelf.find(name) is not None]
        shelves = [shelf for shelf in found if model in ("", shelf.model)]
        if not shelves:
            raise ApiError(
                ApiErrorCode.MODEL_NOT_FOUND, f"no adapter {name[:128]!r} is loaded", "lora_name"
            )
        (shelf, *_) = shelves
        said = self._table.find(shelf.model, name)
        folder_key = "" if said is None else said.folder_key
        entry = AdapterEntry(shelf.model, name, None, shelf.is_configured(name), folder_key)
        await self._set(entry, f"unload_lora_adapter {name}", by)

    async def _set(self, entry: AdapterEntry, action: str, by: str) -> None:
        await self.take(await self._board.set(entry, self._table, action, by))

    def _shelf_of(self, model: str) -> AdapterShelf:
        if not model:
            if len(self._shelves) > 1:
                raise _invalid(
                    f"several models are served; choose one of {', '.join(self._shelves)}", "model"
                )
            return next(iter(self._shelves.values()))
        if model not in self._shelves:
            message = f"the model {model[:128]!r} does not exist"
            raise ApiError(ApiErrorCode.MODEL_NOT_FOUND, message, "model")
        return self._shelves[model]

    def _check_name(self, shelf: AdapterShelf, name: str) -> None:
        if not re.fullmatch(NAME_PATTERN, name):
            raise _invalid("a name is 1 to 128 letters, digits, dots, _, / or -", "lora_name")
        if name in self._shelves:
            raise _invalid(f"a model is called {name!r}", "lora_name")
        owners = [one.model for one in self._shelves.values() if one.find(name) is not None]
        if owners not in ([], [shelf.model]):
            raise _invalid(f"{owners[0]!r} has an adapter {name!r}", "lora_name")


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(ApiErrorCode.INVALID_REQUEST, message, param)
