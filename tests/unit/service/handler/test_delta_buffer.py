"""Deltas that are put together tell the same as one by one."""

import gc
import time

import pytest

from service.chat.parsed import ToolCallDelta
from service.handler.delta_buffer import DeltaBuffer
from service.handler.events import ChoiceDelta, TokenLogprob


def deltas():
    for i in range(8):
        delta = ChoiceDelta(0, f"t{i}", [i], num_output_tokens=i + 1, reasoning=f"r{i}")
        delta.logprobs = [TokenLogprob(i, b"t", -1.0, 1, ())]
        delta.tool_calls = [ToolCallDelta(i // 4, "id" if i % 4 == 0 else "", "", f"a{i}")]
        delta.finish_reason = "stop" if i == 7 else None
        yield delta


def test_the_first_goes_out_at_once_then_every_third_and_the_last_whatever_it_has():
    buffer = DeltaBuffer(3)
    sent = [delta for delta in map(buffer.add, deltas()) if delta is not None]
    assert [delta.token_ids for delta in sent] == [[0], [1, 2, 3], [4, 5, 6], [7]]
    assert [delta.num_output_tokens for delta in sent] == [1, 4, 7, 8]
    assert [delta.finish_reason for delta in sent] == [None, None, None, "stop"]


def test_nothing_of_the_parts_is_lost():
    buffer = DeltaBuffer(5)
    sent = [delta for delta in map(buffer.add, deltas()) if delta is not None]
    assert "".join(delta.text for delta in sent) == "".join(f"t{i}" for i in range(8))
    assert "".join(delta.reasoning for delta in sent) == "".join(f"r{i}" for i in range(8))
    assert [entry.token_id for delta in sent for entry in delta.logprobs] == list(range(8))
    calls = [call for delta in sent for call in delta.tool_calls]
    arguments = {index: "".join(c.arguments for c in calls if c.index == index) for index in (0, 1)}
    assert arguments == {0: "a0a1a2a3", 1: "a4a5a6a7"}
    assert [call.index for call in calls if call.id] == [0, 1]


def test_a_delta_has_one_part_of_a_call_at_most():
    buffer = DeltaBuffer(100)
    buffer.add(ChoiceDelta(0, "", [9]))
    (merged,) = [delta for delta in map(buffer.add, deltas()) if delta is not None]
    assert [call.index for call in merged.tool_calls] == [0, 1]


@pytest.fixture
def without_collections():
    """A collection looks at all that a process holds: the more of it, the longer."""
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("without_collections")
def test_a_token_costs_the_same_however_many_are_held():
    def add_s(num_tokens):
        buffer = DeltaBuffer(1 << 30)
        started_s = time.thread_time()
        for i in range(num_tokens):
            buffer.add(ChoiceDelta(0, "word", [i], num_output_tokens=i + 1))
        last = buffer.add(ChoiceDelta(0, "", [], finish_reason="length"))
        assert last.token_ids == list(range(1, num_tokens))
        assert len(last.text) == 4 * (num_tokens - 1)
        return (time.thread_time() - started_s) / num_tokens

    def shortest_s(num_tokens):
        """Others may have had the machine's caches."""
        return min(add_s(num_tokens) for _ in range(3))

    assert shortest_s(64_000) < 8 * shortest_s(2_000)


def test_lists_of_others_do_not_grow():
    buffer = DeltaBuffer(3)
    given = [ChoiceDelta(0, "a", [i]) for i in range(4)]
    sent = [delta for delta in map(buffer.add, given) if delta is not None]
    assert [delta.token_ids for delta in sent] == [[0], [1, 2, 3]]
    assert [delta.token_ids for delta in given] == [[0], [1], [2], [3]]
