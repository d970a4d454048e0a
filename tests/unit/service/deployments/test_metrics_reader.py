"""The exporter's actor is asked once for many clients, and its silence is a typed error."""

import asyncio

import msgspec
import pytest
import ray

from service.deployments import metrics_reader
from service.deployments.metrics_reader import KEEP_S, ActorMetricsReader
from service.errors import ApiError, ApiErrorCode
from service.observability.live import LiveState

pytestmark = pytest.mark.asyncio


class Exporter:
    """A handle of an actor whose methods answer with what `answer` returns."""

    def __init__(self, answer):
        self.num_calls = 0
        self._answer = answer
        self.text = self.live = self

    def remote(self):
        self.num_calls += 1
        return self._answer()


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


async def later(answer):
    await asyncio.sleep(0.01)
    return answer


async def test_many_who_ask_at_once_cost_one_question_and_later_ones_another(monkeypatch) -> None:
    monkeypatch.setattr(metrics_reader, "TIMEOUT_S", 60.0)
    clock, exporter = Clock(), Exporter(lambda: later(b"text"))
    reader = ActorMetricsReader(exporter, clock)
    assert await asyncio.gather(*(reader.text() for _ in range(20))) == [b"text"] * 20
    assert exporter.num_calls == 1
    clock.now_s = KEEP_S
    await reader.text()
    assert exporter.num_calls == 2


async def test_the_live_state_comes_back_as_it_was(monkeypatch) -> None:
    monkeypatch.setattr(metrics_reader, "TIMEOUT_S", 60.0)
    state = LiveState(3, [])
    reader = ActorMetricsReader(Exporter(lambda: later(msgspec.json.encode(state))), Clock())
    assert await reader.live() == state


async def raising():
    raise ray.exceptions.RayActorError


async def test_an_actor_that_is_gone_or_silent_is_unavailable_and_asked_again(monkeypatch) -> None:
    monkeypatch.setattr(metrics_reader, "TIMEOUT_S", 0.02)
    for answer in (raising, asyncio.Future):
        exporter = Exporter(answer)
        reader = ActorMetricsReader(exporter, Clock())
        for _ in range(2):
            with pytest.raises(ApiError) as refused:
                await reader.live()
            assert refused.value.code is ApiErrorCode.UNAVAILABLE
        assert exporter.num_calls == 2
