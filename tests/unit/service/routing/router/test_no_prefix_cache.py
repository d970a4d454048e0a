"""The router over replicas that cannot continue what they computed for others."""

import msgspec
import pytest

from tests.fakes.engine import FakeEngine
from tests.fakes.replica import FakeReplica
from tests.unit.service.routing.router.test_router import anyone, collect, request, routed

pytestmark = pytest.mark.asyncio


async def test_prefixes_bring_nobody_to_replicas_without_a_prefix_cache():
    class Uncached(FakeEngine):
        @property
        def info(self):
            return msgspec.structs.replace(super().info, has_prefix_cache=False)

    with (
        FakeReplica(Uncached(), replica_id="a") as a,
        FakeReplica(Uncached(), replica_id="b") as b,
    ):
        async with routed(a, b) as r:
            for i in range(8):
                stream = await r.router.submit(request(f"r{i}", prompt=[*[7] * 256, i]), anyone())
                await collect(stream)
            assert r.metrics.reasons == {"load": 8}
