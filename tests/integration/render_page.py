"""Makes docs/images/page.png: the page of a real service, after a real chat.

    tests/integration/isolated.sh python -m tests.integration.render_page

The service is the built-in model on this machine's CPU, with memory for few tokens so that it is
seen to fill, and with drafts, so that every phase has something to show. What the attention's time
is compared with is measured before, on the same CPU. Needs Chromium (make tools).
"""

import asyncio
import itertools
import tempfile
import threading
import time
from pathlib import Path

import httpx
import torch

from tests.browser import Browser, open_browser
from tests.integration.ray_cluster import local_ray
from tests.integration.services import RunningService, running_service
from tests.programs import needed

PICTURE = Path(__file__).parents[2] / "docs" / "images" / "page.png"
_PORT = 18940
_SIZE = (1280, 770)
_NUM_ELEMENTS = 1 << 25
_SIDE = 1024
_OTHERS_S = 34.0
_PAUSE_S = 0.5
_QUESTIONS = (
    "What does json.loads do?",
    "What does os.path.split do?",
    "Write the function textwrap.dedent.",
    "What does shutil.copy do?",
)
_QUESTION = "What does os.path.join do?"
_QUESTION_FOR_A_TOOL = "Do I need a coat in Paris?"
_RESULT = "rain, 12 degrees"
_DONE = "document.querySelector('.message.assistant:last-child .stats').textContent"
_UNSURE = "[...document.querySelectorAll('.message .token')].findLast(e => e.dataset.sure >= 2)"

_IS_TIP_HIDDEN = "document.getElementById('tip').hidden"


def measure_cpu() -> tuple[float, float]:
    """Bytes and float32 operations a second that this CPU reaches; the best of five."""
    source, target = torch.ones(_NUM_ELEMENTS), torch.empty(_NUM_ELEMENTS)
    matrix = torch.ones(_SIDE, _SIDE)
    copy_s = min(_seconds(lambda: target.copy_(source)) for _ in range(5))
    product_s = min(_seconds(lambda: matrix @ matrix) for _ in range(5))
    return 2 * 4 * _NUM_ELEMENTS / copy_s, 2 * _SIDE**3 / product_s


def _seconds(work) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def ask_others(service: RunningService, stopped: threading.Event) -> None:
    """What other clients ask until the picture is taken, so that pages are seen in use."""
    with httpx.Client(base_url=service.url, timeout=60) as client:
        for question in itertools.cycle(_QUESTIONS):
            messages = [{"role": "user", "content": question}]
            body = {"model": "builtin", "messages": messages, "max_tokens": 250, "ignore_eos": True}
            client.post("/v1/chat/completions", json=body).raise_for_status()
            if stopped.wait(_PAUSE_S):
                return


async def take_picture(service: RunningService) -> None:
    with tempfile.TemporaryDirectory() as folder:
        async with open_browser(needed("chromium"), Path(folder)) as page:
            await page.resize(*_SIZE, scale=1.25)
            await page.open(f"{service.url}/")
            stopped = threading.Event()
            others = threading.Thread(target=ask_others, args=(service, stopped))
            others.start()
            try:
                await asyncio.sleep(_OTHERS_S)
                await _chat(page)
                # What the last chat needed is behind us, and the page's figures are of now.
                await asyncio.sleep(1.2)
                await _show_probability(page)
                await page.screenshot(PICTURE)
                assert not await page.read(_IS_TIP_HIDDEN)
            finally:
                stopped.set()
                await asyncio.to_thread(others.join)


async def _show_probability(page: Browser) -> None:
    """By the keyboard's focus: while Chromium captures a scaled window it takes the pointer to be
    where it would be unscaled, which leaves the token that it points at."""
    await page.point_at("document.querySelector('h1')")
    await page.read(f"{_UNSURE}.focus()")
    await page.until(f"!{_IS_TIP_HIDDEN}", timeout_s=20)


async def _chat(page: Browser) -> None:
    """Greedy: the small model says what it knows best, and every picture has the same chat."""
    await page.read("document.getElementById('temperature').value = 0")
    await _ask(page, _QUESTION, 1)
    await page.read("document.getElementById('tool_choice').value = 'auto'")
    await _ask(page, _QUESTION_FOR_A_TOOL, 2)
    await page.click("document.querySelector('.call input')")
    await _ask(page, _RESULT, 3)


async def _ask(page: Browser, text: str, number: int) -> None:
    await page.type(text)
    await page.press("Enter")
    shown = f"document.querySelectorAll('.message.assistant').length === {number}"
    await page.until(f"{shown} && {_DONE}", timeout_s=60)


def main() -> None:
    bytes_per_s, flops_per_s = measure_cpu()
    print(f"{bytes_per_s:.3g} bytes/s, {flops_per_s:.3g} operations/s")
    engine = {"kv_cache_bytes": 48 << 20, "page_size": 16, "speculative": "ngram"}
    metrics = {"port": _PORT + 2, "peak_bytes_per_s": bytes_per_s, "peak_flops_per_s": flops_per_s}
    with (
        local_ray(),
        running_service("picture", _PORT, engine=engine, metrics=metrics) as service,
    ):
        asyncio.run(take_picture(service))


if __name__ == "__main__":
    main()
