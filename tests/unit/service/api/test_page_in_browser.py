"""The page in a real browser before a server on a fake backend: keys, refusals, hostile text, and
the modules that compute."""

import asyncio
import dataclasses
import json
from contextlib import asynccontextmanager

import pytest

from service.api.auth import make_authenticator
from service.api.http import build_http_app
from service.api.web import WebSurface
from service.deployments.listeners import HttpServer, bind_shared
from service.errors import ApiError, ApiErrorCode
from service.handler.directory import ModelDirectory
from service.observability.live import LiveState
from service.page.files import load_page
from tests.browser import open_browser
from tests.fakes.backend import make_outputs
from tests.fakes.callers import callers_of
from tests.fakes.live import FakeReader, make_replica
from tests.page_checks import check_page
from tests.programs import needed, skip_without

pytestmark = [pytest.mark.asyncio, skip_without("chromium")]

ANSWER = "document.querySelector('.message.assistant:last-child .text').textContent"
STATS = "document.querySelector('.message.assistant:last-child .stats').textContent"
PULSE = "document.querySelector('#pulse').dataset.state"
HOSTILE = '</div><img src=x onerror="alert(1)"><script>alert(2)</script>&lt;b&gt;\u202e'


@pytest.fixture
def open_page(services, tmp_path):
    """The page of a server with these changes, in a browser."""

    @asynccontextmanager
    async def start(**changes):
        web = WebSurface(page=load_page(), reader=FakeReader())
        app = build_http_app(dataclasses.replace(services, **{"web": web, **changes}))
        server = HttpServer(app, keep_alive_timeout_s=5, drain_timeout_s=1)
        listener = bind_shared("127.0.0.1", 0)
        await server.start(listener)
        origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
        try:
            async with open_browser(needed("chromium"), tmp_path / "profile") as browser:
                await browser.open(f"{origin}/")
                yield browser, origin
        finally:
            await server.stop()

    return start


async def ask(page, text="hello"):
    await page.until("document.getElementById('model').value")
    await page.click("document.getElementById('prompt')")
    await page.type(text)
    await page.press("Enter")


async def use_key(page, key):
    await page.until("document.activeElement.id === 'key'")
    await page.type(key)
    await page.press("Enter")


async def test_a_server_with_keys_is_asked_nothing_more_until_the_right_one_is_given(
    open_page,
) -> None:
    keys = make_authenticator(callers_of("right"))
    async with open_page(authenticator=keys) as (page, origin):
        await use_key(page, "wrong")
        await page.until("document.getElementById('key-error').innerText.includes('not accepted')")
        num_requests = len(page.requests)
        await asyncio.sleep(2.5)
        assert len(page.requests) == num_requests
        await page.read("document.getElementById('key').select()")
        await use_key(page, "right")
        await page.until(f"{PULSE} === 'live'")
        await ask(page)
        await page.until(STATS)
        assert await page.read("Object.keys(localStorage).length + document.cookie.length") == 0
        page.complaints.clear()  # of the browser, about the 401s
        await check_page(page, origin)


async def test_what_a_model_writes_is_text_whatever_it_says(open_page, bench) -> None:
    token_ids = [*bench.tokenizer.ids(HOSTILE), 2]
    bench.backend.script = lambda request: make_outputs(request, token_ids)
    async with open_page() as (page, origin):
        await ask(page, HOSTILE)
        await page.until(STATS)
        assert await page.read(ANSWER) == HOSTILE
        assert await page.read("document.querySelector('.user .text').textContent") == HOSTILE
        inside = "document.querySelectorAll('.messages img, .messages script, .messages b').length"
        assert await page.read(inside) == 0
        await check_page(page, origin)


async def test_of_several_models_the_chosen_one_answers_and_its_engines_are_shown(
    open_page, bench
) -> None:
    models = [dataclasses.replace(bench.served, name=name) for name in ("first", "second")]
    directory = ModelDirectory(models, bench.handler.limits, bench.metrics)
    replicas = [
        make_replica("e1", "first", num_used_pages=11),
        make_replica("e2", "second", num_used_pages=22),
    ]
    web = WebSurface(page=load_page(), reader=FakeReader(LiveState(0, replicas)))
    used = "document.querySelector('[data-value=used]').textContent"
    async with open_page(models=directory, web=web) as (page, _):
        await page.until(f"{used} === '11'")
        await page.read("document.getElementById('model').focus()")
        await page.type("second")
        await page.until(f"{used} === '22'")
        await ask(page)
        await page.until(STATS)
        assert await page.read("document.querySelector('.assistant .who').innerText") == "second"


async def test_a_refusal_is_shown_and_the_conversation_goes_on(open_page, bench) -> None:
    bench.backend.refusal = ApiError(ApiErrorCode.OVERLOADED, "too many requests are waiting")
    async with open_page() as (page, _):
        await ask(page)
        failure = "document.querySelector('.failure')?.innerText ?? ''"
        await page.until(f"({failure}).includes('too many requests are waiting')")
        bench.backend.refusal = None
        await ask(page, "again")
        await page.until(f"document.querySelectorAll('.stats').length === 2 && {STATS}")
        assert await page.read("document.querySelectorAll('.failure').length") == 1


async def test_tokens_get_their_characters_however_text_and_tokens_are_cut(open_page) -> None:
    # An emoji of two tokens, a token without text, and one that the text does not have.
    pieces = [b"na", "ï".encode(), b"ve ", b"\xf0\x9f", b"\x99\x82", b"", b"<|x|>", b"\n end"]
    tokens = [{"bytes": list(piece), "token": "?", "logprob": -1} for piece in pieces]
    expected = ["na", "ï", "ve ", "🙂", "\n end"]
    async with open_page() as (page, _):
        found = await page.read(
            f"""(async () => {{
              const {{ Aligner }} = await import("/page/tokens.js");
              const [text, tokens] = ["naïve 🙂\\n end", {json.dumps(tokens)}];
              const found = new Set();
              for (let at = 0; at <= text.length; at += 1) {{
                for (let cut = 0; cut <= tokens.length; cut += 1) {{
                  const aligner = new Aligner();
                  const fresh = tokens.map((token) => ({{ ...token }}));
                  const parts = [
                    ...aligner.push(text.slice(0, at), fresh.slice(0, cut)),
                    ...aligner.push(text.slice(at), fresh.slice(cut)),
                  ];
                  found.add(JSON.stringify(parts.map((part) => part.text)) + aligner.rest);
                }}
              }}
              return [...found];
            }})()"""
        )
    assert [json.loads(one) for one in found] == [expected]


async def test_rates_are_of_the_time_between_two_reports_and_never_negative(open_page) -> None:
    async with open_page() as (page, _):
        found = await page.read(
            """(async () => {
              const { Rates } = await import("/page/rates.js");
              const rates = new Rates();
              const at = (pushed_s, num_steps, num_output_tokens, seconds) => ({
                replica: "e", pushed_s, num_steps, num_output_tokens,
                phases: [{ phase: "decode", num_measured_steps: num_steps, seconds,
                           least_seconds: seconds / 4 }],
              });
              const told = [at(1, 10, 100, 1), at(3, 20, 140, 3), at(3, 20, 140, 3),
                            at(4, 2, 6, 0.1), at(5, 2, 6, 0.1)];
              return told.map((replica) => {
                const { tokensPerSecond, phases } = rates.update([replica], "num_output_tokens");
                return [tokensPerSecond, phases.decode?.milliseconds ?? null];
              });
            })()"""
        )
    # The time before; two seconds; the same report again; a new engine; nothing done.
    assert found == [[0, 100], [20, 200], [20, 200], [0, 50], [0, None]]
