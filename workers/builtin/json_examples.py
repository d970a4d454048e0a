"""Conversations whose answer is JSON, made from `tool_domains` and random words.

Knows the ways in which people ask for JSON: keys in words, a schema in the prompt, a list. Knows no
tokens; the lexicon decides which words may be used.
"""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from workers.builtin.tokenizer import Conversation, Message
from workers.builtin.tool_domains import RECORDS, Domain
from workers.builtin.tool_examples import slots_of
from workers.builtin.words import Lexicon, Value, json_schema, spoken

JSON_KINDS = ("keys", "schema", "made-up keys", "list of words", "list of objects", "task")

_KEYS = (
    "Answer in JSON with the keys {keys}.",
    "Reply with a JSON object with {keys}.",
    "Return JSON with the keys {keys}.",
    "Give me JSON with {keys}.",
    "As JSON, keys {keys}.",
    "Write it as a JSON object; its keys are {keys}.",
    "Extract {keys} as JSON.",
)
_SCHEMA = (
    "Answer with JSON of this schema:\n{schema}",
    "Return JSON that obeys this JSON schema:\n{schema}",
    "Respond with a JSON object.\nSchema: {schema}",
    "Your answer must be JSON, by this schema: {schema}",
)
_LIST = (
    "Answer with a JSON list.",
    "As a JSON list.",
    "Give them to me as a JSON array.",
    "Return a JSON array of them.",
)
_OBJECTS = (
    "Answer with a JSON list of objects with the keys {keys}.",
    "As a JSON array of objects with {keys}.",
)
_TASKS = (
    "Extract the {name}: {text}",
    "{text} Extract the {name}.",
    "Extract: {text}",
    "Extract the data as JSON: {text}",
    "Which {name} is this? Answer in JSON. {text}",
)
_MADE_UP = ("The {noun} has {facts}.", "{noun}: {facts}", "There is a {noun} with {facts}.")
_PLAIN_KINDS = (
    "word phrase person city integer number date time code noun email file colour boolean list"
)
_SYSTEM = ("You answer in JSON.", "You are a helpful assistant.", "Answer with JSON only.")


class JsonConversations:
    """Endless conversations of one question and its JSON, the same for the same seed."""

    def __init__(self, rng: random.Random, lexicon: Lexicon) -> None:
        self._rng = rng
        self._lexicon = lexicon

    def conversation(self) -> Conversation:
        weights = (26, 26, 22, 8, 8, 10)
        return self.of_kind(self._rng.choices(JSON_KINDS, weights=weights)[0])

    def of_kind(self, kind: str) -> Conversation:
        """Ends with the assistant's JSON. `kind` is one of JSON_KINDS."""
        match kind:
            case "list of words":
                return self._words()
            case "list of objects":
                return self._objects()
            case "task":
                return self._task()
        facts, values, kinds = self._made_up() if kind == "made-up keys" else self._record()
        keys = self._some(list(values))
        answer = {key: values[key] for key in keys}
        if kind == "schema" or (kind == "made-up keys" and self._rng.random() < 0.4):
            schema = json.dumps(_schema({key: kinds[key] for key in keys}))
            order = self._rng.choice(_SCHEMA).format(schema=schema)
            return self._answered(facts, order, answer, is_system=self._rng.random() < 0.4)
        told = keys if self._rng.random() < 0.7 else [f'"{key}"' for key in keys]
        order = self._rng.choice(_KEYS).format(keys=spoken(told) if len(told) > 1 else told[0])
        return self._answered(facts, order, answer, is_system=self._rng.random() < 0.15)

    def _words(self) -> Conversation:
        values = self._lexicon.value("list")
        text = self._rng.choice(("I have {}.", "The words {}.", "{}", "Here are {}."))
        return self._answered(text.format(spoken(values)), self._rng.choice(_LIST), values)

    def _objects(self) -> Conversation:
        domain = self._rng.choice(RECORDS)
        ask = self._rng.choice(domain.asks)
        rows = [self._filled(domain, ask) for _ in range(self._rng.randint(2, 3))]
        keys = self._some(list(rows[0][1]))
        order = self._rng.choice(_OBJECTS).format(keys=spoken(keys) if len(keys) > 1 else keys[0])
        text = " ".join(text for text, _ in rows)
        return self._answered(text, order, [{key: row[key] for key in keys} for _, row in rows])

    def _task(self) -> Conversation:
        """Without keys: those of the record, in their order."""
        domain = self._rng.choice(RECORDS)
        text, values = self._filled(domain, self._rng.choice(domain.asks))
        question = self._rng.choice(_TASKS).format(name=domain.names[0], text=text)
        return self._answered(question, "", values)

    def _record(self) -> tuple[str, dict[str, Value], Mapping[str, str]]:
        domain = self._rng.choice(RECORDS)
        text, values = self._filled(domain, self._rng.choice(domain.asks))
        return text, values, domain.slots

    def _made_up(self) -> tuple[str, dict[str, Value], Mapping[str, str]]:
        rng, lexicon = self._rng, self._lexicon
        keys = dict.fromkeys(rng.choice((lexicon.noun(), lexicon.word())) for _ in range(4))
        kinds = {key: rng.choice(_PLAIN_KINDS.split()) for key in list(keys)[: rng.randint(1, 4)]}
        values = {key: lexicon.value(kind) for key, kind in kinds.items()}
        style = rng.choice(("{} {}", "{} {}", "{}: {}", "{} = {}", "the {} {}"))
        facts = [style.format(key, spoken(value)) for key, value in values.items()]
        joined = spoken(facts) if len(facts) > 1 and "=" not in style else "; ".join(facts)
        return rng.choice(_MADE_UP).format(noun=lexicon.noun(), facts=joined), values, kinds

    def _filled(self, domain: Domain, ask: str) -> tuple[str, dict[str, Value]]:
        slots = slots_of(ask)
        values = {slot: self._lexicon.value(domain.slots[slot]) for slot in slots}
        text = ask.format(**{slot: spoken(value) for slot, value in values.items()})
        return text, {slot: values[slot] for slot in domain.slots if slot in values}

    def _some(self, keys: Sequence[str]) -> list[str]:
        """Some of the keys, in an order of their own now and then."""
        if self._rng.random() < 0.6:
            return list(keys)
        return self._rng.sample(keys, self._rng.randint(1, len(keys)))

    def _answered(
        self, facts: str, order: str, answer: object, *, is_system: bool = False
    ) -> Conversation:
        rng = self._rng
        if is_system:
            messages = [Message("system", order), Message("user", facts)]
        else:
            joined = f"{facts}{rng.choice((' ', chr(10), chr(10) * 2))}{order}" if order else facts
            question = f"{order} {facts}" if order and rng.random() < 0.25 else joined
            messages = [Message("user", question)]
            if rng.random() < 0.2:
                messages.insert(0, Message("system", rng.choice(_SYSTEM)))
        text = json.dumps(answer, ensure_ascii=False)
        return Conversation((*messages, Message("assistant", text)))


def _schema(kinds: Mapping[str, str]) -> dict[str, Any]:
    properties = {key: json_schema(kind) for key, kind in kinds.items()}
    return {"type": "object", "properties": properties, "required": list(properties)}
