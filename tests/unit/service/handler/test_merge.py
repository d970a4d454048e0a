"""Several sources as one: all of their items, one error, and all of them closed at the end."""

import asyncio

import pytest

from service.handler.merge import merge

pytestmark = pytest.mark.asyncio


class Source:
    """Counts up to num, then fails if it is to. Takes a moment to close."""

    def __init__(self, name, num, error=None):
        self.name, self.num, self.error = name, num, error
        self.num_given, self.is_closed = 0, False

    async def items(self):
        try:
            for number in range(self.num):
                self.num_given += 1
                yield self.name, number
                await asyncio.sleep(0)
            if self.error is not None:
                raise self.error
        finally:
            await asyncio.sleep(0.01)
            self.is_closed = True


async def test_all_items_come_each_sources_own_in_order():
    sources = [Source("a", 30), Source("b", 5), Source("c", 0)]
    found = [item async for item in merge([source.items() for source in sources])]
    for source in sources:
        own = [number for name, number in found if name == source.name]
        assert own == list(range(source.num))
        assert source.is_closed
    assert len(found) == 35


async def test_the_first_error_ends_it_and_every_source_is_closed_then():
    failing, endless = Source("a", 2, KeyError("first")), Source("b", 10**9)
    found = []

    async def read():
        async for item in merge([failing.items(), endless.items()]):
            found.append(item)

    with pytest.raises(KeyError, match="first"):
        await read()
    assert [item for item in found if item[0] == "a"] == [("a", 0), ("a", 1)]
    assert failing.is_closed
    assert endless.is_closed


async def test_whoever_stops_reading_has_closed_every_source_and_few_items_were_made():
    sources = [Source(name, 10**9) for name in "ab"]
    merged = merge([source.items() for source in sources])
    await anext(merged)
    for _ in range(50):
        await asyncio.sleep(0)
    assert max(source.num_given for source in sources) <= 10
    await merged.aclose()
    assert all(source.is_closed for source in sources)
