"""`python tests/clients/pydantic_ai_agent.py http://127.0.0.1:8000`: agents of Pydantic AI."""

import asyncio
import sys

from asked import ADA, CODE_QUESTION, FACTS, MODEL, WEATHER_QUESTION, Person
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.messages import ToolCallPart
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider
from pydantic_ai.settings import ModelSettings


async def check_stream(model, settings):
    agent = Agent(model, model_settings=settings)
    whole = await agent.run(CODE_QUESTION)
    async with agent.run_stream(CODE_QUESTION) as run:
        pieces = [piece async for piece in run.stream_text(delta=True, debounce_by=None)]
    assert len(pieces) > 3
    assert "".join(pieces) == whole.output
    assert whole.usage.output_tokens > 1


async def check_outputs(model, settings):
    for output in (NativeOutput(Person), ToolOutput(Person)):
        agent = Agent(model, output_type=output, model_settings=settings)
        assert (await agent.run(f"Extract: {FACTS}")).output == ADA, output


async def check_tools(model, settings):
    """The agent runs its function once, with the city that was asked for, and ends by itself."""
    cities = []
    agent = Agent(model, model_settings=settings)

    @agent.tool_plain
    def weather(city: str) -> str:
        """Tells the weather of a city."""
        cities.append(city)
        return f"rain in {city}, 12"

    run = await agent.run(WEATHER_QUESTION)
    assert cities == ["Paris"]
    assert "rain in Paris" in run.output
    parts = [part for message in run.all_messages() for part in message.parts]
    assert sum(isinstance(part, ToolCallPart) for part in parts) == 1
    again = await agent.run("And in Rome?", message_history=run.all_messages())
    assert again.output


async def run_all(url):
    provider = OpenAIProvider(base_url=f"{url}/v1", api_key="none")
    model = OpenAIChatModel(MODEL, provider=provider)
    settings = ModelSettings(temperature=0, max_tokens=200)
    await check_stream(model, settings)
    await check_outputs(model, settings)
    await check_tools(model, settings)


if __name__ == "__main__":
    asyncio.run(run_all(sys.argv[1]))
