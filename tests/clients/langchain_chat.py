"""`python tests/clients/langchain_chat.py http://127.0.0.1:8000`: LangChain."""

import asyncio
import sys

from asked import ADA, CODE_QUESTION, FACTS, MODEL, WEATHER_QUESTION, Person
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAIEmbeddings


@tool
def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"rain in {city}, 12"


def check_text(model):
    whole = model.invoke(CODE_QUESTION)
    chunks = list(model.stream(CODE_QUESTION))
    assert len(chunks) > 3
    assert "".join(chunk.content for chunk in chunks) == whole.content
    assert whole.usage_metadata["output_tokens"] > 1
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    batch = model.batch([CODE_QUESTION, "Hello!"])
    assert batch[0].content == whole.content
    assert asyncio.run(model.ainvoke("Hello!")).content == batch[1].content


def check_tools(model):
    """The model asks for the tool, gets its result, and answers with it."""
    bound = model.bind_tools([weather])
    messages = [HumanMessage(WEATHER_QUESTION)]
    asked = bound.invoke(messages)
    (call,) = asked.tool_calls
    assert (call["name"], call["args"]) == ("weather", {"city": "Paris"})
    streamed = None
    for chunk in bound.stream(messages):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.tool_calls[0]["args"] == call["args"]
    result = weather.invoke(call)
    assert isinstance(result, ToolMessage)
    answer = bound.invoke([*messages, asked, result])
    assert not answer.tool_calls
    assert "rain in Paris" in answer.content
    forced = model.bind_tools([weather], tool_choice="weather").invoke("Hello!")
    assert forced.tool_calls[0]["name"] == "weather"


def check_structured_output(model):
    for method in ("json_schema", "function_calling"):
        found = model.with_structured_output(Person, method=method).invoke(f"Extract: {FACTS}")
        assert found == ADA, method
    words = f"{FACTS} Answer in JSON with the keys name, age and city."
    assert model.with_structured_output(Person, method="json_mode").invoke(words) == ADA
    *_, last = model.with_structured_output(Person).stream(f"Extract: {FACTS}")
    assert last == ADA


def check_embeddings(url):
    # Else it cuts texts by the tokens of OpenAI's own models.
    embeddings = OpenAIEmbeddings(
        model=MODEL, base_url=f"{url}/v1", api_key="none", check_embedding_ctx_length=False
    )
    first, second = embeddings.embed_documents(["import os", "import sys"])
    assert first != second
    assert len(first) == len(embeddings.embed_query("import os"))


def main(url):
    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key="none",
        temperature=0,
        max_tokens=200,
        max_retries=0,
    )
    check_text(model)
    check_embeddings(url)
    check_structured_output(model)
    check_tools(model)


if __name__ == "__main__":
    main(sys.argv[1])
