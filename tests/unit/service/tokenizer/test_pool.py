"""The pool of processes: right answers, bounded jobs, turns, and no worker lost for good."""

import asyncio
import contextlib
import os
import signal

import pytest
import pytest_asyncio

from service.errors import ApiError, ApiErrorCode
from service.tokenizer import pool as pool_module
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import EncodeChat, EncodeText
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.tokenizer_folders import CORPUS, make_byte_level_folder
from workers.errors import ModelLoadError

SLOW_TEMPLATE = (
    "{% if messages[0]['content'][0] == 's' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0]['content'] }}"
)
ANNE = Flow("anne", "1")
MAX_SHORT_BYTES = 1024
LONG = EncodeText("x" * 2 * MAX_SHORT_BYTES)
BIG = CORPUS[1] * 5_000


def make_pool(folder, **settings):
    config = {"timeout_s": 1.0, "max_short_bytes": MAX_SHORT_BYTES, **settings}
    return TokenizerPool(TokenizerPoolConfig(folder, **config))


# Two processes and one for grammars are a second of CPU, so the tests share a pool where they can.
pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_byte_level_folder(tmp_path_factory.mktemp("tokenizer"), SLOW_TEMPLATE)


@contextlib.asynccontextmanager
async def started_pool(folder, **settings):
    """One worker for everything, one for what is short."""
    pool = make_pool(folder, **settings)
    await pool.start()
    try:
        yield pool
    finally:
        await pool.aclose()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def patient_pool(folder):
    """No job runs out of time, and no test leaves a job behind or ends a worker."""
    async with started_pool(folder, timeout_s=60.0) as pool:
        yield pool


def _chat(content):
    return EncodeChat([{"role": "user", "content": content}])


async def idle_worker(pool):
    """That of texts of any length, once it has nothing to do."""
    async with asyncio.timeout(60):
        while not pool._processes._lanes._idle:
            await asyncio.sleep(0.01)
    (worker,) = pool._processes._lanes._idle
    return worker


@contextlib.asynccontextmanager
async def held_worker(pool):
    """The worker of long texts does nothing meanwhile, and takes no CPU for it."""
    worker = await idle_worker(pool)
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


async def _code_of(job):
    with pytest.raises(ApiError) as raised:
        await job
    return raised.value.code


async def test_round_trip_through_a_process(patient_pool):
    texts = ["hello world", "naïve 🙂", "", "\x00 nul"]
    for text in texts:
        token_ids = await patient_pool.encode_text(EncodeText(text), ANNE)
        assert await patient_pool.decode(token_ids, ANNE, skip_special_tokens=True) == text


async def test_a_job_that_runs_too_long_is_the_requests_fault_and_the_next_one_works(
    folder, monkeypatch
):
    """However little CPU a busy machine gave it: it is stopped once it has had some."""
    monkeypatch.setattr(pool_module, "_OWN_FAULT_CPU_SHARE", 0.01)
    async with started_pool(folder, timeout_s=3.0) as pool:
        (worker,) = pool._processes._lanes._idle_for_short
        started_s = worker.cpu_s()
        job = asyncio.create_task(pool.encode_chat(_chat("slow"), ANNE))
        while not job.done() and worker.cpu_s() - started_s < 0.05:
            await asyncio.sleep(0.01)
        if not job.done():
            os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(ApiError, match="takes longer than 3 s") as raised:
            await job
        assert raised.value.code is ApiErrorCode.LIMIT_EXCEEDED
        assert raised.value.row.http_status == 400
        assert raised.value.param == "messages"
        assert await pool.encode_chat(_chat("hello"), ANNE)


async def test_a_job_that_got_no_cpu_is_not_the_requests_fault(folder):
    async with started_pool(folder) as pool:
        for worker in (*pool._processes._lanes._idle, *pool._processes._lanes._idle_for_short):
            os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(ApiError, match="too busy") as raised:
            await pool.encode_text(EncodeText("hello"), ANNE)
    assert raised.value.code is ApiErrorCode.TOKENIZER_FAILED
    assert raised.value.retry_after_s is not None


async def test_a_killed_worker_is_a_typed_error_and_is_replaced_in_its_lane(folder, caplog):
    async with started_pool(folder, timeout_s=60.0) as pool:
        (worker,) = pool._processes._lanes._idle_for_short
        job = asyncio.create_task(pool.encode_chat(_chat("slow"), ANNE))
        await asyncio.sleep(0.1)
        os.kill(worker.pid, signal.SIGKILL)
        assert await _code_of(job) is ApiErrorCode.TOKENIZER_FAILED
        async with asyncio.timeout(60):
            while not pool._processes._lanes._idle_for_short:
                await asyncio.sleep(0.01)
        assert "a tokenizer process died and is replaced" in caplog.text
        assert await pool.encode_text(EncodeText("hello"), ANNE)


async def test_a_caller_that_leaves_does_not_mix_up_the_answers(patient_pool):
    big = asyncio.create_task(patient_pool.encode_text(EncodeText("hello world " * 20000), ANNE))
    await asyncio.sleep(0.01)
    big.cancel()
    token_ids = await patient_pool.encode_text(EncodeText("naïve " * MAX_SHORT_BYTES), ANNE)
    text = await patient_pool.decode(token_ids, ANNE, skip_special_tokens=True)
    assert text == "naïve " * MAX_SHORT_BYTES


async def test_short_texts_do_not_wait_for_long_ones(patient_pool):
    """They come back, one after the other, while long ones do not."""
    async with held_worker(patient_pool):
        jobs = [asyncio.create_task(patient_pool.encode_text(LONG, ANNE)) for _ in range(2)]
        await asyncio.sleep(0.05)
        for _ in range(20):
            assert await patient_pool.encode_text(EncodeText("hello world"), ANNE)
        assert not any(job.done() for job in jobs)
    assert all(await asyncio.gather(*jobs))


async def test_callers_take_turns_with_long_texts(patient_pool):
    await idle_worker(patient_pool)
    done = []

    async def encode(flow):
        await patient_pool.encode_text(EncodeText(CORPUS[1] * 200), flow)
        done.append(flow.caller)

    greedy = [asyncio.create_task(encode(Flow("greedy", str(i)))) for i in range(8)]
    await asyncio.sleep(0)
    await asyncio.gather(encode(Flow("anne", "1")), encode(Flow("ben", "1")))
    await asyncio.gather(*greedy)
    assert max(done.index("anne"), done.index("ben")) <= 4


async def test_what_certainly_does_not_fit_is_refused_without_encoding(patient_pool):
    """By CPU time of the worker, against what encoding the text takes."""
    worker = await idle_worker(patient_pool)
    started_s = worker.cpu_s()
    await patient_pool.encode_text(EncodeText(BIG, max_tokens=len(BIG.encode())), ANNE)
    encoded_s = worker.cpu_s()
    with pytest.raises(ApiError, match="room for 1000 prompt tokens.* at least") as raised:
        await patient_pool.encode_text(EncodeText(BIG, max_tokens=1000), ANNE)
    assert raised.value.code is ApiErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert worker.cpu_s() - encoded_s < 0.3 * (encoded_s - started_s)


async def test_the_event_loop_runs_on_while_a_large_prompt_is_encoded(patient_pool):
    text = EncodeText("hello world " * 40000)
    token_ids, held = await held_units(lambda: patient_pool.encode_text(text, ANNE))
    assert len(token_ids) > 40000
    assert held < MAX_UNITS


async def test_a_refusal_of_the_template_is_the_clients_error(patient_pool):
    with pytest.raises(ApiError) as raised:
        await patient_pool.encode_chat(EncodeChat([]), ANNE)
    assert raised.value.code is ApiErrorCode.INVALID_REQUEST
    assert raised.value.param == "messages"


async def test_more_waiting_jobs_than_the_ceiling_are_refused_at_once_and_no_others(folder):
    pool = make_pool(folder, timeout_s=60.0, max_pending_jobs=1)
    await pool.start()
    async with held_worker(pool):
        jobs = [asyncio.create_task(pool.encode_text(LONG, ANNE)) for _ in range(2)]
        await asyncio.sleep(0.05)
        assert await _code_of(pool.encode_text(LONG, ANNE)) is ApiErrorCode.OVERLOADED
        assert not any(job.done() for job in jobs)
    assert all(await asyncio.gather(*jobs))
    await pool.aclose()


async def test_one_caller_leaves_as_much_room_as_it_takes(folder):
    pool = make_pool(folder, timeout_s=60.0, max_pending_jobs=4)
    await pool.start()

    def encode(caller, number):
        return asyncio.create_task(pool.encode_text(LONG, Flow(caller, str(number))))

    async with held_worker(pool):
        jobs = [encode("greedy", i) for i in range(4)]  # one runs, two wait
        await asyncio.sleep(0.05)
        assert await _code_of(jobs.pop()) is ApiErrorCode.OVERLOADED
        jobs.append(encode("anne", 1))
        await asyncio.sleep(0.05)
        assert not any(job.done() for job in jobs)
    assert all(await asyncio.gather(*jobs))
    await pool.aclose()


async def test_waiting_for_a_worker_ends_with_a_typed_error_and_its_place_is_given_back(folder):
    pool = make_pool(folder, timeout_s=60.0, queue_timeout_s=0.1, max_pending_jobs=1)
    await pool.start()
    async with held_worker(pool):
        running = asyncio.create_task(pool.encode_text(LONG, ANNE))
        await asyncio.sleep(0.05)
        for _ in range(3):  # the second would be refused for the ceiling if the first still counted
            with pytest.raises(ApiError, match="became free in time") as raised:
                await pool.encode_text(LONG, ANNE)
            assert raised.value.code is ApiErrorCode.OVERLOADED
    assert await running
    await pool.aclose()


async def test_a_folder_that_cannot_be_served_fails_at_start(tmp_path):
    pool = make_pool(tmp_path)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        await pool.start()
