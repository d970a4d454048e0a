"""Bodies of chats whose schemas, patterns, grammars and tools were made to cost a server much.

Each maker takes a random generator and returns fields of a chat. Knows no socket.
"""

import random
from collections.abc import Callable
from typing import Any

Fields = dict[str, Any]
Maker = Callable[[random.Random], Fields]


def _schema(schema: Fields) -> Fields:
    named = {"name": "s", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": named}}


def deep(rng: random.Random) -> Fields:
    schema: Fields = {"type": "string"}
    for _ in range(rng.choice((20, 100, 300))):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return _schema(schema)


def wide(rng: random.Random) -> Fields:
    kinds = [{"type": "string"}, {"type": "integer"}, {"type": "array", "items": {}}]
    names = [f"p{i}" for i in range(rng.choice((100, 2_000, 8_000)))]
    properties = {name: rng.choice(kinds) for name in names}
    return _schema({"type": "object", "properties": properties, "additionalProperties": False})


def recursive(rng: random.Random) -> Fields:
    own = rng.choice(
        (
            {"$ref": "#/$defs/a"},
            {"anyOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/a"}]},
            {"allOf": [{"$ref": "#/$defs/a"}, {"$ref": "#/$defs/b"}]},
            {"type": "array", "items": {"$ref": "#/$defs/b"}, "minItems": 2},
        )
    )
    other = {"oneOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}
    return _schema({"$defs": {"a": own, "b": other}, "$ref": "#/$defs/a"})


def many_values(rng: random.Random) -> Fields:
    number = rng.choice((1_000, 20_000))
    return _schema({"enum": [f"{rng.random()}-{i}" for i in range(number)]})


def many_ways(rng: random.Random) -> Fields:
    """So many products of alternatives."""
    one = {"anyOf": [{"properties": {f"k{i}": {"const": i}}} for i in range(12)]}
    return _schema({"type": "object", "allOf": [one] * rng.choice((2, 6, 20))})


def large_bounds(rng: random.Random) -> Fields:
    most = rng.choice((1_000, 100_000, 10**9))
    return _schema(
        rng.choice(
            (
                {"type": "string", "minLength": most - 1, "maxLength": most},
                {"type": "array", "items": {"type": "integer"}, "minItems": most},
                {"type": "integer", "minimum": -most, "maximum": most, "multipleOf": 7},
                {"type": "object", "minProperties": most},
            )
        )
    )


def _pattern(rng: random.Random) -> str:
    most = rng.choice((50, 1_000, 100_000))
    return rng.choice(
        (
            "((a+)+)+$",
            "(a|aa|aaa)*b" * 40,
            f"(x{{1,{most}}}){{1,{most}}}",
            f"(.*a.{{{most}}}){{2}}",
            f"(?:[a-z]{{0,{most}}}\\d)+",
            "(" * 3_000 + "a" + ")" * 3_000,
            "|".join(f"w{i}.*z{i}" for i in range(min(most, 5_000))),
            "(?=a)b\\1",
            "[\\p{L}]{" + str(most) + "}",
        )
    )


def pattern_of_a_text(rng: random.Random) -> Fields:
    return {"structured_outputs": {"regex": _pattern(rng)}}


def pattern_of_a_schema(rng: random.Random) -> Fields:
    pattern = _pattern(rng)
    return _schema(
        rng.choice(
            (
                {"type": "string", "pattern": pattern},
                {"type": "object", "patternProperties": {pattern: {"type": "null"}}},
            )
        )
    )


def grammar(rng: random.Random) -> Fields:
    number = rng.choice((10, 500, 5_000))
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1} | r{i + 1}" for i in range(number))
    return {
        "structured_outputs": {
            "grammar": rng.choice(
                (
                    "start: start start | start | ",
                    'start: a\na: b\nb: a | "x"',
                    f'start: r0\n{rules}\nr{number}: "x"',
                    f"start: /{_pattern(rng)}/".replace("\\1", ""),
                    "start: " + " | ".join(f'"{i}"' for i in range(number)),
                    'start: "a"' + "?" * number,
                    "start: " + "(" * number + '"a"' + ")*" * number,
                )
            )
        }
    }


def choices(rng: random.Random) -> Fields:
    texts = ["a" * rng.randint(1, 200) + str(i) for i in range(rng.choice((500, 5_000)))]
    return {"structured_outputs": {"choice": texts}}


def tools(rng: random.Random) -> Fields:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(9)}}
    functions = [
        {"name": f"f{i}", "parameters": parameters, "strict": rng.random() < 0.5}
        for i in range(rng.choice((20, 128, 1_000)))
    ]
    made = [{"type": "function", "function": function} for function in functions]
    return {"tools": made, "tool_choice": rng.choice(("auto", "required", "none"))}


def template_variables(rng: random.Random) -> Fields:
    deep_value: Any = 1
    for _ in range(rng.choice((10, 90))):
        deep_value = [deep_value]
    return {
        "chat_template_kwargs": rng.choice(
            (
                {"a": deep_value},
                {f"v{i}": i for i in range(5_000)},
                {"messages": "x" * 100_000, "tools": [{}] * 1_000},
                {"enable_thinking": {"__class__": "x"}, "raise_exception": 1},
            )
        )
    }


def own_template(rng: random.Random) -> Fields:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
    return {"chat_template": rng.choice((loop, "{{ 'x' * 10**9 }}", "{{ cycler.__init__ }}"))}


MAKERS: tuple[Maker, ...] = (
    deep,
    wide,
    recursive,
    many_values,
    many_ways,
    large_bounds,
    pattern_of_a_text,
    pattern_of_a_schema,
    grammar,
    choices,
    tools,
    template_variables,
    own_template,
)
