"""A rank that is stopped inside a step: rank 0 waits in a collective, and that is noticed."""

import contextlib
import threading
import time
from collections.abc import Iterator

import psutil
import torch.distributed as dist

from service.deployments.step_watch import StepWatch
from tests.distributed.test_local_engine import Starter, config_for
from workers.engine.engine import Engine
from workers.engine.loop import EngineLoop
from workers.engine.protocol import GenerateRequest, StepOutput
from workers.parallel.tp_engine import build_tp_engine
from workers.sampling.params import SamplingParams

STEP_TIMEOUT_S = 1.5
# A stopped rank is noticed after a second and a half, or never.
LATEST_S = 60.0


@contextlib.contextmanager
def engine_whose_rank_dies(lost: threading.Event) -> Iterator[Engine]:
    engine = build_tp_engine(
        config_for(2),
        Starter(),
        lambda rank: lost.set(),
        lambda record: None,
        lambda done, total: None,
    )
    try:
        yield engine
    finally:
        engine.close()
        # A close that met the dead rank in gloo may have left the group.
        if dist.is_initialized():
            dist.destroy_process_group()


def rank_process() -> psutil.Process:
    (rank,) = (
        child
        for child in psutil.Process().children()
        # One of an engine before may have ended and not been waited for yet.
        if child.status() != psutil.STATUS_ZOMBIE
        and "workers.parallel.local_rank" in child.cmdline()
    )
    return rank


def test_a_stopped_rank_is_noticed_by_the_heartbeat_and_no_token_comes_after():
    lost, has_token = threading.Event(), threading.Event()
    is_hung, has_failed = threading.Event(), threading.Event()

    def on_outputs(outputs: list[StepOutput]) -> None:
        assert outputs[0].error is None
        has_token.set()

    with engine_whose_rank_dies(lost) as engine:
        loop = EngineLoop(engine, on_outputs, lambda _: has_failed.set())
        loop.start()
        watch = StepWatch(loop, STEP_TIMEOUT_S, lambda _: is_hung.set())
        watch.start()
        params = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
        # Looked for before the request, which may be over by the time a busy machine finds it.
        rank = rank_process()
        loop.submit([GenerateRequest("r", [5, 17, 400], params)])
        assert has_token.wait(60)
        rank.suspend()
        try:
            assert is_hung.wait(LATEST_S)
            # A stopped process has closed nothing: it is the heartbeat alone that tells.
            assert not lost.is_set()
            num_tokens = loop.stats().num_output_tokens
            assert 0 < num_tokens < 900
            time.sleep(0.5)
            assert loop.stats().num_output_tokens == num_tokens
        finally:
            rank.kill()
        assert has_failed.wait(60)
