"""Images in the pool of processes: none holds the event loop, the memory or a worker for long."""

import asyncio
import gc
import os
import signal
from pathlib import Path

import pytest
import pytest_asyncio

from service.errors import ApiError, ApiErrorCode
from service.images.files import ImageCeilings, ImageFile
from service.tokenizer import pool as pool_module
from service.tokenizer.fair_queue import Flow
from service.tokenizer.jobs import EncodeChat, EncodeText
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.pictures import (
    jpeg_of_scans,
    picture,
    png_of_zeros,
    saved,
    webp_that_claims,
)
from tests.fakes.served_vision import save_vision_text

# Two processes and one for grammars are a second of CPU, so the tests share a pool where they can.
pytestmark = pytest.mark.asyncio(loop_scope="module")
CEILINGS = ImageCeilings()
SIDE = 2048
ANNE = Flow("anne", "1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("vision")
    save_vision_text(folder, {"max_pixels": SIDE * SIDE, "patch_size": 16})
    return folder


def make_pool(folder, **settings):
    return TokenizerPool(TokenizerPoolConfig(folder, **{"timeout_s": 30.0, **settings}))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(folder):
    """No test leaves a job behind or ends a worker."""
    pool = make_pool(folder)
    await pool.start()
    yield pool
    await pool.aclose()


@pytest.fixture(scope="module")
def idle_bytes(pool):
    """Memory of the workers before any test. What a test takes is the most that one took so far."""
    return memory_bytes(pool, "VmHWM")


def chat(*files, **more):
    content = [{"type": "image"}] * len(files)
    images = [ImageFile(file) for file in files]
    return EncodeChat([{"role": "user", "content": content}], images=images, **more)


def memory_bytes(pool, name):
    """Of the fullest worker, as the kernel counts it."""
    workers = [*pool._processes._lanes._idle, *pool._processes._lanes._idle_for_short]
    assert len(workers) == 2
    lines = [
        line
        for worker in workers
        for line in Path(f"/proc/{worker.pid}/status").read_text().splitlines()
    ]
    return 1024 * max(int(line.split()[1]) for line in lines if line.startswith(name))


async def test_the_largest_images_do_not_hold_the_loop(pool):
    file = saved(picture(1, SIDE, SIDE), "JPEG")
    seen, held = await held_units(lambda: pool.encode_images(chat(file), ANNE))
    assert len(seen.images[0].values) == 3 * CEILINGS.max_shown_pixels
    assert seen.spans[0].num_tokens == (SIDE // 32) ** 2
    assert held < MAX_UNITS


HOSTILE = {
    "a bomb": lambda: png_of_zeros(30_000, 30_000),
    "a bomb in one row": lambda: png_of_zeros(1 << 25, 1),
    "no end of an image": lambda: png_of_zeros(4096, 4096)[:-5000],
    "a canvas of gigabytes": lambda: webp_that_claims(1 << 24, 1 << 24),
    "a canvas at the ceiling": lambda: webp_that_claims(4096, 4096),
    "an image of many scans": lambda: jpeg_of_scans(10_000, 4096, 4096),
    "nonsense": lambda: bytes(range(256)) * 30_000,
}


@pytest.mark.parametrize("name", HOSTILE)
async def test_hostile_images_cost_little_and_no_worker(pool, idle_bytes, name):
    file = HOSTILE[name]()

    async def refused():
        with pytest.raises(ApiError) as raised:
            await pool.encode_images(chat(file), ANNE)
        return raised.value

    error, held = await held_units(refused)
    assert (error.code, error.param) == (ApiErrorCode.INVALID_REQUEST, "messages.content")
    # 50 ms of a quiet core are 5 units; here it is 20 ms as for everything else.
    assert held < MAX_UNITS
    assert memory_bytes(pool, "VmHWM") - idle_bytes < CEILINGS.memory_bytes
    assert len(await pool.encode_text(EncodeText("hello"), ANNE)) > 0


async def test_the_largest_honest_files_fit_into_the_ceiling_of_memory(pool, idle_bytes):
    """Which is there for those that take more."""
    gc.collect()
    files = [
        saved(picture(1, 4096, 4096), "JPEG"),
        saved(picture(1, 512, 512).resize((4096, 4096)).convert("RGBA"), compress_level=1),
    ]
    for file in files:
        seen = await pool.encode_images(chat(file), ANNE)
        assert seen.spans[0].num_tokens == (SIDE // 32) ** 2
    assert memory_bytes(pool, "VmHWM") - idle_bytes < CEILINGS.memory_bytes


async def test_an_image_that_takes_too_long_is_its_requests_fault(folder, monkeypatch):
    """However little CPU a busy machine gave it: it is stopped once it has had some."""
    monkeypatch.setattr(pool_module, "_OWN_FAULT_CPU_SHARE", 0.01)
    file = jpeg_of_scans(80, 4096, 4096)
    pool = make_pool(folder, timeout_s=3.0)
    await pool.start()
    try:
        (worker,) = pool._processes._lanes._idle
        started_s = worker.cpu_s()
        job = asyncio.create_task(pool.encode_images(chat(file), ANNE))
        while not job.done() and worker.cpu_s() - started_s < 0.05:
            await asyncio.sleep(0.01)
        if not job.done():
            os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(ApiError) as raised:
            await job
        assert raised.value.code is ApiErrorCode.LIMIT_EXCEEDED
        async with asyncio.timeout(60):
            seen = await pool.encode_images(chat(saved(picture(1, 64, 64))), ANNE)
        assert seen.spans[0].num_tokens == 4
    finally:
        await pool.aclose()


async def test_images_do_not_hold_up_short_texts(pool):
    (worker,) = pool._processes._lanes._idle
    os.kill(worker.pid, signal.SIGSTOP)
    slow = asyncio.create_task(pool.encode_images(chat(saved(picture(1, 64, 64))), ANNE))
    try:
        await asyncio.sleep(0.05)
        assert await pool.encode_text(EncodeText("hello"), Flow("ben", "2"))
        assert not slow.done()
    finally:
        os.kill(worker.pid, signal.SIGCONT)
    assert (await slow).spans


async def test_a_prompt_that_becomes_too_long_says_how_long(pool):
    job = chat(saved(picture(1, 640, 640)), max_tokens=100)
    with pytest.raises(ApiError, match=r"at least 4\d\d") as raised:
        await pool.encode_images(job, ANNE)
    assert raised.value.code is ApiErrorCode.CONTEXT_LENGTH_EXCEEDED
