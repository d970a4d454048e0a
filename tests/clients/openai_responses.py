"""`python tests/clients/openai_responses.py http://127.0.0.1:8000`: OpenAI's client, Responses."""

import json
import sys
import threading
import time

import openai
import pytest
from pydantic import BaseModel, Field

MODEL = "builtin"
ASKED = {"model": MODEL, "temperature": 0, "max_output_tokens": 200}
QUESTION = "What does os.path.join do?"
WEATHER = {
    "type": "function",
    "name": "weather",
    "description": "Tells the weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}
FORCED = {"tools": [WEATHER], "tool_choice": {"type": "function", "name": "weather"}}


class City(BaseModel):
    name: str = Field(max_length=8)
    is_capital: bool


def check_text(client):
    whole = client.responses.create(input=QUESTION, **ASKED)
    assert whole.output_text
    assert whole.usage.output_tokens > 1
    with client.responses.stream(input=QUESTION, **ASKED) as stream:
        deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
        streamed = stream.get_final_response()
    assert len(deltas) > 3
    assert "".join(deltas) == streamed.output_text == whole.output_text
    assert streamed.status == whole.status


def check_tools(client):
    called = client.responses.create(input=QUESTION, **ASKED, **FORCED)
    (call,) = called.output
    assert set(json.loads(call.arguments)) == {"city"}
    with client.responses.stream(input=QUESTION, **ASKED, **FORCED) as stream:
        streamed = stream.get_final_response()
    assert streamed.output[0].arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    by_id = client.responses.create(
        input=[result], previous_response_id=called.id, tools=[WEATHER], tool_choice="none", **ASKED
    )
    user = {"role": "user", "content": QUESTION}
    by_hand = client.responses.create(
        input=[user, *called.output, result], tools=[WEATHER], tool_choice="none", **ASKED
    )
    assert by_id.output_text == by_hand.output_text != ""
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens


def check_parsing(client):
    parsed = client.responses.parse(input="Name a city.", text_format=City, **ASKED)
    assert isinstance(parsed.output_parsed, City)


def check_the_store(client):
    first = client.responses.create(input="My name is Ada.", **ASKED)
    second = client.responses.create(input="Who?", previous_response_id=first.id, **ASKED)
    assert second.usage.input_tokens > first.usage.input_tokens + first.usage.output_tokens
    assert client.responses.retrieve(second.id).output_text == second.output_text
    (item,) = client.responses.input_items.list(second.id).data
    assert item.content[0].text == "Who?"
    client.responses.delete(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.create(input="x", previous_response_id=second.id, **ASKED)
    unstored = client.responses.create(input="x", store=False, **ASKED)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unstored.id)


def check_cancelling(client):
    """From another thread, while the stream is read."""
    asked = {"model": MODEL, "input": QUESTION, "extra_body": {"ignore_eos": True}}
    cancelled = []
    with client.responses.create(stream=True, max_output_tokens=1500, **asked) as stream:
        for event in stream:
            if event.type == "response.created":
                args = (client, event.response.id, cancelled)
                canceller = threading.Thread(target=cancel, args=args)
                canceller.start()
    canceller.join()
    assert event.type == "response.incomplete"
    assert event.response.status == cancelled[0].status == "cancelled"
    assert event.response.usage.output_tokens < 1500
    assert client.responses.retrieve(event.response.id).status == "cancelled"


def check_the_background(client):
    begun = client.responses.create(input=QUESTION, background=True, **ASKED)
    assert begun.status == "in_progress"
    end_s = time.monotonic() + 60
    while (ended := client.responses.retrieve(begun.id)).status == "in_progress":
        assert time.monotonic() < end_s
        time.sleep(0.05)
    whole = client.responses.create(input=QUESTION, **ASKED)
    assert ended.output_text == whole.output_text
    asked = {"model": MODEL, "input": QUESTION, "extra_body": {"ignore_eos": True}}
    held = client.responses.create(background=True, max_output_tokens=1500, **asked)
    assert client.responses.cancel(held.id).status == "cancelled"


def check_a_stream_in_the_background(client):
    """A client whose connection is lost goes on where it was."""
    whole = client.responses.create(input=QUESTION, **ASKED)
    seen, asked = [], {"input": QUESTION, "background": True, "stream": True}
    with client.responses.create(**asked, **ASKED) as stream:
        for event in stream:
            seen.append(event)
            if event.type == "response.output_text.delta":
                break
    response_id, after = seen[0].response.id, seen[-1].sequence_number
    with client.responses.retrieve(response_id, stream=True, starting_after=after) as stream:
        seen += stream
    deltas = [event.delta for event in seen if event.type == "response.output_text.delta"]
    assert "".join(deltas) == seen[-1].response.output_text == whole.output_text
    again = client.responses.retrieve(response_id, stream=True, starting_after=after)
    assert next(iter(again)).delta == "".join(deltas[1:])


def cancel(client, response_id, cancelled):
    cancelled.append(client.responses.cancel(response_id))


def check_errors(client):
    for more, status in (
        ({"tools": [{"type": "web_search"}]}, openai.BadRequestError),
        ({"model": "another"}, openai.NotFoundError),
    ):
        with pytest.raises(status) as raised:
            client.responses.create(**{**ASKED, "input": "x", **more})
        assert raised.value.body["message"]


def main(url):
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    check_text(client)
    check_tools(client)
    check_parsing(client)
    check_the_store(client)
    check_cancelling(client)
    check_the_background(client)
    check_a_stream_in_the_background(client)
    check_errors(client)


if __name__ == "__main__":
    main(sys.argv[1])
