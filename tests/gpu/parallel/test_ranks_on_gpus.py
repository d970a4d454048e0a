"""Ranks on GPUs: the text of one, over peer memory and over NCCL; and no hang when one dies.

Every engine has its GPUs for itself, however many tests run at once: ranks that wait for each other
on the device take turns with other processes there, some milliseconds at every meeting.
"""

import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import pytest
import torch

from tests.fakes.tiny_models import NATIVE, VOCAB_SIZE, save_tiny_model
from tests.gpu.workers.test_engine_cuda import (
    NEAR_TIE,
    NUM_TOKENS,
    gaps_to_likeliest,
    needs_fa3,
    prompts_of,
    share_equal,
)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two NVIDIA GPUs"),
]

RUN_S = 120.0
"""Of one process, imports and captures included; it has its GPUs for itself."""
END_S = 30.0
PAIR_POLL_S = 0.1
GREEDY = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True}
SEEDED = {"temperature": 0.8, "top_p": 0.9, "seed": 5, "max_tokens": NUM_TOKENS, "ignore_eos": True}
TINY = {"dtype": "float32", "attention_backend": "torch_native", "num_pages": 400, "page_size": 4}
BUILTIN = {"model": "builtin", "num_pages": 400}
TINY_ROW_BYTES = 64 * 4
BUILTIN_ROW_BYTES = 256 * 2
"""Of a token's hidden state."""
needs_four = pytest.mark.skipif(torch.cuda.device_count() < 4, reason="fewer than four NVIDIA GPUs")
both_ways = pytest.mark.parametrize("enable_peer_memory", [True, False], ids=["peer", "nccl"])


@contextmanager
def own_gpus(num_gpus):
    """CUDA_VISIBLE_DEVICES of GPUs that no other test of this machine computes on meanwhile."""
    num_pairs = -(-num_gpus // 2)
    while True:
        with ExitStack() as stack:
            free = (p for p in range(torch.cuda.device_count() // 2) if _lock(p, stack))
            pairs = list(islice(free, num_pairs))
            if len(pairs) == num_pairs:
                yield ",".join(f"{2 * pair},{2 * pair + 1}" for pair in pairs)
                return
        time.sleep(PAIR_POLL_S)


def _lock(pair, stack):
    """Whether the pair is this test's until the stack ends."""
    path = Path(tempfile.gettempdir()) / f"tessera-test-gpus-{os.getuid()}-{pair}.lock"
    lock = stack.enter_context(path.open("w"))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


@contextmanager
def running(config, prompts, sampling, rounds=1, captures=False, one_shot_bytes=None):
    """The process; whatever becomes of it, it is killed with all its ranks after RUN_S. What it
    says on standard error is this test's, and shown if the test fails. one_shot_bytes: see
    limited_ranks."""
    told = {"config": config, "prompts": prompts, "sampling": sampling, "rounds": rounds}
    told |= {"captures": captures, "dump_s": RUN_S - 10.0, "one_shot_bytes": one_shot_bytes}
    with own_gpus(config["tp_size"]) as gpus, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.gpu.parallel.generate"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            start_new_session=True,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": gpus},
        )
        timer = threading.Timer(RUN_S, kill_group, (process.pid,))
        timer.start()
        try:
            process.stdin.write(json.dumps(told))
            process.stdin.close()
            yield process
        finally:
            timer.cancel()
            # Of the whole group: a rank may outlive the process that started it.
            kill_group(process.pid)
            process.stdout.close()
            process.wait()
            errors.seek(0)
            sys.stderr.write(errors.read())


def kill_group(group):
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return


def generate(config, prompts, sampling, rounds=1, captures=False, one_shot_bytes=None):
    """The tokens of every round."""
    with running(config, prompts, sampling, rounds, captures, one_shot_bytes) as process:
        lines = list(process.stdout)
        assert process.wait(END_S) == 0
    assert lines[0] == "ready\n"
    return [json.loads(line) for line in lines[1:]]


@both_ways
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_float32_text_of_two_ranks_equals_that_of_one(name, enable_peer_memory, tmp_path) -> None:
    folder = save_tiny_model(NATIVE[name], tmp_path)
    prompts = prompts_of(6, VOCAB_SIZE, longest=60)
    config = {**TINY, "model": str(folder), "enable_peer_memory": enable_peer_memory}
    sampling = [GREEDY, SEEDED] * 3
    (alone,) = generate({**config, "tp_size": 1}, prompts, sampling)
    (together,) = generate({**config, "tp_size": 2}, prompts, sampling)
    assert together == alone


@needs_four
@pytest.mark.parametrize("one_shot_rows", [1, 8])
@pytest.mark.parametrize("name", ["llama3", "qwen3"])
def test_float32_text_of_four_ranks_that_share_rows_equals_that_of_one(
    name, one_shot_rows, tmp_path
) -> None:
    """one_shot_rows: 1: rows are shared in all steps, selected ones and those of decode steps
    included, and the last rank has none of six; 8: while prompts are computed only."""
    folder = save_tiny_model(NATIVE[name], tmp_path)
    prompts = prompts_of(6, VOCAB_SIZE, longest=60)
    config = {**TINY, "model": str(folder)}
    sampling = [GREEDY, SEEDED] * 3
    (alone,) = generate({**config, "tp_size": 1}, prompts, sampling)
    one_shot_bytes = one_shot_rows * TINY_ROW_BYTES
    (together,) = generate(
        {**config, "tp_size": 4}, prompts, sampling, one_shot_bytes=one_shot_bytes
    )
    assert together == alone


@needs_fa3
@needs_four
@pytest.mark.parametrize("one_shot_rows", [1, 16])
def test_four_ranks_that_share_rows_choose_likeliest_tokens_over_graphs(one_shot_rows) -> None:
    """one_shot_rows: 16: fewer rows than requests, so that batches that end go both ways."""
    prompts = prompts_of(21, 4000)
    config = {**BUILTIN, "tp_size": 4}
    one_shot_bytes = one_shot_rows * BUILTIN_ROW_BYTES
    rounds = generate(config, prompts, [GREEDY] * len(prompts), 3, True, one_shot_bytes)
    gaps = gaps_to_likeliest(prompts, rounds[-1])
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
    assert share_equal(rounds[1], rounds[2]) > 0.95


@needs_fa3
@both_ways
@pytest.mark.parametrize("captures", [True, False], ids=["captured", "capturing"])
def test_two_ranks_choose_likeliest_tokens_over_graphs(enable_peer_memory, captures) -> None:
    """captures: all graphs before the first request, or while requests are served."""
    prompts = prompts_of(21, 4000)
    config = {**BUILTIN, "tp_size": 2, "enable_peer_memory": enable_peer_memory}
    rounds = generate(config, prompts, [GREEDY] * len(prompts), 3, captures)
    gaps = gaps_to_likeliest(prompts, rounds[-1])
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95
    assert share_equal(rounds[1], rounds[2]) > 0.95


@needs_fa3
@both_ways
def test_ranks_agree_on_sampled_tokens_of_graphed_steps(enable_peer_memory) -> None:
    prompts = prompts_of(8, 4000)
    config = {**BUILTIN, "enable_peer_memory": enable_peer_memory}
    sampling = [GREEDY, SEEDED] * 4
    (alone,) = generate({**config, "tp_size": 1}, prompts, sampling)
    (together,) = generate({**config, "tp_size": 2}, prompts, sampling)
    assert share_equal(together, alone) > 0.6


@pytest.mark.parametrize("victim", [0, 1], ids=["rank-0", "rank-1"])
def test_a_dead_rank_ends_the_others_in_seconds(victim, tmp_path) -> None:
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    prompts = prompts_of(6, VOCAB_SIZE, longest=60)
    config = {**TINY, "model": str(folder), "tp_size": 2}
    with running(config, prompts, [GREEDY] * 6, rounds=100_000) as process:
        assert process.stdout.readline() == "ready\n"
        assert process.stdout.readline()
        (follower,) = children(process.pid)
        os.kill((process.pid, follower)[victim], signal.SIGKILL)
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
