"""Conversations in which functions are called, made from `tool_domains` and random words.

Knows what a good assistant does with functions: picks one by what is asked, copies its arguments,
says what came back, and calls none where none fits. Knows no tokens; the lexicon decides which
words may be used, so held-out names never reach the training conversations.
"""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workers.builtin.tokenizer import Call, Conversation, Message
from workers.builtin.tool_domains import PASS_ON, RECORDS, Domain
from workers.builtin.tool_matters import MATTERS
from workers.builtin.words import Lexicon, Value, json_schema, spoken

NO_FUNCTION = "None of the functions that I was given can do that."
KINDS = ("one function", "some functions", "made-up function", "record", "several calls", "no call")
"""What an opening may be of; the assistant calls in all but the last."""

_OTHER_KEYS = {
    "city": ("location", "place", "town"),
    "name": ("full_name", "person"),
    "text": ("message", "content"),
    "query": ("q", "question"),
    "path": ("filename", "file"),
    "to": ("recipient", "receiver"),
    "expression": ("formula",),
    "minutes": ("duration_minutes",),
    "a": ("x", "first"),
    "b": ("y", "second"),
}
_VERBS = (
    "open close find count rename delete start stop check repair order sell buy paint clean move"
    " copy print lock unlock show list archive publish review assign measure rent return weigh"
)
_PLAIN_KINDS = ("word", "phrase", "person", "city", "integer", "number", "date", "code", "noun")
_BEFORE = ("", "", "", "", "Please: ", "Hello! ", "Hi. ", "Tell me: ", "I have a question. ")
_AFTER = ("", "", "", "", "", " Thanks!", " Thank you.")
_SYSTEM = (
    "You are a helpful assistant.",
    "Use the functions when they help.",
    "You are an assistant with functions.",
    "Answer briefly.",
    "Call a function where one fits.",
)
_FAILURES = ("not found", "no such entry", "timed out", "permission denied", "not available")
_RECORD_NAMES = ("extract_{}", "record_{}", "save_{}", "final_result", "submit_{}", "make_{}")


@dataclass(frozen=True, slots=True)
class Function:
    """A function as the model is told of it. keys: its argument names, by the domain's slots."""

    name: str
    domain: Domain
    keys: Mapping[str, str]
    tool: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Request:
    """What a user says, the calls that answer it, and what each of them is about."""

    text: str
    calls: tuple[Call, ...]
    subjects: tuple[str, ...]


class ToolConversations:
    """Endless conversations, the same for the same seed. small_talk: such that need no function."""

    def __init__(
        self, rng: random.Random, lexicon: Lexicon, small_talk: Sequence[Sequence[Message]]
    ) -> None:
        self._rng = rng
        self._lexicon = lexicon
        self._small_talk = small_talk

    def conversation(self) -> Conversation:
        """A whole one, which ends with the assistant's answer."""
        rng = self._rng
        chance = rng.random()
        if chance < 0.12:
            return self._chain()
        if chance < 0.15:
            return self._without_functions()
        weights = (20, 30, 26, 8, 14, 16)
        kind = rng.choices(KINDS, weights=weights)[0]
        opening, functions, request = self._opening(kind)
        messages = list(opening.messages)
        if request.calls and kind != "record":
            messages += self._ending(functions[0], request)
            if rng.random() < 0.15:
                again = self._request(functions[0])
                messages += [Message("user", again.text), Message("assistant", "", again.calls)]
                messages += self._ending(functions[0], again)
        return Conversation(tuple(messages), opening.tools)

    def opening(self, kind: str) -> Conversation:
        """One that ends with the assistant's calls, or with an answer where `kind` is "no call"."""
        return self._opening(kind)[0]

    def _opening(self, kind: str) -> tuple[Conversation, list[Function], Request]:
        functions, request = self._asked(kind)
        answer = Message("assistant", NO_FUNCTION if not request.calls else "", request.calls)
        messages = [*self._system(), Message("user", request.text), answer]
        if kind == "no call" and self._rng.random() < 0.6:
            messages = list(self._rng.choice(self._small_talk))
        shown = self._rng.sample(functions, len(functions))
        tools = tuple(function.tool for function in shown)
        return Conversation(tuple(messages), tools), functions, request

    def _asked(self, kind: str) -> tuple[list[Function], Request]:
        """Functions, the first of which is asked for, and the request."""
        rng = self._rng
        if kind == "record":
            domains = [rng.choice(RECORDS)]
            functions = [self._record_function(domains[0])]
            return functions, self._request(functions[0], is_polite=False)
        if kind == "made-up function":
            domains = [self._made_up() for _ in range(rng.randint(1, 3))]
            domains += rng.sample(MATTERS, rng.randint(0, 1))
        else:
            domains = rng.sample(MATTERS, 1 if kind == "one function" else rng.randint(2, 4))
        functions = self._functions(domains)
        if kind == "no call":
            others = [domain for domain in MATTERS if not _overlaps(domain, domains)]
            asked = self._request(self._function(rng.choice(others)))
            return functions, Request(asked.text, (), ())
        if kind == "several calls":
            return functions, self._several(functions)
        return functions, self._request(functions[0])

    def _chain(self) -> Conversation:
        """Two functions in turn: what the first one said goes to the second."""
        rng = self._rng
        first, then = self._functions([rng.choice(MATTERS), rng.choice(PASS_ON)])
        asked = self._request(first, is_polite=False)
        passed = self._request(then, is_polite=False)
        result = self._result_text(first)
        key = then.keys[_open_slot(then.domain)]
        (known,) = passed.calls
        arguments = {
            name: known.arguments.get(name, result)
            for name in then.keys.values()
            if name == key or name in known.arguments
        }
        joined = f"{asked.text.rstrip('.?! ')}{rng.choice((', then ', ' and ', ', and then '))}"
        tools = tuple(function.tool for function in rng.sample((first, then), 2))
        subject = passed.subjects[0]
        messages = (
            *self._system(),
            Message("user", f"{joined}{passed.text}."),
            Message("assistant", "", asked.calls),
            Message("tool", result),
            Message("assistant", "", (Call(then.name, arguments),)),
            Message("tool", rng.choice(("done", "ok", "sent", '{"ok": true}'))),
            Message("assistant", f"{_sentence(asked.subjects[0], result)} The {subject} is done."),
        )
        return Conversation(messages, tools)

    def _without_functions(self) -> Conversation:
        asked = self._request(self._function(self._rng.choice(MATTERS)))
        answer = "I cannot look that up: I was given no function for it."
        return Conversation(
            (*self._system(), Message("user", asked.text), Message("assistant", answer))
        )

    def _several(self, functions: Sequence[Function]) -> Request:
        """Two calls of one turn: one function with two values, or two functions."""
        rng = self._rng
        first = functions[0]
        short = [ask for ask in first.domain.asks if len(slots_of(ask)) == 1]
        if short and rng.random() < 0.6:
            ask = rng.choice(short)
            (slot,) = slots_of(ask)
            values = [
                self._lexicon.value(first.domain.slots[slot]) for _ in range(rng.choice((2, 2, 3)))
            ]
            key = first.keys[slot]
            calls = tuple(Call(first.name, {key: value}) for value in values)
            subjects = tuple(_filled(first.domain.subject, {slot: value}) for value in values)
            text = ask.format(**{slot: spoken([spoken(value) for value in values])})
            return Request(self._polite(text), calls, subjects)
        requests = [self._request(function, is_polite=False) for function in functions[:2]]
        text = rng.choice((" ", " And: ", " Also: ")).join(request.text for request in requests)
        calls = tuple(call for request in requests for call in request.calls)
        return Request(text, calls, tuple(s for request in requests for s in request.subjects))

    def _request(self, function: Function, *, is_polite: bool = True) -> Request:
        domain = function.domain
        ask = self._rng.choice(domain.asks)
        slots = slots_of(ask)
        values = {slot: self._lexicon.value(domain.slots[slot]) for slot in slots}
        text = ask.format(**{slot: spoken(value) for slot, value in values.items()})
        arguments = {function.keys[slot]: values[slot] for slot in domain.slots if slot in values}
        subject = _filled(domain.subject, values)
        text = self._polite(text) if is_polite else text
        return Request(text, (Call(function.name, arguments),), (subject,))

    def _polite(self, text: str) -> str:
        return f"{self._rng.choice(_BEFORE)}{text}{self._rng.choice(_AFTER)}"

    def _system(self) -> list[Message]:
        if self._rng.random() < 0.7:
            return []
        return [Message("system", self._rng.choice(_SYSTEM))]

    def _ending(self, function: Function, request: Request) -> list[Message]:
        """What the calls gave, and the assistant's words about it."""
        results, sentences = [], []
        for subject in request.subjects:
            if self._rng.random() < 0.05:
                failure = self._rng.choice(_FAILURES)
                results.append(Message("tool", json.dumps({"error": failure})))
                sentences.append(f"{_capital(subject)}: that did not work, {failure}.")
                continue
            text, words = self._result(function)
            results.append(Message("tool", text))
            sentences.append(_sentence(subject, words))
        return [*results, Message("assistant", " ".join(sentences))]

    def _result(self, function: Function) -> tuple[str, str]:
        """A function's answer, and how a sentence says it."""
        if self._rng.random() < 0.4 or not function.domain.results:
            text = self._result_text(function)
            return text, text
        known = function.domain.results
        names = [name for name in known if self._rng.random() < 0.7] or list(known)[:1]
        values = {name: self._lexicon.value(known[name]) for name in names}
        words = ", ".join(f"{_words(name)} {spoken(value)}" for name, value in values.items())
        return json.dumps(values, ensure_ascii=False), words

    def _result_text(self, function: Function) -> str:
        known = list(function.domain.results.values()) or ["phrase"]
        kinds = self._rng.choice((known[:1], known[:2], ["phrase"]))
        return ", ".join(spoken(self._lexicon.value(kind)) for kind in kinds)

    def _made_up(self) -> Domain:
        """A function of random words, found by the words that it shares with the request."""
        rng, lexicon = self._rng, self._lexicon
        verb, noun = rng.choice(_VERBS.split()), lexicon.noun()
        keys = dict.fromkeys(rng.choice((lexicon.noun(), lexicon.word())) for _ in range(3))
        names = [key for key in keys if key != noun][: rng.randint(1, 3)]
        slots = {name: rng.choice(_PLAIN_KINDS) for name in names}
        told = " and ".join(f"{name} {{{name}}}" for name in names)
        named = ", ".join(f"{name}: {{{name}}}" for name in names)
        spelled = ", ".join(f"{name}={{{name}}}" for name in names)
        capital = verb.capitalize()
        return Domain(
            names=(f"{verb}_{noun}", f"{noun}_{verb}", f"{verb}{noun.capitalize()}", noun),
            about=(f"{capital} a {noun}.", f"To {verb} the {noun}.", f"{capital}s the {noun}."),
            slots=slots,
            asks=(
                f"{capital} the {noun} with {told}.",
                f"{capital} a {noun} ({named}).",
                f"I want to {verb} a {noun} with {told}.",
                f"Can you {verb} the {noun}? {named}",
                f"{verb} {noun}, {spelled}",
            ),
            subject=noun,
            results={"status": "word", lexicon.noun(): rng.choice(_PLAIN_KINDS)},
        )

    def _functions(self, domains: Sequence[Domain]) -> list[Function]:
        """One a domain, with names of their own."""
        functions: dict[str, Function] = {}
        for domain in domains:
            function = self._function(domain)
            while function.name in functions:
                function = self._function(domain)
            functions[function.name] = function
        return list(functions.values())

    def _function(self, domain: Domain) -> Function:
        name = self._rng.choice(domain.names)
        match self._rng.randrange(8):
            case 0:
                name = f"{self._lexicon.invented()}_{name}"
            case 1:
                name = f"{name}_{self._lexicon.invented()}"
            case 2:
                name = f"{name}_v{self._rng.randint(2, 9)}"
        return self._described(name, domain)

    def _record_function(self, domain: Domain) -> Function:
        name = self._rng.choice(domain.names)
        if self._rng.random() < 0.5:
            name = self._rng.choice(_RECORD_NAMES).format(domain.names[0])
        return self._described(name, domain)

    def _described(self, name: str, domain: Domain) -> Function:
        rng = self._rng
        keys = {
            slot: rng.choice(_OTHER_KEYS[slot])
            if slot in _OTHER_KEYS and rng.random() < 0.3
            else slot
            for slot in domain.slots
        }
        if len(set(keys.values())) < len(keys):
            keys = {slot: slot for slot in domain.slots}
        properties = {
            keys[slot]: self._property(keys[slot], kind) for slot, kind in domain.slots.items()
        }
        asked = [set(slots_of(ask)) for ask in domain.asks]
        required = [keys[slot] for slot in domain.slots if all(slot in slots for slots in asked)]
        function: dict[str, Any] = {"name": name}
        if rng.random() < 0.85:
            function["description"] = rng.choice(domain.about)
        function["parameters"] = self._parameters(properties, required)
        return Function(name, domain, keys, {"type": "function", "function": function})

    def _parameters(self, properties: Mapping[str, Any], required: Sequence[str]) -> dict[str, Any]:
        """A schema of arguments in one of the ways in which clients write it."""
        parameters: dict[str, Any] = {"type": "object", "properties": dict(properties)}
        match self._rng.randrange(4):
            case 0:
                return parameters
            case 1:
                return {
                    "properties": dict(properties),
                    "required": list(required),
                    "type": "object",
                }
            case 2:
                return {**parameters, "required": list(required), "additionalProperties": False}
        return {**parameters, "required": list(required)}

    def _property(self, key: str, kind: str) -> dict[str, Any]:
        schema = json_schema(kind)
        match self._rng.randrange(8):
            case 0 | 1:
                return {**schema, "description": f"The {_words(key)}."}
            case 2:
                return {"title": _words(key).title(), **schema}
            case 3 if kind == "integer":
                return {**schema, "minimum": 0}
            case 3 if schema == {"type": "string"}:
                return {**schema, "maxLength": self._rng.choice((20, 40, 100))}
        return schema


def _overlaps(domain: Domain, others: Sequence[Domain]) -> bool:
    return any(domain is other or set(domain.names) & set(other.names) for other in others)


def _open_slot(domain: Domain) -> str:
    """The slot that no ask fills: what is passed on."""
    (slot,) = (s for s in domain.slots if not any(s in slots_of(ask) for ask in domain.asks))
    return slot


def slots_of(ask: str) -> list[str]:
    """The slots that an ask mentions, in its order."""
    return re.findall(r"{(\w+)}", ask)


def _filled(subject: str, values: Mapping[str, Value]) -> str:
    """The subject with its slots filled, or its words before the first that has no value."""
    known = {slot: spoken(value) for slot, value in values.items()}
    if set(slots_of(subject)) <= set(known):
        return subject.format(**known)
    return subject.partition("{")[0].rsplit(" ", 2)[0]


def _sentence(subject: str, words: str) -> str:
    return f"{_capital(subject)}: {words}."


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _words(name: str) -> str:
    return name.replace("_", " ")
