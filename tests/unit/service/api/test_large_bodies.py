"""Large bodies are read, refused by their shape, and never stop the event loop for long."""

import asyncio
import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api.body import MAX_INLINE_BYTES, parse_body
from service.api.json_shape import JsonShape, measure
from service.api.openai.completions import CompletionRequest
from service.errors import ApiError
from tests.fakes.random_requests import JSON_VALUES
from tests.fakes.text import ANSWER

HEADERS = {"content-type": "application/json"}
SIZE = 8 << 20
NESTED = b'{"model":"tiny","prompt":[%s]}' % b",".join([b"[1]"] * (SIZE // 4 - 50))
NAMES = b'{"model":"tiny","prompt":"a",%s}' % b",".join(b'"k%d":1' % i for i in range(SIZE // 13))


def shape_of(value):
    """The shape by walking what a parser makes of it."""
    if isinstance(value, dict):
        parts = [shape_of(part) for part in value.values()]
        own = JsonShape(max(0, len(value) - 1), 1 + len(value))
    elif isinstance(value, list):
        parts = [shape_of(part) for part in value]
        own = JsonShape(max(0, len(value) - 1), 1)
    else:
        return JsonShape(0, 0)
    return JsonShape(
        own.num_items + sum(part.num_items for part in parts),
        own.num_nodes + sum(part.num_nodes for part in parts),
    )


@given(value=JSON_VALUES)
def test_the_shape_is_that_of_what_a_parser_makes(value):
    assert measure(json.dumps(value).encode()) == shape_of(value)


@given(text=st.text(alphabet='\\",[{:x', max_size=40))
def test_nothing_in_a_string_counts(text):
    assert measure(json.dumps([text, 1]).encode()) == JsonShape(1, 1)


@pytest.mark.parametrize("filler", ['\\"', "\\\\", "x", '\\\\"', ",", "é"])
@pytest.mark.parametrize("shift", range(4))
def test_strings_may_cross_pieces_anywhere(filler, shift):
    text = "y" * shift + filler * (200_000 // len(filler)) + "[,:{"
    assert measure(json.dumps([text, [text]]).encode()) == JsonShape(1, 2)
    assert measure(b"") == JsonShape(0, 0)


async def stall_while(work):
    """What `work` returns, and the longest time that the event loop did not turn meanwhile."""
    longest_s = 0.0

    async def tick():
        nonlocal longest_s
        while True:
            before_s = time.monotonic()
            await asyncio.sleep(0.001)
            longest_s = max(longest_s, time.monotonic() - before_s)

    ticker = asyncio.create_task(tick())
    await asyncio.sleep(0.01)
    result = await work
    ticker.cancel()
    return result, longest_s


@pytest.mark.asyncio
@pytest.mark.parametrize("body", [NESTED, NAMES], ids=["nested", "names"])
async def test_a_body_of_many_values_stalls_nobody(client, body):
    started_s = time.monotonic()
    with pytest.raises(ApiError):
        # What it would take on the event loop.
        parse_body(body.replace(b'"prompt"', b'"unknown"'), CompletionRequest)
    parse_s = time.monotonic() - started_s
    stalls_s = []
    for _ in range(5):  # others may have had the cores: what is ours comes every time
        work = client.post("/v1/completions", content=body, headers=HEADERS)
        response, stall_s = await stall_while(work)
        assert response.json()["error"]["code"] == "limit_exceeded"
        stalls_s.append(stall_s)
        if stall_s < parse_s / 4:
            break
    print(f"loop stalled {stalls_s} s; parsing it takes {parse_s} s")
    assert min(stalls_s) < parse_s / 4


@pytest.mark.asyncio
@pytest.mark.parametrize("size", [MAX_INLINE_BYTES - 200, MAX_INLINE_BYTES + 200, 1 << 20])
async def test_a_large_body_gives_what_a_small_one_gives(client, size):
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 50, "user": "x" * size}
    response = await client.post("/v1/completions", json=body)
    assert response.json()["choices"][0]["text"] == ANSWER
    response = await client.post("/v1/completions", json=body | {"nonsense": 1})
    assert response.json()["error"]["code"] == "unknown_parameter"
    response = await client.post("/v1/completions", content=b"[" * size, headers=HEADERS)
    assert response.status_code == 400
