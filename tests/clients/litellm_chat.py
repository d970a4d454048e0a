"""`python tests/clients/litellm_chat.py http://127.0.0.1:8000`: LiteLLM."""

import asyncio
import json
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it asks the internet when imported

import litellm
import pytest
from asked import ADA, CODE_QUESTION, FACTS, MODEL, WEATHER, WEATHER_QUESTION, Person

QUESTION = [{"role": "user", "content": CODE_QUESTION}]


def check_text(client):
    whole = litellm.completion(**client, messages=QUESTION, max_tokens=60)
    text = whole.choices[0].message.content
    usage = {"stream_options": {"include_usage": True}}
    chunks = list(
        litellm.completion(**client, messages=QUESTION, max_tokens=60, stream=True, **usage)
    )
    pieces = [chunk.choices[0].delta.content for chunk in chunks if chunk.choices]
    assert "".join(filter(None, pieces)) == text
    rebuilt = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert rebuilt.usage.completion_tokens == whole.usage.completion_tokens
    later = asyncio.run(litellm.acompletion(**client, messages=QUESTION, max_tokens=60))
    assert later.choices[0].message.content == text
    named = {**client, "model": f"text-completion-openai/{MODEL}"}
    assert litellm.text_completion(**named, prompt="import ", max_tokens=8).choices[0].text


def check_tools(client):
    messages = [{"role": "user", "content": WEATHER_QUESTION}]
    answer = litellm.completion(**client, messages=messages, tools=[WEATHER], max_tokens=200)
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert json.loads(call.function.arguments) == {"city": "Paris"}
    messages += [message, {"role": "tool", "tool_call_id": call.id, "content": "rain, 12"}]
    final = litellm.completion(**client, messages=messages, tools=[WEATHER], max_tokens=200)
    assert "rain" in final.choices[0].message.content


def check_structured_output(client):
    messages = [{"role": "user", "content": f"Extract: {FACTS}"}]
    answer = litellm.completion(**client, messages=messages, response_format=Person, max_tokens=200)
    assert Person.model_validate_json(answer.choices[0].message.content) == ADA


def check_embeddings(client):
    vectors = litellm.embedding(**client, input=["import os", "import sys"]).data
    assert len(vectors[0]["embedding"]) == len(vectors[1]["embedding"]) > 100


def check_errors(client):
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(**{**client, "model": "openai/another"}, messages=QUESTION)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**client, messages=[{"role": "user", "content": "word " * 4000}])


def main(url):
    client = {"model": f"openai/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    check_embeddings(client)
    client |= {"temperature": 0, "num_retries": 0}
    check_text(client)
    check_errors(client)
    check_structured_output(client)
    check_tools(client)


if __name__ == "__main__":
    main(sys.argv[1])
