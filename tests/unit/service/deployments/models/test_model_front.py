"""Models of one ingress over real channels: what befalls one does not befall the other."""

import asyncio
import contextlib

import msgspec
import pytest

from service.config import parse_config
from service.deployments.model_front import ModelFront
from service.errors import ApiError, ApiErrorCode
from service.handler.collect import collect
from service.handler.requests import GenerationRequest, TokenPrompt
from service.observability.exporter import ProcessSnapshot
from service.request_context import RequestContext
from service.routing.admission import IngressAdmission
from service.security.quota import FreeLease
from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FAST, FakeReplica, eventually
from tests.fakes.tokenizer_folders import make_byte_level_folder
from workers.sampling.params import SamplingParams

# Prompts are ids.
pytestmark = [pytest.mark.asyncio, pytest.mark.usefixtures("no_tokenizer_processes")]
NAMES = ("sick", "well")


class Fronts:
    """Two models of one ingress."""

    def __init__(self, folder, **settings):
        make_byte_level_folder(folder)
        models = {name: {"engine": {"model": str(folder)}} for name in NAMES}
        config = parse_config({"models": models, "channel": FAST.model_dump(), **settings})
        self.admission = IngressAdmission(config.admission, len(NAMES))
        self.fronts = [
            ModelFront("in-1", "node-1", model, config, admission)
            for model, admission in zip(config.served_models(), self.admission.models, strict=True)
        ]

    async def start(self):
        self.handlers = {}
        for front in self.fronts:
            model = await front.start()
            self.handlers[model.name] = model.handler

    async def link(self, *replicas):
        for front in self.fronts:
            await front.update_replicas([replica.address for replica in replicas])
        await eventually(lambda: all(front.is_ready for front in self.fronts))

    async def start_request(self, name, max_tokens=4):
        prompt = TokenPrompt([5, 6])
        request = GenerationRequest((prompt,), SamplingParams(max_tokens=max_tokens), name)
        return await self.handlers[name].start(request, RequestContext(), FreeLease())

    async def answer(self, name):
        async with await self.start_request(name) as generation:
            (result,) = await collect(generation)
            return generation.info.model, len(result.token_ids)


@contextlib.asynccontextmanager
async def running(folder, sick, well=None, **settings):
    well = well or FakeEngine(step_s=0.001, model_name="well")
    made = Fronts(folder, **settings)
    await made.start()
    with FakeReplica(sick, replica_id="s") as made.sick, FakeReplica(well, replica_id="w") as w:
        await made.link(made.sick, w)
        yield made
        for front in made.fronts:
            await front.aclose()


async def error_of(awaitable):
    with pytest.raises(ApiError) as caught:
        await awaitable
    return caught.value.code


async def test_each_model_is_served_by_its_own_replicas(tmp_path):
    async with running(tmp_path, FakeEngine(step_s=0.001, model_name="sick")) as made:
        for name in NAMES:
            assert await made.answer(name) == (name, 4)
        encoded = [front.snapshot() for front in made.fronts]
        snapshots = [msgspec.msgpack.decode(part, type=ProcessSnapshot) for part in encoded]
        assert [snapshot.labels for snapshot in snapshots] == [{"model": n} for n in NAMES]
        for snapshot in snapshots:
            values = {s.name: s.value for family in snapshot.families for s in family.samples}
            assert values["tessera_connected_replicas"] == 1
            assert values["tessera_requests_accepted_total"] == 1


async def test_a_model_whose_replicas_are_lost_leaves_the_other_answering(tmp_path):
    sick = FakeEngine(step_s=0.01, model_name="sick")
    async with running(tmp_path, sick, router={"move_wait_s": 0.0}) as made:
        async with await made.start_request("sick", max_tokens=10_000) as generation:
            deltas = aiter(generation)
            await anext(deltas)
            await asyncio.to_thread(made.sick.kill)
            with pytest.raises(ApiError) as caught:
                async for _ in deltas:
                    pass
            assert caught.value.code is ApiErrorCode.REPLICA_LOST
        assert await error_of(made.start_request("sick")) is ApiErrorCode.UNAVAILABLE
        assert [front.is_ready for front in made.fronts] == [False, True]
        assert await made.answer("well") == ("well", 4)


async def test_a_crowd_before_one_model_does_not_hold_up_the_other(tmp_path):
    stuck = FakeEngine(step_s=0.01, model_name="sick", max_running=0)
    async with running(tmp_path, stuck, admission={"max_live_requests": 8}) as made:
        crowd = [await made.start_request("sick") for _ in range(6)]
        assert await error_of(made.start_request("sick")) is ApiErrorCode.OVERLOADED
        for _ in range(3):
            assert await made.answer("well") == ("well", 4)
        for generation in crowd:
            await generation.aclose()
        assert made.admission.num_live_requests == 0


async def test_a_full_replica_of_one_model_refuses_for_that_model_alone(tmp_path):
    stuck = FakeEngine(step_s=0.01, model_name="sick", max_running=0)
    async with running(tmp_path, stuck, router={"max_waiting_requests": 1}) as made:
        waiting = await made.start_request("sick")
        await eventually(lambda: stuck.waiting)
        async with asyncio.timeout(5):
            while True:
                try:
                    await (await made.start_request("sick")).aclose()
                except ApiError as error:
                    refused = error.code
                    break
                await asyncio.sleep(0.01)
        assert refused is ApiErrorCode.OVERLOADED
        assert await made.answer("well") == ("well", 4)
        await waiting.aclose()
