"""Streams of which some are constrained by a schema, the same for every engine that can run them.

Weights are random and so is the text: strings of the schema have a least length, so that no
document ends before its request has all of its tokens. Imports nothing but the standard library.
"""

import json
import random
from dataclasses import dataclass

NUM_STREAMS = 64
PROMPT_TOKENS = 128
MAX_TOKENS = 256
LOWEST_TOKEN_ID = 1000
VOCAB_SIZE = 100_000
COMPANIES = {"none": 0, "half": NUM_STREAMS // 2, "all": NUM_STREAMS}
"""How many streams are constrained."""
_WORDS = ("customer", "shipping", "invoice", "contact", "warehouse", "preferred", "secondary")


@dataclass(frozen=True, slots=True)
class Stream:
    prompt: list[int]
    seed: int
    is_constrained: bool


def schema_of_20_fields() -> str:
    """Strings with and without a pattern, numbers, choices, lists and an object, all required."""
    kinds = (
        {"type": "string", "minLength": 120, "maxLength": 160},
        {"type": "string", "pattern": "^[a-z]{24,32}$"},
        {"type": "integer", "minimum": 0, "maximum": 100_000},
        {"enum": ["not yet decided", "accepted by the customer", "rejected by the warehouse"]},
        {
            "type": "array",
            "items": {"type": "string", "minLength": 30, "maxLength": 40},
            "minItems": 3,
            "maxItems": 4,
        },
    )
    properties = {
        f"{_WORDS[index % len(_WORDS)]}_field_{index}": kinds[index % len(kinds)]
        for index in range(20)
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return json.dumps(schema)


def streams(num_constrained: int, seed: int) -> list[Stream]:
    """NUM_STREAMS of them, every other one constrained until so many are."""
    rng = random.Random(seed)
    constrained = set(range(0, 2 * num_constrained, 2))
    if num_constrained * 2 > NUM_STREAMS:
        constrained = set(range(num_constrained))
    return [
        Stream(
            [rng.randrange(LOWEST_TOKEN_ID, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)],
            seed * 1000 + index,
            index in constrained,
        )
        for index in range(NUM_STREAMS)
    ]
