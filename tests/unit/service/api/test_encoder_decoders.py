"""BART behind /v1/completions: the prompt is what its encoder reads."""

import openai
import pytest
import torch

from tests.fakes.engine_script import EngineScript, engine_bench
from tests.fakes.served_seq2seq import BART_EXCLUDED, tiny_bart
from workers.config import EngineConfig

pytestmark = pytest.mark.asyncio


@pytest.fixture(scope="module")
def model():
    return tiny_bart()


@pytest.fixture(scope="module")
def script(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bart")
    model.save_pretrained(folder)
    script = EngineScript(EngineConfig(model=str(folder), num_pages=64, max_running_requests=4))
    yield script
    script.close()


@pytest.fixture
def bench(tmp_path, script):
    return engine_bench(tmp_path, script)


def truth(model, source, num_tokens):
    """transformers' own tokens behind the start and the forced one."""
    with torch.inference_mode():
        whole = model.generate(
            torch.tensor([source]), do_sample=False, num_beams=1, max_new_tokens=num_tokens + 1
        )
    assert whole[0, :2].tolist() == [2, 1]
    return whole[0, 2:].tolist()


async def test_a_completion_is_what_transformers_generates_from_the_prompt(
    openai_client, bench, model, script
):
    source = bench.tokenizer.ids("the quick brown fox")
    answer = await openai_client.completions.create(
        model=script.engine.info.name,
        prompt="the quick brown fox",
        max_tokens=20,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    (choice,) = answer.choices
    expected = truth(model, source, 20)
    assert BART_EXCLUDED not in expected
    assert choice.token_ids == expected
    assert choice.prompt_token_ids == source
    assert answer.usage.prompt_tokens == len(source)
    assert answer.usage.completion_tokens == len(expected)


async def test_prompts_and_choices_are_read_each_and_streams_are_streamed(
    openai_client, bench, script
):
    asked = {"model": script.engine.info.name, "max_tokens": 8, "temperature": 0, "n": 2}
    whole = await openai_client.completions.create(prompt=["hello", "world, hello"], **asked)
    assert [one.index for one in whole.choices] == [0, 1, 2, 3]
    assert len({one.text for one in whole.choices[::2]}) == 2
    parts = dict.fromkeys(range(2), "")
    async for chunk in await openai_client.completions.create(prompt="hello", stream=True, **asked):
        for choice in chunk.choices:
            parts[choice.index] += choice.text
    assert list(parts.values()) == [whole.choices[0].text] * 2


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        ({"prompt": [7] * 65}, "context_length_exceeded", "prompt"),
        ({"prompt": "hello", "max_tokens": 63}, "context_length_exceeded", "max_tokens"),
        ({"prompt": "hello", "echo": True}, "unsupported_parameter", "echo"),
        (
            {"prompt": "hello", "extra_body": {"prompt_logprobs": 1}},
            "unsupported_parameter",
            "prompt_logprobs",
        ),
    ],
    ids=str,
)
async def test_what_an_encoder_decoder_cannot_do_is_refused_by_name(
    openai_client, script, asked, code, param
):
    with pytest.raises(openai.BadRequestError) as caught:
        await openai_client.completions.create(model=script.engine.info.name, **asked)
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_biases_leave_room_for_those_of_the_model(openai_client, script):
    asked = {"model": script.engine.info.name, "prompt": "hello", "max_tokens": 2}
    biases = {str(token_id): 1 for token_id in range(100, 399)}
    await openai_client.completions.create(logit_bias=biases, **asked)
    await openai_client.completions.create(logit_bias={**biases, str(BART_EXCLUDED): 1}, **asked)
    with pytest.raises(openai.BadRequestError, match="may have at most 299 entries") as caught:
        await openai_client.completions.create(logit_bias={**biases, "399": 1}, **asked)
    assert (caught.value.code, caught.value.param) == ("limit_exceeded", "logit_bias")


async def test_a_source_as_long_as_the_encoder_takes_leaves_the_decoder_its_context(
    openai_client, script
):
    answer = await openai_client.completions.create(
        model=script.engine.info.name, prompt=[7] * 64, max_tokens=62, temperature=0
    )
    assert 1 <= answer.usage.completion_tokens <= 62
    assert answer.usage.prompt_tokens == 64
