"""A page of a stored response's input items."""

from collections.abc import Iterator

import msgspec
from msgspec import Raw, Struct

from service.api.openai.json_parts import JsonParts
from service.api.responses.queries import ItemsQuery
from service.api.responses.wire import ItemList
from service.errors import ApiError, ApiErrorCode


class _Named(Struct):
    id: str


def item_page(items: bytes, query: ItemsQuery) -> Iterator[bytes]:
    """The page's JSON, in pieces. items: a JSON array of objects. Raises ApiError where there is no
    item that it should begin after."""
    found: list[Raw] = msgspec.json.decode(items, type=list[Raw])
    ids = [item.id for item in msgspec.json.decode(items, type=list[_Named])]
    if query.order == "desc":
        found.reverse()
        ids.reverse()
    start = 0
    if query.after is not None:
        if query.after not in ids:
            message = "after names no input item of this response"
            raise ApiError(ApiErrorCode.INVALID_REQUEST, message, "after")
        start = ids.index(query.after) + 1
    end = start + query.limit
    shown, shown_ids = found[start:end], ids[start:end]
    parts = JsonParts()
    first, last = (shown_ids[0], shown_ids[-1]) if shown_ids else (None, None)
    data = [parts.made([bytes(item)]) for item in shown]
    return parts.pieces(ItemList(data, first, last, end < len(found)))
