"""What a matter is that functions are called for; what is passed on, and what is extracted.

Data only. A slot's kind is one of `workers.builtin.words`; an ask mentions the slots it fills.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Domain:
    """One matter. `names` and `about` are a function's; `subject` says what an answer is about, and
    mentions no slot that is missing from some ask; `results` are what the function knows."""

    names: tuple[str, ...]
    about: tuple[str, ...]
    slots: Mapping[str, str]
    asks: tuple[str, ...]
    subject: str = ""
    results: Mapping[str, str] = field(default_factory=dict)


def domain(
    names: str, about: str, slots: str, asks: tuple[str, ...], subject: str = "", results: str = ""
) -> Domain:
    """From words: names with spaces between, descriptions with slashes, kinds as `_kinds` reads."""
    return Domain(
        tuple(names.split()),
        tuple(about.split(" / ")),
        _kinds(slots),
        asks,
        subject,
        _kinds(results),
    )


def _kinds(text: str) -> dict[str, str]:
    """{"unit": "one of a|b"} of "unit: one of a|b, ..."."""
    pairs = (entry.partition(": ") for entry in text.split(", ") if entry)
    return {name: kind for name, _, kind in pairs}


PASS_ON = (
    domain(
        "send_message message notify tell",
        "Sends a message to a person. / Text somebody.",
        "to: person, text: phrase",
        ("send it to {to}", "tell {to}", "send the answer to {to}", "let {to} know"),
        "message to {to}",
    ),
    domain(
        "send_email email send_mail",
        "Sends an email. / Writes an email to an address.",
        "to: email, body: phrase",
        ("email it to {to}", "send it to {to}", "mail the answer to {to}"),
        "email to {to}",
    ),
    domain(
        "write_file save_file",
        "Writes a text into a file. / Saves a file.",
        "path: file, content: phrase",
        ("save it as {path}", "write it into {path}", "put it into {path}"),
        "file {path}",
    ),
    domain(
        "translate translate_text",
        "Translates a text into a language. / Translate words.",
        "language: language, text: phrase",
        ("translate it into {language}", "translate the answer to {language}"),
        "translation into {language}",
    ),
)

RECORDS = (
    domain(
        "person Person user profile",
        "A person.",
        "name: person, age: integer, city: city",
        (
            "{name} is {age} years old and lives in {city}.",
            "{name} is {age} years old.",
            "My name is {name}, I am {age} and I live in {city}.",
            "{name}, {age}, from {city}",
            "{name} lives in {city}.",
            "{name} ({age}) moved to {city}.",
        ),
    ),
    domain(
        "event CalendarEvent meeting",
        "An event.",
        "title: phrase, date: date, place: city",
        (
            'The event "{title}" is on {date} in {place}.',
            '"{title}" takes place in {place} on {date}.',
            '"{title}", {date}',
        ),
    ),
    domain(
        "product Product item article",
        "A product.",
        "name: noun, price: number, colour: colour",
        (
            "The {colour} {name} costs {price}.",
            "A {name} costs {price}.",
            "We sell a {name} for {price}; it is {colour}.",
        ),
    ),
    domain(
        "order Order purchase",
        "An order.",
        "customer: person, item: noun, quantity: integer",
        (
            "{customer} orders {quantity} of the {item}.",
            "{customer} bought {quantity} {item}",
            "Please send {quantity} {item} to {customer}.",
        ),
    ),
    domain(
        "book Book publication",
        "A book.",
        "title: phrase, author: person, year: integer",
        (
            '"{title}" was written by {author} in {year}.',
            '{author} wrote "{title}".',
            '"{title}" by {author}, {year}',
        ),
    ),
    domain(
        "contact Contact ContactInfo",
        "How to reach a person.",
        "name: person, email: email",
        (
            "{name} can be reached at {email}.",
            "Write to {name} at {email}.",
            "{name} <{email}>",
            "The address of {name} is {email}.",
        ),
    ),
    domain(
        "task Task todo",
        "Something to do.",
        "title: phrase, due: date, priority: one of low|medium|high",
        (
            'The task "{title}" is due on {due} and has {priority} priority.',
            '"{title}" must be done by {due}.',
            '"{title}": {priority} priority, due {due}',
        ),
    ),
    domain(
        "city City place",
        "A city.",
        "name: city, population: integer, river: noun",
        ("{name} has {population} people.", "{population} people live in {name}."),
    ),
    domain(
        "trip Trip flight journey",
        "A journey.",
        "traveller: person, origin: city, destination: city",
        (
            "{traveller} travels from {origin} to {destination}.",
            "From {origin} to {destination}.",
            "{traveller} flies to {destination} from {origin}.",
        ),
    ),
    domain(
        "team Team group",
        "A group of people.",
        "name: word, members: list",
        ("The team {name} has the members {members}.", "{members} are in the team {name}."),
    ),
)
