"""`python tests/clients/openai_agents.py http://127.0.0.1:8000`: OpenAI's Agents SDK.

The model is made to call: a tool that was called is there no more, and once both were the run ends.
"""

import asyncio
import sys
from typing import Annotated

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    ToolsToFinalOutputResult,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import Field

MODEL = "builtin"
# Up to its first space: an answer that was cut is an error to this client.
ENDED = {"stop": [" "], "include_stop_str_in_output": True}
SHORT = ModelSettings(temperature=0, max_tokens=200, extra_body=ENDED)
FORCED = ModelSettings(
    temperature=0, max_tokens=200, tool_choice="required", parallel_tool_calls=False
)
Word = Annotated[str, Field(max_length=8)]


def make_agent(model, called):
    """called: what its tools were asked, by their names."""

    def tool(name, answer):
        def ask(city: Word) -> str:
            called[name] = city
            return answer

        return function_tool(
            ask,
            name_override=name,
            description_override=f"Tells the {name} of a city.",
            is_enabled=lambda context, agent: name not in called,
        )

    def end_once_both_were_called(context, results):
        is_over = len(called) == 2
        final = " and ".join(result.output for result in results)
        return ToolsToFinalOutputResult(is_final_output=is_over, final_output=final)

    return Agent(
        name="traveller",
        instructions="Ask the tools.",
        model=model,
        model_settings=FORCED,
        tools=[tool("weather", "rain"), tool("time", "noon")],
        tool_use_behavior=end_once_both_were_called,
        reset_tool_choice=False,
    )


async def check_two_tools(model):
    called = {}
    result = await Runner.run(make_agent(model, called), "Do I need a coat in Paris?", max_turns=4)
    assert set(called) == {"weather", "time"}
    assert result.final_output in ("rain", "noon")
    assert all(len(city) <= 8 for city in called.values())
    kinds = [item.type for item in result.new_items]
    assert kinds.count("tool_call_output_item") >= 2
    # Somebody else goes on with all of that.
    writer = Agent(name="writer", model=model, model_settings=SHORT)
    turns = [*result.to_input_list(), {"role": "user", "content": "So?"}]
    ended = await Runner.run(writer, turns, max_turns=1)
    assert ended.final_output
    assert ended.context_wrapper.usage.output_tokens > 1


async def check_streaming(model):
    called = {}
    streamed = Runner.run_streamed(make_agent(model, called), "And in Rome?", max_turns=4)
    kinds = [event.type async for event in streamed.stream_events()]
    assert set(called) == {"weather", "time"}
    assert kinds.count("raw_response_event") > 10
    assert "run_item_stream_event" in kinds


async def main(url):
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel):
        model = kind(model=MODEL, openai_client=client)
        await check_two_tools(model)
        await check_streaming(model)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
