"""The pool of processes: right answers, bounded jobs, and no worker lost for good."""

import asyncio
import os
import signal

import pytest
import pytest_asyncio

from service.api.errors import ApiError, ApiErrorCode
from service.tokenizer.jobs import EncodeChat, EncodeText
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.fakes.tokenizer_folders import make_byte_level_folder
from workers.errors import ModelLoadError

SLOW_TEMPLATE = (
    "{% if messages[0]['content'] == 'slow' %}{% for i in range(99999) %}"
    "{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}{{ messages[0]['content'] }}"
)


@pytest_asyncio.fixture
async def pool(tmp_path):
    folder = make_byte_level_folder(tmp_path, SLOW_TEMPLATE)
    pool = TokenizerPool(TokenizerPoolConfig(folder, num_workers=1, timeout_s=1.0))
    await pool.start()
    yield pool
    await pool.aclose()


def _chat(content):
    return EncodeChat([{"role": "user", "content": content}])


@pytest.mark.asyncio
async def test_round_trip_through_a_process(pool):
    texts = ["hello world", "naïve 🙂", "", "\x00 nul"]
    for text in texts:
        token_ids = await pool.encode_text(EncodeText(text))
        assert await pool.decode(token_ids, skip_special_tokens=True) == text


@pytest.mark.asyncio
async def test_a_job_that_runs_too_long_is_a_typed_error_and_the_next_one_works(pool):
    with pytest.raises(ApiError, match="longer than 1 s") as raised:
        await pool.encode_chat(_chat("slow"))
    assert raised.value.code is ApiErrorCode.TOKENIZER_FAILED
    assert await pool.encode_chat(_chat("hello"))


@pytest.mark.asyncio
async def test_a_killed_worker_is_a_typed_error_and_is_replaced(pool):
    worker = pool._idle._queue[0]
    job = asyncio.create_task(pool.encode_chat(_chat("slow")))
    await asyncio.sleep(0.1)
    os.kill(worker._process.pid, signal.SIGKILL)
    with pytest.raises(ApiError) as raised:
        await job
    assert raised.value.code is ApiErrorCode.TOKENIZER_FAILED
    assert await pool.encode_text(EncodeText("hello"))


@pytest.mark.asyncio
async def test_a_caller_that_leaves_does_not_mix_up_the_answers(pool):
    big = asyncio.create_task(pool.encode_text(EncodeText("hello world " * 20000)))
    await asyncio.sleep(0.01)
    big.cancel()
    token_ids = await pool.encode_text(EncodeText("naïve"))
    assert await pool.decode(token_ids, skip_special_tokens=True) == "naïve"


@pytest.mark.asyncio
async def test_the_event_loop_runs_on_while_a_large_prompt_is_encoded(pool):
    job = asyncio.create_task(pool.encode_text(EncodeText("hello world " * 40000)))
    longest, loop = 0.0, asyncio.get_running_loop()
    while not job.done():
        before = loop.time()
        await asyncio.sleep(0.001)
        longest = max(longest, loop.time() - before)
    assert len(await job) > 40000
    assert longest < 0.25


@pytest.mark.asyncio
async def test_a_refusal_of_the_template_is_the_clients_error(pool):
    with pytest.raises(ApiError) as raised:
        await pool.encode_chat(EncodeChat([]))
    assert raised.value.code is ApiErrorCode.INVALID_REQUEST
    assert raised.value.param == "messages"


@pytest.mark.asyncio
async def test_more_waiting_jobs_than_the_ceiling_are_refused_at_once(tmp_path):
    folder = make_byte_level_folder(tmp_path, SLOW_TEMPLATE)
    config = TokenizerPoolConfig(folder, num_workers=1, timeout_s=0.5, max_pending_jobs=1)
    pool = TokenizerPool(config)
    await pool.start()
    running = asyncio.create_task(pool.encode_chat(_chat("slow")))
    waiting = asyncio.create_task(pool.encode_text(EncodeText("x")))
    await asyncio.sleep(0.1)
    with pytest.raises(ApiError) as raised:
        await pool.encode_text(EncodeText("y"))
    assert raised.value.code is ApiErrorCode.OVERLOADED
    assert await asyncio.gather(running, waiting, return_exceptions=True)
    await pool.aclose()


@pytest.mark.asyncio
async def test_waiting_for_a_worker_ends_with_a_typed_error(tmp_path):
    folder = make_byte_level_folder(tmp_path, SLOW_TEMPLATE)
    config = TokenizerPoolConfig(folder, num_workers=1, timeout_s=1.0, queue_timeout_s=0.1)
    pool = TokenizerPool(config)
    await pool.start()
    running = asyncio.create_task(pool.encode_chat(_chat("slow")))
    await asyncio.sleep(0.05)
    with pytest.raises(ApiError) as raised:
        await pool.encode_text(EncodeText("y"))
    assert raised.value.code is ApiErrorCode.OVERLOADED
    await asyncio.gather(running, return_exceptions=True)
    await pool.aclose()


@pytest.mark.asyncio
async def test_a_folder_that_cannot_be_served_fails_at_start(tmp_path):
    pool = TokenizerPool(TokenizerPoolConfig(tmp_path, num_workers=1))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        await pool.start()
