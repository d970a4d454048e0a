"""The page at `GET /` of a real service, in a real browser, by what a person sees and does."""

import asyncio
import json

import jsonschema
import pytest
import pytest_asyncio

from tests.browser import open_browser
from tests.integration.services import running_service
from tests.page_checks import check_page
from tests.programs import needed, skip_without

pytestmark = [pytest.mark.asyncio, skip_without("chromium")]

ANSWER = "document.querySelector('.message.assistant:last-child .text').textContent"
STATS = "document.querySelector('.message.assistant:last-child .stats').textContent"
TOKENS = "document.querySelectorAll('.message.assistant:last-child .token')"
TIP = "(e => e.hidden ? '' : e.innerText)(document.querySelector('#tip'))"
FOCUS = "document.activeElement"
# Seen by the page itself: on a busy machine a whole answer comes between two questions from here.
WATCH_LENGTHS = f"""
(() => {{
    window.lengths = new Set();
    const note = () => {{
        if (document.querySelector('.assistant .text')) lengths.add({ANSWER}.length);
    }};
    const of = {{ subtree: true, childList: true, characterData: true }};
    new MutationObserver(note).observe(document.getElementById('messages'), of);
}})()
"""


def number(name):
    """What the panel shows under a name, as a number; NaN before there is one."""
    return (
        f"parseFloat(document.querySelector('[data-value={name}]').textContent.replace(/,/g, ''))"
    )


@pytest.fixture(scope="module")
def service(ray_session):
    engine = {"kv_cache_bytes": 40 << 20, "page_size": 16, "speculative": "ngram"}
    # Of no real device: what share of them is reached is not what is tested.
    metrics = {
        "port": 18902,
        "push_interval_s": 0.2,
        "peak_bytes_per_s": 1e11,
        "peak_flops_per_s": 1e12,
    }
    with running_service("page", 18900, engine=engine, metrics=metrics) as running:
        yield running


@pytest_asyncio.fixture
async def page(service, tmp_path):
    """The page, open and live; checked for what must always be true when the test has ended."""
    async with open_browser(needed("chromium"), tmp_path) as browser:
        await browser.resize(1440, 900)
        await browser.open(f"{service.url}/")
        await browser.until("document.querySelector('#pulse').dataset.state === 'live'")
        yield browser
        await check_page(browser, service.url)


async def ask(page, text):
    """Type into what has the focus, as it does when the page opens."""
    await page.until(f"{FOCUS}.id === 'prompt'")
    await page.type(text)
    await page.press("Enter")


async def tick(page, element_id):
    await page.click(f"document.getElementById('{element_id}')")


async def open_options(page, panel):
    await page.click(f"document.querySelector('[aria-controls={panel}]')")
    await page.until(f"document.getElementById('{panel}').checkVisibility()")


async def test_a_question_is_typed_and_its_answer_streams_in_with_probabilities(page) -> None:
    await page.read(WATCH_LENGTHS)
    # Drawn at random: what len does is told in nine tokens at times.
    await ask(page, "Write the function textwrap.dedent.")
    assert "tokens/s" in await page.until(STATS)
    assert await page.read("lengths.size") > 2, "the answer came in one piece"
    assert await page.read(f"{TOKENS}.length") > 10
    written = await page.read(f"[...{TOKENS}].map(e => e.textContent).join('')")
    assert written == await page.read(ANSWER), "every character belongs to a token"
    await page.point_at(f"{TOKENS}[3]")
    told = await page.until(TIP)
    percents = [float(word) for word in told.replace("%", " ").split() if _is_number(word)]
    assert len(percents) >= 5
    assert all(0 <= percent <= 100 for percent in percents)
    assert sum(percents[1:]) <= 100.5


def _is_number(word):
    return word.replace(".", "", 1).isdigit() and "." in word


async def test_tokens_are_reached_and_walked_by_keyboard(page) -> None:
    await ask(page, "What does len do?")
    await page.until(STATS)
    while not await page.read(f"{FOCUS}.classList.contains('token')"):
        await page.press("Tab", shift=True)
    first = await page.until(TIP)
    await page.press("ArrowRight")
    second = await page.until(TIP)
    assert first != second
    assert await page.read(f"{FOCUS} === {TOKENS}[1]")
    await page.press("ArrowLeft")
    assert await page.read(f"{FOCUS} === {TOKENS}[0]")
    await page.press("End")
    assert await page.read(f"{FOCUS} === {TOKENS}[{TOKENS}.length - 1]")
    await page.press("Escape")
    await page.until(f"!{TIP}")


async def test_the_panel_shows_what_the_engine_does_while_it_answers(page) -> None:
    before = await page.read(number("cached"))
    await ask(page, "Write the function textwrap.dedent.")
    await page.until(f"{number('rate')} > 0")
    await page.until(f"{number('cached')} > {before}")
    for phase in ("extend", "decode", "verify"):
        figure = f"document.querySelector('[data-figure={phase}]')"
        text = await page.until(f"{figure}.innerText.includes('roofline') && {figure}.innerText")
        assert float(text.split()[0]) > 0
        assert await page.read(f"{figure}.querySelector('path:not(.area)').getAttribute('d')")
    assert "guesses were right" in await page.read("document.querySelector('.panel').innerText")
    assert await page.read("document.querySelectorAll('.tiles .cached').length") > 0
    await page.until(STATS)
    # The same beginning again is found in memory, of how much more is drawn at random.
    await ask(page, "Write the function textwrap.dedent.")
    told = await page.until(
        f"document.querySelectorAll('.message.assistant').length === 2 && {STATS}"
    )
    assert int(told.split(" · ")[-1].split()[0]) >= 16
    await page.until(f"{number('hits')} > 0")


async def test_an_answer_obeys_the_schema_that_is_given(page) -> None:
    await open_options(page, "panel-schema")
    await tick(page, "use_schema")
    schema = json.loads(await page.read("document.getElementById('schema').value"))
    await page.click("document.getElementById('prompt')")
    await ask(page, "Rate the json module.")
    await page.until(STATS)
    jsonschema.validate(json.loads(await page.read(ANSWER)), schema)


async def test_a_suggestion_sets_what_it_needs_and_is_asked(page) -> None:
    chips = "[...document.querySelectorAll('.suggestions button')]"
    await page.click(f"{chips}.find(e => e.innerText.includes('JSON'))")
    await page.until(STATS)
    assert not await page.read("document.getElementById('schema-mark').hidden")
    schema = json.loads(await page.read("document.getElementById('schema').value"))
    jsonschema.validate(json.loads(await page.read(ANSWER)), schema)


async def test_a_schema_that_is_no_json_is_said_and_the_question_is_kept(page) -> None:
    await open_options(page, "panel-schema")
    await tick(page, "use_schema")
    await page.click("document.getElementById('schema')")
    await page.type("}")
    await page.click("document.getElementById('prompt')")
    await ask(page, "Rate it.")
    await page.until("document.getElementById('schema-error').innerText.includes('no JSON')")
    assert await page.read("document.getElementById('prompt').value") == "Rate it."
    assert await page.read("document.querySelectorAll('.message').length") == 0


async def test_a_tool_is_called_and_its_result_goes_back(page) -> None:
    await open_options(page, "panel-tools")
    await page.read("document.getElementById('tool_choice').focus()")
    await page.type("must")
    assert await page.read("document.getElementById('tool_choice').value") == "required"
    await page.click("document.getElementById('prompt')")
    await ask(page, "How is the weather in Oslo?")
    call = "document.querySelector('.call')"
    await page.until(f"{call}?.querySelector('form')")
    assert "Calls get_weather" in await page.read(f"{call}.innerText")
    arguments = json.loads(await page.read(f"{call}.querySelector('pre').textContent"))
    assert list(arguments) == ["city"]
    await page.click(f"{call}.querySelector('input')")
    await page.type("4 degrees, rain")
    await page.press("Enter")
    await page.until("document.querySelectorAll('.message.assistant').length === 2")
    await page.until(STATS)
    assert "4 degrees, rain" in await page.read("document.querySelector('.tool').innerText")


@pytest.mark.parametrize("by", ["the button", "Escape"])
async def test_an_answer_is_stopped_for_the_server_too(page, service, by) -> None:
    await open_options(page, "panel-sampling")
    await page.click("document.getElementById('max_tokens')")
    await page.read("document.getElementById('max_tokens').select()")
    await page.type("1900")
    await page.click("document.getElementById('prompt')")
    await ask(page, "Write the class argparse.ArgumentParser.")
    await page.until(f"{ANSWER}.length > 5")
    if by == "Escape":
        await page.press("Escape")
    else:
        await page.click("document.getElementById('stop')")
    await page.until("document.getElementById('stop').hidden")
    assert await page.read(f"{FOCUS}.id") == "prompt"
    async with asyncio.timeout(60):
        while service.metric("tessera_running_requests"):
            await asyncio.sleep(0.1)


async def test_everything_is_reached_by_tab_in_the_order_in_which_it_is_read(page) -> None:
    order, rings = [], []
    await page.read("document.querySelector('.skip').focus()")
    for _ in range(12):
        await page.press("Tab")
        order.append(await page.read(f"{FOCUS}.innerText || {FOCUS}.id || {FOCUS}.ariaLabel"))
        # The message field's ring is drawn around the form that it fills.
        ringed = f"[{FOCUS}, {FOCUS}.closest('.send')].filter(e => e)"
        styles = f"{ringed}.map(e => getComputedStyle(e).outlineStyle)"
        rings.append("solid" in await page.read(styles))
    expected = ["builtin", "New chat", "Sampling", "Tools", "JSON schema", "System prompt"]
    found = [name.split("\n")[0].strip() for name in order]
    assert [name for name in found if name in expected] == expected
    assert found.index("prompt") > found.index("System prompt")
    assert all(rings)


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [400, 1440])
async def test_it_is_legible_narrow_and_wide_light_and_dark(page, service, width, dark) -> None:
    await page.resize(width, 850, dark=dark)
    await ask(page, "<b>What</b> is <img src=x onerror=alert(1)> this?")
    await page.until(STATS)
    assert "<b>What</b>" in await page.read("document.querySelector('.user').innerText")
    await open_options(page, "panel-sampling")
    await check_page(page, service.url)
