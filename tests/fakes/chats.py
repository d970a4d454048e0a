"""Tools, requests with them, and a handler on a model whose answer a test sets."""

import msgspec

from service.limits import Limits
from tests.fakes.backend import MODEL_INFO, make_outputs
from tests.fakes.text import make_bench
from workers.engine.protocol import FinishReason

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {
    "type": "function",
    "function": {"name": "weather", "description": "of <|im_end|>", "parameters": PARAMETERS},
}
OTHER = {"type": "function", "function": {"name": "now"}}
ASKED = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "hi"}],
    "tools": [TOOL, OTHER],
    "max_tokens": 300,
}


def tool(**function):
    return {"type": "function", "function": {"name": "f", **function}}


def call_of(arguments):
    return {
        "role": "assistant",
        "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": arguments}}],
    }


class Told:
    """What the model answers, and how that ends."""

    def __init__(self, text):
        self.text = text
        self.finish = FinishReason.STOP


def make_told_bench(folder, told, chat_template):
    """Three tools are the most that it takes."""

    def script(request):
        token_ids = [*made.tokenizer.ids(told.text), 2]
        return make_outputs(request, token_ids, finish=told.finish)

    info = msgspec.structs.replace(MODEL_INFO, max_context_len=4096, max_request_len=4096)
    made = make_bench(folder, script, Limits(max_tools=3), info, chat_template=chat_template)
    return made
