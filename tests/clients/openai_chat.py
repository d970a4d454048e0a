"""`python tests/clients/openai_chat.py http://127.0.0.1:8000`: OpenAI, but for responses."""

import json
import math
import sys

import openai
import pytest
from asked import ADA, CODE_QUESTION, FACTS, MODEL, WEATHER, WEATHER_QUESTION, Person

QUESTION = [{"role": "user", "content": CODE_QUESTION}]
GREEDY = {"model": MODEL, "temperature": 0}


def check_chat(client):
    asked = {**GREEDY, "messages": QUESTION, "max_tokens": 60}
    whole = client.chat.completions.create(**asked, logprobs=True, top_logprobs=2)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert len(choice.logprobs.content) == whole.usage.completion_tokens
    assert all(one.top_logprobs[0].token == one.token for one in choice.logprobs.content)
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(client.chat.completions.create(**asked, **usage, stream=True))
    pieces = [one.delta.content for chunk in chunks for one in chunk.choices if one.delta.content]
    assert len(pieces) > 3
    assert "".join(pieces) == choice.message.content
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    several = client.chat.completions.create(
        model=MODEL, messages=QUESTION, n=3, seed=1, max_tokens=20
    )
    assert len({one.message.content for one in several.choices}) > 1


def check_parse(client):
    asked = {**GREEDY, "messages": [{"role": "user", "content": f"Extract: {FACTS}"}]}
    answer = client.chat.completions.parse(**asked, response_format=Person)
    assert answer.choices[0].message.parsed == ADA
    with client.chat.completions.stream(**asked, response_format=Person) as stream:
        events = list(stream)
    done = next(event for event in events if event.type == "content.done")
    assert done.parsed == ADA
    names = [e.parsed.get("name") for e in events if e.type == "content.delta" and e.parsed]
    assert "Ada" in names  # it can be shown before the answer has ended


def check_tools(client):
    """Whether to call is the model's choice; its answer says what the function said."""
    asked = {**GREEDY, "tools": [WEATHER], "max_tokens": 200}
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    with client.chat.completions.stream(**asked, messages=messages) as stream:
        deltas = [e.arguments_delta for e in stream if e.type.endswith("arguments.delta")]
        message = stream.get_final_completion().choices[0].message
    (call,) = message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    assert len(deltas) > 1
    assert "".join(deltas) == call.function.arguments
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": "rain, 12"},
    ]
    final = client.chat.completions.create(**asked, messages=messages).choices[0]
    assert final.finish_reason == "stop"
    assert "rain" in final.message.content
    other = client.chat.completions.create(**asked, messages=QUESTION).choices[0]
    assert not other.message.tool_calls


def check_forced_tools(client):
    asked = {**GREEDY, "messages": QUESTION, "max_tokens": 200}
    forced = {"type": "function", "function": {"name": "weather"}}
    for choice in (forced, "required"):
        answer = client.chat.completions.create(**asked, tools=[WEATHER], tool_choice=choice)
        (call,) = answer.choices[0].message.tool_calls[:1]
        assert set(json.loads(call.function.arguments)) == {"city"}
    told = client.chat.completions.create(**asked, tools=[WEATHER], tool_choice="none")
    untold = client.chat.completions.create(**asked)
    assert told.choices[0].message.content == untold.choices[0].message.content


def check_embeddings(client):
    texts = ["import os", "import sys", "a story about a garden"]
    packed = client.embeddings.create(model=MODEL, input=texts)  # base64, as this client asks
    plain = client.embeddings.create(model=MODEL, input=texts, encoding_format="float")
    vectors = [one.embedding for one in packed.data]
    assert [one.index for one in packed.data] == [0, 1, 2]
    for vector, other in zip(vectors, plain.data, strict=True):
        assert vector == pytest.approx(other.embedding, abs=1e-6)
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-4)
    near, far = (sum(map(float.__mul__, vectors[0], vectors[i])) for i in (1, 2))
    assert near > far
    assert packed.usage.prompt_tokens > 3


def check_errors(client):
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="another", messages=QUESTION)
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**{**GREEDY, "temperature": -1}, messages=QUESTION)
    assert caught.value.param == "temperature"


def main(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    assert [model.id for model in client.models.list()] == [MODEL]
    check_chat(client)
    check_forced_tools(client)
    check_embeddings(client)
    check_errors(client)
    check_parse(client)
    check_tools(client)


if __name__ == "__main__":
    main(sys.argv[1])
