"""Placeholders of unlike content: equal tokens, and nothing in common from there on."""

import random
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.content import ContentSpan
from workers.engine.protocol import GenerateRequest
from workers.errors import ErrorCode, RequestRejectedError
from workers.scheduler import content_keys, prefills_under_way, snapshot_memory
from workers.scheduler.content_keys import ContentKeys, with_keys

CAT, DOG = b"c" * 16, b"d" * 16
PLACEHOLDER = 9
# Three pages of text, 5 placeholders that begin in the fourth page, and text.
PROMPT = [*range(10, 24), *[PLACEHOLDER] * 5, *range(10, 19)]


def request(
    request_id: str, *digests: bytes, prompt: Sequence[int] = PROMPT, **sampling: Any
) -> GenerateRequest:
    """Each digest of 5 placeholders, from token 14 on."""
    spans = [ContentSpan(14 + 5 * i, 5, digest) for i, digest in enumerate(digests)]
    plain = make_request(request_id, list(prompt), **sampling)
    return msgspec.structs.replace(plain, content_spans=spans)


def num_cached(driver: Driver, *requests: GenerateRequest) -> list[int]:
    """Of each in turn."""
    for one in requests:
        driver.submit(one)
        driver.finish()
        assert driver.tokens(one.request_id) == run_alone(driver.config, one).token_ids
    return [driver.outputs[one.request_id][0].num_cached_tokens for one in requests]


@pytest.mark.parametrize("num_snapshots", [0, 8])
def test_a_prefix_is_found_as_far_as_content_is_equal(num_snapshots, monkeypatch) -> None:
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 4)
    driver = Driver(make_config(num_snapshots=num_snapshots))
    before = 12 if not num_snapshots else 0
    assert num_cached(driver, request("cat", CAT), request("dog", DOG)) == [0, before]
    # With states the second one has left a snapshot where it parted.
    assert num_cached(driver, request("text")) == [12]
    others = request("cat again", CAT), request("dog again", DOG), request("text again")
    assert num_cached(driver, *others) == [24, 24, 24]


def test_a_content_twice_is_no_longer_content() -> None:
    driver, prompt = Driver(make_config()), [*range(10, 24), *[PLACEHOLDER] * 10, 11, 12]
    once = msgspec.structs.replace(
        request("once", prompt=prompt), content_spans=[ContentSpan(14, 10, CAT)]
    )
    twice = request("twice", CAT, CAT, prompt=prompt)
    other = request("other", CAT, DOG, prompt=prompt)
    again = request("again", CAT, DOG, prompt=prompt)
    assert num_cached(driver, twice, once, other, again) == [0, 12, 16, 24]


@pytest.mark.parametrize(("digest", "num_rows"), [(CAT, 1), (DOG, 2)])
def test_only_a_prefix_of_equal_content_is_waited_for(digest, num_rows, monkeypatch) -> None:
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 16)
    driver = Driver(make_config())
    driver.submit(request("first", CAT), request("second", digest))
    plan = driver.launch()
    assert plan is not None
    assert plan.batch_size == num_rows


def test_tokens_reach_the_model_as_they_are() -> None:
    driver = Driver(make_config())
    driver.submit(request("cat", CAT))
    plan = driver.launch()
    assert plan is not None
    assert plan.input_ids.tolist() == PROMPT


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ([ContentSpan(0, 2, b"short")], "a digest has 16 bytes, not 5"),
        ([ContentSpan(3, 0, CAT)], "0 placeholders from token 3 on"),
        ([ContentSpan(-1, 2, CAT)], "2 placeholders from token -1 on"),
        ([ContentSpan(25, 4, CAT)], "not within the prompt's 28 tokens"),
        ([ContentSpan(4, 4, CAT), ContentSpan(7, 4, DOG)], "from token 7 on are not in order"),
    ],
)
def test_spans_that_fit_no_prompt_are_refused(spans, message) -> None:
    wrong = msgspec.structs.replace(request("r"), content_spans=spans)
    with pytest.raises(RequestRejectedError, match=message) as caught:
        Driver(make_config()).submit(wrong)
    assert (caught.value.code, caught.value.param) == (ErrorCode.INVALID_REQUEST, "content_spans")


def test_a_number_is_never_given_to_another_content(monkeypatch) -> None:
    monkeypatch.setattr(content_keys, "MAX_REMEMBERED", 2)
    keys = ContentKeys()

    def key(digest: bytes, num_tokens: int = 3) -> int:
        (run,) = keys.runs([ContentSpan(4, num_tokens, digest)])
        assert (run.start, run.stop) == (4, 4 + num_tokens)
        return run.key

    cat, dog = key(CAT), key(DOG)
    assert (key(CAT), key(DOG)) == (cat, dog)
    longer = key(CAT, num_tokens=4)  # forgets the cat
    assert key(DOG) == dog
    assert len({cat, dog, longer, key(CAT)}) == 4
    assert max(cat, dog, longer) < 0


def test_the_last_number_is_an_int32() -> None:
    keys = ContentKeys()
    keys._next = -(1 << 31)
    runs = keys.runs([ContentSpan(1, 2, CAT)])
    assert with_keys(np.arange(4, dtype=np.int32), runs).tolist() == [0, -(1 << 31), -(1 << 31), 3]
    with pytest.raises(RequestRejectedError, match="every number"):
        keys.runs([ContentSpan(1, 2, DOG)])


def content_before(one: GenerateRequest, stop: int) -> list[tuple[int, bytes]]:
    return [(span.start, span.digest) for span in one.content_spans if span.start < stop]


def check_shared_pages(driver: Driver, requests: dict[str, GenerateRequest]) -> int:
    """A page in two slots is of equal tokens and content. Returns how many there are."""
    table, page_size = driver.scheduler._table, driver.config.page_size
    owners: dict[int, tuple[list[int], list[tuple[int, bytes]]]] = {}
    num_shared = 0
    for one in table.requests():
        spec, slot = requests[one.request_id], one.slot
        for index in range(
            min(int(table.pages.num_pages[slot]), len(spec.prompt_token_ids) // page_size)
        ):
            stop = (index + 1) * page_size
            own = one.buffer[:stop].tolist(), content_before(spec, stop)
            page = int(table.pages.page_table[slot, index])
            assert owners.setdefault(page, own) == own
            num_shared += owners[page] is not own
    return num_shared


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("num_snapshots", [0, 9])
def test_no_two_requests_of_unlike_content_ever_share_a_page(
    page_size, num_snapshots, monkeypatch
) -> None:
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 4)
    monkeypatch.setattr(snapshot_memory, "BORDER_TOKENS", 4)
    monkeypatch.setattr(content_keys, "MAX_REMEMBERED", 3)
    rng = random.Random(page_size)
    config = make_config(
        page_size=page_size,
        num_pages=1 + 120 // page_size,
        max_step_tokens=24,
        num_snapshots=num_snapshots,
    )
    driver = Driver(config, is_overlapped=True, has_reserve=False)
    requests: dict[str, GenerateRequest] = {}
    num_shared = 0
    for index in range(60):
        digests = [rng.choice([CAT, DOG]) for _ in range(rng.choice([0, 1, 2]))]
        prompt = [*range(10, 24), *[PLACEHOLDER] * 10, *range(10, 10 + rng.randrange(1, 6))]
        one = request(
            f"r{index}", *digests, prompt=prompt, max_tokens=rng.randrange(1, 24), seed=index
        )
        requests[one.request_id] = one
        driver.submit(one)
        for _ in range(rng.randrange(4)):
            driver.step()
            num_shared += check_shared_pages(driver, requests)
    for _ in driver.steps():
        num_shared += check_shared_pages(driver, requests)
    for one in requests.values():
        assert driver.tokens(one.request_id) == run_alone(config, one).token_ids
    assert num_shared > 50
    assert driver.scheduler.stats().num_preemptions > 0
