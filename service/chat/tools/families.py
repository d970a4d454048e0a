"""Which family a model belongs to, by what its chat template writes."""

from service.chat.tools.deepseek import DeepSeekParser
from service.chat.tools.glm import GlmParser
from service.chat.tools.granite import GraniteParser
from service.chat.tools.harmony import HarmonyParser
from service.chat.tools.hermes import HermesParser
from service.chat.tools.kimi import KimiParser
from service.chat.tools.llama import LlamaJsonParser
from service.chat.tools.mistral import MistralParser
from service.chat.tools.parser import ToolParser
from service.chat.tools.pythonic import PythonicParser
from service.chat.tools.qwen_coder import QwenCoderParser

# In this order: later signs also stand in templates of the families before.
_SIGNS: tuple[tuple[str, type[ToolParser]], ...] = (
    ("<function=", QwenCoderParser),
    ("<arg_key>", GlmParser),
    ("<｜tool▁calls▁begin｜>", DeepSeekParser),
    ("<|tool_calls_section_begin|>", KimiParser),
    ("<|channel|>", HarmonyParser),
    ("[TOOL_CALLS]", MistralParser),
    ("<|tool_call|>", GraniteParser),
    ("<tool_call>", HermesParser),
    ("<|python_start|>", PythonicParser),
    ("func_name1(", PythonicParser),
    ("<|python_tag|>", LlamaJsonParser),
    ('"parameters":', LlamaJsonParser),
)
FAMILIES: dict[str, type[ToolParser]] = {parser.name: parser for _, parser in _SIGNS}


def family_of(template: str) -> type[ToolParser] | None:
    """None where nothing tells."""
    return next((parser for sign, parser in _SIGNS if sign in template), None)
