"""SGLang's /generate: what its clients send and read."""

import json

import pytest

from service.api.sglang.renderer import GenerateRenderer
from service.api.sglang.requests import DEFAULT_MAX_NEW_TOKENS, GenerateBody
from service.handler.events import ChoiceDelta, TokenLogprob, TopLogprob
from service.handler.generation import GenerationInfo
from tests.fakes.loop_probe import MAX_UNITS, held_units
from tests.fakes.text import ANSWER

pytestmark = pytest.mark.asyncio
NUM_LONG = 4096
BODY = {"text": "hi", "sampling_params": {"max_new_tokens": 50, "temperature": 0}}


async def generate(client, **extra):
    answer = await client.post("/generate", json={**BODY, **extra})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_a_text_gives_a_text_its_tokens_and_what_is_known_of_it(client, bench):
    answer = await generate(client, rid="mine")
    ids = [*bench.tokenizer.ids(ANSWER), 2]
    assert answer["text"] == ANSWER
    assert answer["output_ids"] == ids
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "stop", "matched": 2}
    assert meta["prompt_tokens"] == len(bench.tokenizer.ids("hi"))
    assert meta["completion_tokens"] == len(ids)
    assert meta["cached_tokens"] == 0


async def test_sampling_goes_to_the_engine_under_its_own_names(client, bench):
    sampling = {
        "max_new_tokens": 7,
        "min_new_tokens": 2,
        "top_k": -1,
        "top_p": 0.5,
        "min_p": 0.1,
        "repetition_penalty": 1.5,
        "stop_token_ids": [9],
        "sampling_seed": 4,
        "logit_bias": {"5": 1.0},
        "regex": "[a-z]+",
    }
    await generate(client, sampling_params=sampling)
    (sent,) = bench.backend.requests
    assert (sent.sampling.max_tokens, sent.sampling.min_tokens, sent.sampling.seed) == (7, 2, 4)
    assert (sent.sampling.top_p, sent.sampling.min_p, sent.sampling.top_k) == (0.5, 0.1, -1)
    assert (sent.sampling.stop_token_ids, sent.sampling.logit_bias) == ((9,), {5: 1.0})
    assert sent.grammar


@pytest.mark.parametrize(
    "constraint",
    [{"json_schema": '{"type": "object"}'}, {"ebnf": 'root ::= "a"'}, {"regex": "a"}],
)
async def test_each_constraint_is_one(client, bench, constraint):
    await generate(client, sampling_params=constraint)
    assert bench.backend.requests[0].grammar


async def test_several_prompts_or_choices_are_a_list(client, bench):
    answer = await generate(client, text=["hi", "there"], sampling_params={"n": 2})
    assert [one["text"] for one in answer] == [ANSWER] * 4
    answer = await generate(client, text=None, input_ids=[[5, 6], [7]])
    assert [one["meta_info"]["prompt_tokens"] for one in answer] == [2, 1]
    answer = await generate(client, text=None, input_ids=[5, 6])
    assert answer["text"] == ANSWER


async def test_log_probabilities_are_triples(client, bench):
    answer = await generate(
        client,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
        sampling_params={"max_new_tokens": 2},
    )
    meta = answer["meta_info"]
    first = bench.tokenizer.ids(ANSWER)[0]
    text = bench.handler.token_bytes([first])[0].decode()
    assert meta["output_token_logprobs"][0] == [-0.5, first, text]
    assert len(meta["output_token_logprobs"]) == len(meta["output_top_logprobs"]) == 2
    assert len(meta["output_top_logprobs"][0]) == 2
    prompt = bench.tokenizer.ids("hi")
    assert [one[1] for one in meta["input_token_logprobs"]] == prompt
    assert meta["input_token_logprobs"][0][0] is None
    plain = await generate(client, return_logprob=True)
    assert "input_token_logprobs" not in plain["meta_info"]
    named = await generate(client, return_logprob=True, token_ids_logprob=[9, 8])
    assert "output_token_ids_logprobs" in named["meta_info"]
    assert bench.backend.requests[-1].sampling.logprob_token_ids == (9, 8)


async def test_every_event_has_all_there_is_so_far(client, bench):
    response = await client.post("/generate", json={**BODY, "stream": True})
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    parsed = [json.loads(event[6:]) for event in events[:-2]]
    texts = [event["text"] for event in parsed]
    assert texts[-1] == ANSWER
    assert all(later.startswith(text) for text, later in zip(texts, texts[1:], strict=False))
    assert parsed[-1]["output_ids"] == [*bench.tokenizer.ids(ANSWER), 2]
    assert [event["meta_info"]["finish_reason"] for event in parsed][:-1] == [None] * (
        len(parsed) - 1
    )
    assert parsed[-1]["meta_info"]["completion_tokens"] == len(parsed[-1]["output_ids"])


async def test_a_stop_string_is_kept_where_it_is_not_trimmed(client):
    sampling = {"stop": "world", "max_new_tokens": 50}
    answer = await generate(client, sampling_params=sampling)
    assert answer["text"] == ANSWER[: ANSWER.index("world")]
    assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": "world"}
    answer = await generate(client, sampling_params={**sampling, "no_stop_trim": True})
    assert answer["text"].endswith("world")


@pytest.mark.parametrize(
    ("extra", "code", "param"),
    [
        ({"text": None}, "invalid_request", "text"),
        ({"input_ids": [1]}, "invalid_request", "text"),
        ({"text": [1, 2]}, "invalid_request", "text"),
        ({"bogus": 1}, "unknown_parameter", "bogus"),
        ({"sampling_params": {"bogus": 1}}, "unknown_parameter", "sampling_params.bogus"),
        (
            {"sampling_params": {"stop_regex": "a"}},
            "unsupported_parameter",
            "sampling_params.stop_regex",
        ),
        ({"image_data": "x"}, "unsupported_parameter", "image_data"),
        (
            {"sampling_params": {"regex": "a", "ebnf": "b"}},
            "invalid_request",
            "sampling_params.ebnf",
        ),
        (
            {"return_logprob": True, "logprob_start_len": 0, "stream": True},
            "invalid_request",
            "logprob_start_len",
        ),
    ],
)
async def test_what_cannot_be_is_named(client, extra, code, param):
    answer = await client.post("/generate", json={**BODY, **extra})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, param)


async def test_no_sampling_parameters_are_the_defaults(client, bench):
    await generate(client, sampling_params=None)
    assert bench.backend.requests[-1].sampling.max_tokens == DEFAULT_MAX_NEW_TOKENS


@pytest.mark.parametrize("write", [dict, json.dumps])
async def test_a_structural_tag_is_a_constraint(client, bench, write):
    tag = {"type": "structural_tag", "format": {"type": "const_string", "value": "yes"}}
    await generate(client, sampling_params={"structural_tag": write(tag)})
    assert "yes" in bench.backend.requests[-1].grammar
    both = {"structural_tag": write(tag), "regex": "a"}
    answer = await client.post("/generate", json={**BODY, "sampling_params": both})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "sampling_params.structural_tag")


async def test_events_with_log_probabilities_of_all_tokens_do_not_hold_the_loop(bench):
    """Every event has all of them, so that the last one is the largest."""
    sampling = {"max_new_tokens": NUM_LONG}
    body = GenerateBody.model_validate(
        {**BODY, "stream": True, "return_logprob": True, "top_logprobs_num": 20,
         "sampling_params": sampling}
    )  # fmt: skip
    info = GenerationInfo("r", "tiny", 0, [[5]])
    top = tuple(TopLogprob(7, b"x", -1.5) for _ in range(20))
    entry = TokenLogprob(7, b"x", -1.5, 1, top)
    renderer = GenerateRenderer(body, info)
    renderer.chunk(ChoiceDelta(0, "x" * NUM_LONG, [7] * NUM_LONG, [entry] * NUM_LONG), None)

    async def one_more():
        return renderer.chunk(ChoiceDelta(0, "x", [7], [entry]), None)

    event, held = await held_units(one_more)
    assert held < MAX_UNITS
    meta = json.loads(event[6:])["meta_info"]
    num_tokens = meta["completion_tokens"]
    assert num_tokens > NUM_LONG
    assert [len(meta[f"output_{name}_logprobs"]) for name in ("token", "top")] == [num_tokens] * 2
    assert len(meta["output_top_logprobs"][-1]) == 20


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"sampling_params": {"temperature": -1}}, "sampling_params.temperature"),
        ({"sampling_params": {"max_new_tokens": 10_000}}, "sampling_params.max_new_tokens"),
        ({"sampling_params": {"n": 100}}, "sampling_params.n"),
        ({"sampling_params": {"logit_bias": {"x": 1}}}, "sampling_params.logit_bias"),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"rid": "x" * 129}, "rid"),
        ({"text": ""}, "text"),
    ],
)
async def test_parameters_are_named_as_they_were_written(client, extra, param):
    answer = await client.post("/generate", json={**BODY, **extra})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
