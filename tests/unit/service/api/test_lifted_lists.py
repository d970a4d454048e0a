"""Long lists taken out of a body: what comes back is what a parser would have made of it."""

import json
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.api.body import MAX_OTHER_ITEMS, _parse_large_body, parse_body
from service.api.lifted_lists import LONG_BYTES, SHORT_BYTES, BrokenListError, lift_lists
from service.api.openai.chat import ChatCompletionRequest
from service.api.openai.completions import CompletionRequest
from service.api.openai.embeddings import EmbeddingRequest
from service.api.openai.tokenize import DetokenizeRequest
from service.errors import ApiError
from service.limits import Limits

LONG = list(range(100_000, 102_000))


def read(body, model=CompletionRequest):
    return parse_body(*_lifted(body, model))


def _lifted(body, model):
    rest, lifted = lift_lists(body, LONG_BYTES)
    return rest, model, lifted


def restored(body):
    rest, lifted = lift_lists(body, LONG_BYTES)

    def walk(value):
        if isinstance(value, dict):
            return {key: walk(item) for key, item in value.items()}
        if isinstance(value, list):
            return [walk(item) for item in value]
        return lifted.lists[value] if lifted.is_name(value) else value

    return walk(json.loads(rest)), lifted


strings = st.text(max_size=20) | st.sampled_from(["[", "]", "\\", '"', '\\"', "[1,2]", "\\\\"])
longs = st.integers(300, 1500).map(lambda n: list(range(1000, 1000 + n)))
values = st.recursive(
    strings | st.integers() | st.booleans() | st.none() | longs,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(strings, inner, max_size=4),
    max_leaves=12,
)


@given(value=values, is_compact=st.booleans(), is_ascii=st.booleans())
@settings(max_examples=60, deadline=None)
def test_nothing_but_long_lists_changes(value, is_compact, is_ascii):
    separators = (",", ":") if is_compact else None
    body = json.dumps(value, separators=separators, ensure_ascii=is_ascii).encode(
        "utf-8", "replace"
    )
    found, _ = restored(body)
    assert found == json.loads(body)


@pytest.mark.parametrize("offset", range(-3, 4))
def test_escapes_on_the_border_of_two_pieces(offset):
    text = "x" * ((64 << 10) - 12 + offset) + '\\\\"[' * 3
    body = json.dumps({"a": text, "prompt": LONG}, separators=(",", ":")).encode()
    found, lifted = restored(body)
    assert found == {"a": text, "prompt": LONG}
    assert lifted.num_items == len(LONG)


def test_prompts_and_tokens_come_back_as_they_were():
    assert read(json.dumps({"prompt": LONG}).encode()).prompt == LONG
    several = [LONG, [1, 2], LONG[::-1]]
    assert read(json.dumps({"prompt": several}).encode()).prompt == several
    assert read(json.dumps({"tokens": LONG}).encode(), DetokenizeRequest).tokens == LONG
    rng = random.Random(1)
    big = [rng.randrange(1 << 20) for _ in range(200_000)]
    assert read(json.dumps({"prompt": big}).encode()).prompt == big


@pytest.mark.parametrize(
    "prompt",
    [
        [*LONG, 1.5],
        [True, *LONG],
        [None, *LONG],
        ["text", LONG],
        [LONG, [*LONG, 0.5]],
        {"a": LONG},
    ],
)
def test_what_is_no_prompt_is_the_clients_error(prompt):
    with pytest.raises(ApiError) as raised:
        read(json.dumps({"prompt": prompt}).encode())
    assert (raised.value.code, raised.value.param) == ("invalid_request", "prompt")


@pytest.mark.parametrize("end", [b",", b", ", b",,3", b" 4", b",01", b",1e"])
def test_a_broken_list_is_not_json(end):
    body = b'{"prompt":[' + b",".join(b"%d" % i for i in LONG) + end + b"]}"
    with pytest.raises(BrokenListError):
        lift_lists(body, LONG_BYTES)


def test_a_name_that_a_client_writes_is_a_text():
    assert read(b'{"prompt": "00000000000000000000000000000000" }').prompt == "0" * 32


MANY = list(range(MAX_OTHER_ITEMS + 2))


@pytest.mark.parametrize("ids", [LONG, MANY])
@pytest.mark.parametrize("name", ["user", "stop", "cache_salt", "model", "session_id"])
def test_a_list_where_a_text_belongs_is_the_clients_error(name, ids):
    """The name in its place must not be taken for the text."""
    body = json.dumps({"prompt": "x", name: ids}).encode()
    with pytest.raises(ApiError) as raised:
        _parse_large_body(body, CompletionRequest, Limits())
    assert raised.value.code == "invalid_request"


@pytest.mark.parametrize("ids", [LONG, MANY])
def test_a_list_is_no_message(ids):
    body = json.dumps({"messages": [{"role": "user", "content": ids}]}).encode()
    with pytest.raises(ApiError) as raised:
        _parse_large_body(body, ChatCompletionRequest, Limits())
    assert raised.value.code == "invalid_request"


def test_short_lists_beside_a_long_text_are_what_they_are():
    messages = [{"role": "user", "content": "x" * (64 << 10)}]
    fields = {"stop_token_ids": LONG, "chat_template_kwargs": {"pages": LONG}}
    body = json.dumps({"messages": messages, **fields}).encode()
    parsed = _parse_large_body(body, ChatCompletionRequest, Limits())
    assert parsed.stop_token_ids == LONG
    assert parsed.chat_template_kwargs == {"pages": LONG}


NUM_LISTS = Limits().max_inputs


def test_thousands_of_short_lists_are_prompts_too():
    """As a client sends them that counts tokens itself: 200 of each text, in less than 1 KiB."""
    inputs = [list(range(1000 + i, 1200 + i)) for i in range(NUM_LISTS)]
    body = json.dumps({"input": inputs}, separators=(",", ":")).encode()
    assert len(body) < NUM_LISTS * LONG_BYTES
    assert _parse_large_body(body, EmbeddingRequest, Limits()).input == inputs


def test_short_lists_that_are_no_prompts_stay_where_that_suffices():
    body = json.dumps({"prompt": MANY, "stop_token_ids": list(range(100, 180))}).encode()
    assert _parse_large_body(body, CompletionRequest, Limits()).stop_token_ids[-1] == 179


def test_lists_of_no_more_than_the_shortest_are_few_values_however_many_they_are():
    inputs = [[1] * (SHORT_BYTES // 2 - 1)] * NUM_LISTS
    body = json.dumps({"input": inputs}, separators=(",", ":")).encode()
    assert _parse_large_body(body, EmbeddingRequest, Limits()).input == inputs
