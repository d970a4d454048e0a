"""Conversations with functions and with JSON: what they teach is right, and held out is unseen."""

import json
import random
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from workers.builtin.chat_examples import persona_conversations
from workers.builtin.json_examples import JSON_KINDS, JsonConversations
from workers.builtin.tokenizer import Conversation, render_chat
from workers.builtin.tool_examples import KINDS, NO_FUNCTION, ToolConversations
from workers.builtin.words import Lexicon, spoken, words_of

_WORDS = [f"{a}{b}{c}" for a in ("str", "lo", "pre") for b in ("a", "po", "nil") for c in "tkmns"]


def _makers(seed: int, *, held_out: bool = False) -> tuple[ToolConversations, JsonConversations]:
    rng = random.Random(seed)
    lexicon = Lexicon(rng, _WORDS, held_out=held_out)
    return ToolConversations(rng, lexicon, persona_conversations(0)), JsonConversations(
        rng, lexicon
    )


def _calls(conversation: Conversation) -> Iterator[tuple[str, Any, str]]:
    """(name, arguments, everything said before it) of each call."""
    said = ""
    for message in conversation.messages:
        for call in message.calls:
            yield call.name, call.arguments, said
        said += f"\n{message.content}"


def _without_lengths(schema: Any) -> Any:
    """A few phrases are longer than their function says."""
    properties = {
        key: {word: value for word, value in one.items() if word != "maxLength"}
        for key, one in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def test_the_same_seed_makes_the_same_conversations() -> None:
    def texts(seed: int) -> list[str]:
        calls, answers = _makers(seed)
        made = [make.conversation() for _ in range(20) for make in (calls, answers)]
        return [render_chat(one.messages, one.tools) for one in made]

    assert texts(1) == texts(1) != texts(2)


def test_calls_obey_the_schemas_of_the_functions_and_copy_what_was_said() -> None:
    makers, _ = _makers(1)
    num_calls = 0
    for _ in range(400):
        conversation = makers.conversation()
        schemas = {
            tool["function"]["name"]: tool["function"]["parameters"] for tool in conversation.tools
        }
        assert len(schemas) == len(conversation.tools)
        for name, arguments, said in _calls(conversation):
            num_calls += 1
            jsonschema.validate(arguments, _without_lengths(schemas[name]))
            for value in arguments.values():
                assert all(spoken(v) in said for v in (value if type(value) is list else [value]))
    assert num_calls > 300


def test_a_conversation_ends_with_the_assistant_and_results_follow_their_calls() -> None:
    makers, _ = _makers(2)
    for _ in range(200):
        messages = makers.conversation().messages
        assert messages[-1].role == "assistant"
        for index, message in enumerate(messages[:-1]):
            following = [m.role for m in messages[index + 1 : index + 1 + len(message.calls)]]
            assert following == ["tool"] * len(message.calls)


@pytest.mark.parametrize("kind", KINDS)
def test_an_opening_ends_with_what_is_asked_of_the_model(kind: str) -> None:
    makers, _ = _makers(3)
    for _ in range(30):
        opening = makers.opening(kind)
        answer = opening.messages[-1]
        assert answer.role == "assistant"
        assert opening.tools
        match kind:
            case "no call":
                assert not answer.calls
                assert answer.content
            case "several calls":
                assert len(answer.calls) > 1
            case _:
                assert len(answer.calls) == 1


def test_functions_that_do_not_fit_are_not_called() -> None:
    makers, _ = _makers(4)
    answers = [makers.opening("no call").messages[-1].content for _ in range(60)]
    assert 10 < answers.count(NO_FUNCTION) < 50


@pytest.mark.parametrize("kind", JSON_KINDS)
def test_json_has_what_the_question_says(kind: str) -> None:
    _, makers = _makers(5)
    for _ in range(30):
        *asked, answer = makers.of_kind(kind).messages
        said = " ".join(message.content for message in asked)
        document = json.loads(answer.content)
        rows = document if isinstance(document, list) else [document]
        assert rows
        for row in rows:
            for key, value in row.items() if isinstance(row, dict) else [("", row)]:
                assert key in said or kind == "task"
                assert all(spoken(v) in said for v in (value if type(value) is list else [value]))


def test_held_out_names_are_in_no_conversation_that_is_trained_on() -> None:
    kinds = ("city", "person", "noun", "word")
    sides = []
    for held_out in (False, True):
        lexicon = Lexicon(random.Random(6), _WORDS, held_out=held_out)
        names = {str(lexicon.value(kind)).lower() for kind in kinds for _ in range(300)}
        sides.append({part for name in names for part in [name, *name.split()]})
    trained, unseen = sides
    parts_of_two = {"de", "new", "san", "los", "los angeles", "city", "cape", "hong", "tel"}
    assert not (trained & unseen) - parts_of_two
    assert len(unseen) > 40


def test_common_words_of_the_texts_are_words_and_not_names_of_code() -> None:
    text = "the parser.parse(value) returns the value of parse_args and parse " * 9
    assert words_of([text]) == ["and", "parse", "returns", "the", "value"]
