"""Events come out whole, however the bytes are cut."""

from hypothesis import given
from hypothesis import strategies as st

from service.bench.sse import SseParser

STREAM = (
    b'data: {"a": 1}\n\n'
    b": a comment\n\n"
    b'event: x\r\nid: 7\r\ndata:{"b": 2}\r\n\r\n'
    b"data: first\ndata:  second\n\n"
    b"data: [DONE]\n\n"
    b"data: unfinished"
)
EVENTS = [b'{"a": 1}', b'{"b": 2}', b"first\n second", b"[DONE]"]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_cut_gives_the_same_events(cuts: list[int]) -> None:
    parser = SseParser()
    bounds = [0, *sorted(cuts), len(STREAM)]
    found = [
        event
        for start, end in zip(bounds, bounds[1:], strict=False)
        for event in parser.feed(STREAM[start:end])
    ]
    assert found == EVENTS
