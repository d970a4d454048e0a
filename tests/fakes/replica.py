"""A channel server before a fake engine: a replica without Ray."""

import asyncio

from service.channel.server import ChannelServer
from service.channel.settings import ChannelSettings
from tests.fakes.engine import FakeEngine
from workers.engine.loop import EngineLoop

FAST = ChannelSettings(
    heartbeat_interval_s=0.05,
    # Far above what a busy machine keeps a thread from running: silence is no part of most tests.
    heartbeat_timeout_s=10.0,
    load_interval_s=0.01,
    reconnect_initial_s=0.01,
    reconnect_max_s=0.05,
    handshake_timeout_s=10.0,
)
# For tests that wait for longer than silence may last.
NOTICING = FAST.model_copy(update={"heartbeat_timeout_s": 4.0})
IMPATIENT = FAST.model_copy(update={"heartbeat_timeout_s": 0.5})


class FakeReplica:
    """Context manager: running inside, closed outside. kill() closes it as a crash would."""

    def __init__(self, engine=None, settings=FAST, replica_id="replica-1"):
        self.engine = engine or FakeEngine(step_s=0.001)
        self.failures: list[BaseException] = []
        self.server = ChannelServer(replica_id, "node-1", settings, "127.0.0.1")
        self.loop = EngineLoop(self.engine, self.server.publish, self.failures.append)

    def __enter__(self):
        self.loop.start()
        self.address = self.server.start(self.loop)
        return self

    def __exit__(self, *exc_info):
        self.kill()
        self.loop.stop()

    def kill(self):
        self.server.close(flush_timeout_s=0.0)


async def eventually(condition, timeout_s=60.0):
    """Wait until condition() holds; TimeoutError if it does not within timeout_s."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.002)
