"""Two ranks on GPUs: the text of one, over peer memory and over NCCL; and no hang when one dies.

A module here has one engine at a time and asks it everything: its start takes longer than that.
Modules may run at the same time: engines wait for each other's GPUs.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.gpu.needs import NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import (
    GREEDY,
    TINY_PROMPTS,
    TINY_SAMPLING,
    alone,
    tiny_config,
)
from tests.gpu.parallel.running_engine import END_S, running

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS]

KINDS = [("llama3", "peer"), ("llama3", "nccl"), ("qwen3", "peer"), ("qwen3", "nccl")]
KINDS += [("gemma3", "nccl")]
VICTIMS = {("llama3", "peer"): 0, ("qwen3", "peer"): 1}
"""Which rank dies in the end; the others end when they are asked to."""


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def ranks(request, tmp_path_factory):
    """(what it is, its config for one rank, an engine of two)."""
    name, way = request.param
    config = tiny_config(name, tmp_path_factory.mktemp(name))
    with running({**config, "tp_size": 2, "enable_peer_memory": way == "peer"}) as engine:
        yield request.param, config, engine


def test_float32_text_of_two_ranks_equals_that_of_one(ranks) -> None:
    _, config, engine = ranks
    (together,) = engine.generate(TINY_PROMPTS, TINY_SAMPLING)
    assert together == alone(config, TINY_PROMPTS, TINY_SAMPLING)


def test_ranks_end_with_each_other(ranks) -> None:
    """In the middle of a step, in seconds, if one dies. Nothing uses the engine after this."""
    kind, _, engine = ranks
    process = engine.process
    (follower,) = children(process.pid)
    if kind not in VICTIMS:
        engine.end()
    else:
        engine.begin(TINY_PROMPTS, [GREEDY] * 6, rounds=100_000)
        engine.read_line()
        os.kill((process.pid, follower)[VICTIMS[kind]], signal.SIGKILL)
        assert process.wait(END_S) != 0
    deadline_s = time.monotonic() + END_S
    while is_running(follower):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = [int(child) for child in listed]
    return [one for one in found if b"local_rank" in Path(f"/proc/{one}/cmdline").read_bytes()]


def is_running(pid):
    """Whether there is such a process that has not ended; nobody may have taken notice yet."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"
