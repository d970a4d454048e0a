"""`python tests/clients/anthropic_messages.py http://127.0.0.1:8000`: the Anthropic client."""

import sys

import anthropic
import pytest

MODEL = "builtin"
USER = {"role": "user", "content": "What does os.path.join do?"}
WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
FORCED = {"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "weather"}}
GREEDY = {"extra_body": {"temperature": 0}}


def check_text(client):
    asked = {"model": MODEL, "max_tokens": 60, "messages": [USER], **GREEDY}
    whole = client.messages.create(**asked)
    (block,) = whole.content
    assert block.text
    assert whole.usage.output_tokens > 1
    with client.messages.stream(**asked) as stream:
        pieces = list(stream.text_stream)
        message = stream.get_final_message()
    assert len(pieces) > 3
    assert "".join(pieces) == message.content[0].text == block.text
    assert message.stop_reason == whole.stop_reason
    counted = client.messages.count_tokens(model=MODEL, messages=[USER])
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens


def check_tools(client):
    asked = {"model": MODEL, "max_tokens": 200, **FORCED, **GREEDY}
    message = client.messages.create(messages=[USER], **asked)
    assert message.stop_reason == "tool_use"
    (call,) = message.content
    assert set(call.input) == {"city"}
    with client.messages.stream(messages=[USER], **asked) as stream:
        streamed = stream.get_final_message()
    assert streamed.content[0].input == call.input
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "rain"}
    turns = [
        USER,
        {"role": "assistant", "content": message.content},
        {"role": "user", "content": [result]},
    ]
    again = {**asked, "tool_choice": {"type": "none"}}
    assert client.messages.create(messages=turns, **again).usage.output_tokens


def check_errors(client):
    image = {"type": "image", "source": {"type": "url", "url": "http://127.0.0.1/x.png"}}
    for messages, model, status in (
        ([{"role": "user", "content": [image]}], MODEL, anthropic.BadRequestError),
        ([USER], "another", anthropic.NotFoundError),
    ):
        with pytest.raises(status) as raised:
            client.messages.create(model=model, max_tokens=9, messages=messages)
        assert raised.value.body["error"]["message"]


def main(url):
    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0, timeout=120)
    check_text(client)
    check_tools(client)
    check_errors(client)


if __name__ == "__main__":
    main(sys.argv[1])
