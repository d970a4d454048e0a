"""How often a model calls the right function with the right arguments, and answers in right JSON.

On conversations that it never saw, with names that it never saw. Knows what was asked and what was
said; how that is generated is the caller's affair.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.builtin.tokenizer import MESSAGE_END, Conversation, Message, render_chat

Complete = Callable[[Sequence[str]], list[str]]
"""Greedy continuations of prompts, special tokens included."""

_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Example:
    """A conversation whose last message is what the assistant should say."""

    kind: str
    conversation: Conversation

    @property
    def prompt(self) -> str:
        messages = self.conversation.messages[:-1]
        return render_chat(messages, self.conversation.tools) + "<|im_start|>assistant\n"

    @property
    def answer(self) -> Message:
        return self.conversation.messages[-1]


def score(examples: Sequence[Example], said: Sequence[str]) -> dict[str, dict[str, float]]:
    """Shares by kind: for calls of right names and of right names and arguments, for JSON of what
    parses and of what is right; "no call" counts answers without one as right.

    `said` are continuations of the examples' prompts."""
    totals: Counter[str] = Counter()
    rights: Counter[tuple[str, str]] = Counter()
    for example, text in zip(examples, said, strict=True):
        totals[example.kind] += 1
        for name, is_right in judge(example, text).items():
            rights[example.kind, name] += is_right
    return {
        kind: {"num": total}
        | {name: count / total for (of, name), count in rights.items() if of == kind}
        for kind, total in totals.items()
    }


def judge(example: Example, text: str) -> dict[str, bool]:
    """What is right about one continuation."""
    said = text.partition(MESSAGE_END)[0]
    if example.conversation.tools:
        calls = [_call(found) for found in _CALL.findall(said)]
        wanted = [{"name": c.name, "arguments": c.arguments} for c in example.answer.calls]
        names = [call.get("name") for call in calls]
        return {"right_name": names == [w["name"] for w in wanted], "right_call": calls == wanted}
    try:
        value = json.loads(said)
    except ValueError:
        return {"valid": False, "right": False}
    return {"valid": True, "right": value == json.loads(example.answer.content)}


def _call(text: str) -> Mapping[str, Any]:
    try:
        call = json.loads(text)
    except ValueError:
        return {}
    return call if isinstance(call, dict) else {}
