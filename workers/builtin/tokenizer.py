"""The tokenizer that ships: byte-level BPE shaped for Python, and the chat format around it.

Knows how text becomes tokens and messages become text. Knows no corpus and no model. Every byte is
in the alphabet, so every string round-trips; nothing is normalised and nothing is unknown.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Split
from tokenizers.pre_tokenizers import Sequence as PreTokenizerSequence
from tokenizers.trainers import BpeTrainer

VOCAB_SIZE = 4096
MAX_CONTEXT_TOKENS = 2048

END_OF_TEXT, MESSAGE_START, MESSAGE_END, PAD = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|pad|>",
)
SPECIAL_TOKENS = (END_OF_TEXT, MESSAGE_START, MESSAGE_END, PAD)
END_OF_TEXT_ID, MESSAGE_START_ID, MESSAGE_END_ID, PAD_ID = range(len(SPECIAL_TOKENS))

# Newlines never merge with the indentation behind them, nor punctuation with the word behind it:
# a prompt that ends in a newline, in "(" or in "." is tokenised as it was in training, so the model
# may go on with any indentation or name. Digits stay single, with at most the space before them.
_PRE_TOKEN_PATTERN = "|".join(
    (
        r"\n+",
        r"(?<=\n)[ \t]+",
        r" ?[_\p{L}]+",
        r" ?\p{N}",
        r" ?[^\s\p{L}\p{N}_]+",
        r"[^\S\n]+(?!\S)",
        r"\s+",
    )
)

CHAT_TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\nYou may call these functions:\\n<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' + tool | tojson -}}
{%- endfor -%}
{{- '\\n</tools>\\nA call is written so:\\n<tool_call>\\n{"name": ..., "arguments": {...}}\\n' -}}
{{- '</tool_call><|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['content'] is string -%}
{{- message['content'] -}}
{%- elif message['content'] is not none -%}
{%- for part in message['content'] if part['type'] == 'text' -%}
{{- part['text'] -}}
{%- endfor -%}
{%- endif -%}
{%- for call in message['tool_calls'] or [] -%}
{%- if message['content'] or not loop.first -%}
{{- '\\n' -}}
{%- endif -%}
{{- '<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


@dataclass(frozen=True, slots=True)
class Call:
    """An assistant's call of a function."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
    calls: tuple[Call, ...] = ()


@dataclass(frozen=True, slots=True)
class Conversation:
    """Messages and the functions that the assistant may call, as OpenAI's `tools`."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()


def render_chat(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text CHAT_TEMPLATE gives for the same messages, without a generation prompt."""
    return (_tools_text(tools) if tools else "") + "".join(map(_message_text, messages))


def _tools_text(tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(map(_json, tools))
    return (
        f"{MESSAGE_START}system\nYou may call these functions:\n<tools>\n{listed}\n</tools>\n"
        'A call is written so:\n<tool_call>\n{"name": ..., "arguments": {...}}\n</tool_call>'
        f"{MESSAGE_END}\n"
    )


def _message_text(message: Message) -> str:
    calls = "\n".join(map(_call_text, message.calls))
    separator = "\n" if message.content and calls else ""
    body = f"{message.content}{separator}{calls}"
    return f"{MESSAGE_START}{message.role}\n{body}{MESSAGE_END}\n"


def _call_text(call: Call) -> str:
    arguments = _json(call.arguments)
    return f'<tool_call>\n{{"name": "{call.name}", "arguments": {arguments}}}\n</tool_call>'


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False)


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE of exactly VOCAB_SIZE entries, special tokens first.

    Raises ValueError when the texts are too few to fill the vocabulary.
    """
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = PreTokenizerSequence(
        [
            Split(Regex(_PRE_TOKEN_PATTERN), behavior="isolated"),
            ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        min_frequency=2,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(ByteLevel.alphabet()),
        max_token_length=16,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise ValueError(f"{tokenizer.get_vocab_size()} entries learned, {VOCAB_SIZE} wanted")
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into `folder`."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": MESSAGE_END,
        "pad_token": PAD,
        "unk_token": None,
        "additional_special_tokens": [MESSAGE_START, END_OF_TEXT],
        "clean_up_tokenization_spaces": False,
        "model_input_names": ["input_ids", "attention_mask"],
        "model_max_length": MAX_CONTEXT_TOKENS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
