"""`python tests/clients/grpc_inference.py 127.0.0.1:9000`: grpcio with the generated stubs."""

import json
import math
import sys

import grpc
from asked import ADA, CODE_QUESTION, FACTS, WEATHER, WEATHER_QUESTION, Person

from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc

TIMEOUT_S = 60


def asked(question, max_tokens=200):
    request = pb.GenerateRequest(sampling={"max_tokens": max_tokens, "temperature": 0.0})
    request.chat.messages.add(role="user", content=question)
    return request


def with_tool(request):
    function = WEATHER["function"]
    schema = json.dumps(function["parameters"])
    request.chat.tools.add(
        name=function["name"], description=function["description"], parameters_json=schema
    )
    return request


def check_text(stub):
    whole = stub.Generate(asked(CODE_QUESTION, 60), timeout=TIMEOUT_S)
    chunks = list(stub.GenerateStream(asked(CODE_QUESTION, 60), timeout=TIMEOUT_S))
    assert "".join(chunk.choice.text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens > 1
    assert [model.name for model in stub.ListModels(pb.ListModelsRequest()).models] == ["builtin"]


def check_schema(stub):
    request = asked(f"Extract: {FACTS}")
    request.json_schema.schema = json.dumps(Person.model_json_schema())
    (choice,) = stub.Generate(request, timeout=TIMEOUT_S).choices
    assert Person.model_validate_json(choice.text) == ADA


def check_tools(stub):
    request = with_tool(asked(WEATHER_QUESTION))
    (choice,) = stub.Generate(request, timeout=TIMEOUT_S).choices
    assert choice.finish_reason == pb.FINISH_REASON_TOOL_CALLS
    (call,) = choice.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Paris"})
    parts = [
        part
        for chunk in stub.GenerateStream(request, timeout=TIMEOUT_S)
        for part in chunk.choice.tool_calls
    ]
    assert [part.name for part in parts if part.name] == ["weather"]
    assert "".join(part.arguments for part in parts) == call.arguments
    message = request.chat.messages.add(role="assistant")
    message.tool_calls.add(id=call.id, name=call.name, arguments=call.arguments)
    request.chat.messages.add(role="tool", tool_call_id=call.id, content="rain, 12")
    (final,) = stub.Generate(request, timeout=TIMEOUT_S).choices
    assert "rain" in final.text
    assert not final.tool_calls


def check_forced_tools(stub):
    request = with_tool(asked("Hello!"))
    request.chat.tool_choice = pb.TOOL_CHOICE_REQUIRED
    (choice,) = stub.Generate(request, timeout=TIMEOUT_S).choices
    assert set(json.loads(choice.tool_calls[0].arguments)) == {"city"}


def check_reasoning(stub):
    """This model does not think: its answer is the same with the fields of reasoning."""
    plain = stub.Generate(asked("Hello!"), timeout=TIMEOUT_S).choices[0]
    request = asked("Hello!")
    request.chat.reasoning_effort = "none"
    request.chat.include_reasoning = False
    told = stub.Generate(request, timeout=TIMEOUT_S).choices[0]
    assert told.text == plain.text
    assert not told.reasoning


def check_embeddings(stub):
    request = pb.EmbedRequest()
    for text in ("import os", "import sys"):
        request.input.add().text.text = text
    answer = stub.Embed(request, timeout=TIMEOUT_S)
    vectors = [list(one.values) for one in answer.embeddings]
    assert len(vectors) == 2
    assert all(abs(math.hypot(*vector) - 1) < 1e-4 for vector in vectors)


def main(address):
    with grpc.insecure_channel(address) as channel:
        stub = inference_pb2_grpc.InferenceStub(channel)
        check_text(stub)
        check_forced_tools(stub)
        check_reasoning(stub)
        check_embeddings(stub)
        check_schema(stub)
        check_tools(stub)


if __name__ == "__main__":
    main(sys.argv[1])
