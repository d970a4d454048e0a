"""What a request follows: items of stored responses, and items that it refers to."""

import re
from collections.abc import Sequence

from service.api.body import parse_json
from service.api.responses.draft import response_id_of
from service.api.responses.items import Item, ItemReference
from service.api.responses.requests import ResponsesRequest, StoredItems
from service.errors import ApiError, ApiErrorCode
from service.limits import Limits
from service.response_store.records import ResponseName, State
from service.response_store.store import ResponseStore

_ITEM_ID = re.compile(r"[a-z]{1,8}_([0-9a-f]{16,64})_i?[0-9]{1,8}")
_PREVIOUS = "previous_response_id"


class Conversations:
    """Those of one caller. Every call may raise ApiError."""

    def __init__(self, store: ResponseStore, tenant: str, limits: Limits) -> None:
        self._store = store
        self._tenant = tenant
        self._limits = limits

    async def before(self, request: ResponsesRequest) -> list[Item]:
        """Items of what the request follows, in order."""
        if request.previous_response_id is None:
            return []
        name = ResponseName(self._tenant, request.previous_response_id)
        parts = await self._store.conversation(name, self._limits.max_body_bytes)
        if parts is None:
            raise await self._no_conversation(name)
        return await self._parse(parts)

    async def resolved(self, items: Sequence[Item]) -> list[Item]:
        """The items with what they refer to in the place of references."""
        wanted = [item.id for item in items if isinstance(item, ItemReference)]
        if not wanted:
            return list(items)
        found = await self._find(wanted)
        return [found[item.id] if isinstance(item, ItemReference) else item for item in items]

    async def _find(self, item_ids: list[str]) -> dict[str, Item]:
        found: dict[str, Item] = {}
        num_bytes = 0
        for item_id in item_ids:
            if item_id in found:
                continue
            matched = _ITEM_ID.fullmatch(item_id)
            if matched is not None:
                name = ResponseName(self._tenant, response_id_of(matched[1]))
                stored = await self._store.get(name)
                parts = [] if stored is None else [stored.input, stored.output]
                num_bytes += sum(map(len, parts))
                self._check_size(num_bytes)
                found |= {item.id: item for item in await self._parse(parts) if item.id}
            if item_id not in found:
                message = f"there is no stored item {item_id[:128]!r}"
                raise ApiError(ApiErrorCode.RESPONSE_NOT_FOUND, message, "input")
        return found

    async def _parse(self, parts: list[bytes]) -> list[Item]:
        inner = b",".join(part[1:-1] for part in parts if len(part) > len(b"[]"))
        stored = await parse_json(b'{"items":[' + inner + b"]}", StoredItems, self._limits)
        return stored.items

    async def _no_conversation(self, name: ResponseName) -> ApiError:
        stored = await self._store.get(name)
        if stored is None:
            return not_found(name.response_id, _PREVIOUS)
        if stored.state is not State.ENDED:
            message = "the previous response has not ended"
            return ApiError(ApiErrorCode.INVALID_REQUEST, message, _PREVIOUS)
        return self._too_large()

    def _check_size(self, num_bytes: int) -> None:
        if num_bytes > self._limits.max_body_bytes:
            raise self._too_large()

    def _too_large(self) -> ApiError:
        message = f"what it follows has more than {self._limits.max_body_bytes} bytes"
        return ApiError(ApiErrorCode.LIMIT_EXCEEDED, message, "input")


def not_found(response_id: str, param: str) -> ApiError:
    message = f"there is no stored response {response_id[:128]!r}"
    return ApiError(ApiErrorCode.RESPONSE_NOT_FOUND, message, param)
