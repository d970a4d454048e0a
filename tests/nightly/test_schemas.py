"""Outputs under many schemas: each parses and validates, at temperature 1, by the tiny model.

TESSERA_SCHEMA_FOLDER: schemas of a folder in place of generated ones (see random_schemas.py).
"""

import json
import os
import time
from pathlib import Path

import jsonschema
import pytest

from service.tokenizer.constraints import JsonSchema
from service.tokenizer.grammars import GrammarMaker, GrammarRefusedError
from tests.nightly.random_schemas import generated, of_folder
from tests.unit.workers.engine.test_grammars import PROMPT, TOKENIZER, run
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.sampling.params import SamplingParams

NUM_SCHEMAS = 1000
BATCH = 50
MAX_TOKENS = 600
MAX_REFUSAL_S = 1.0


def schemas():
    folder = os.environ.get("TESSERA_SCHEMA_FOLDER")
    if folder is None:
        return [generated(seed) for seed in range(NUM_SCHEMAS)]
    return list(of_folder(Path(folder)))


def grammar_of(schema, maker):
    """None where it is refused, in time."""
    start_s = time.process_time()
    try:
        return maker.make(JsonSchema(json.dumps(schema)))
    except GrammarRefusedError:
        return None
    finally:
        assert time.process_time() - start_s < MAX_REFUSAL_S


def check(schema, result) -> bool:
    """Whether the output ended by itself; then it must be what the schema says."""
    text = TOKENIZER.decode(result.token_ids, skip_special_tokens=True)
    assert result.error is None, (schema, result.error)
    if result.finish_reason is not FinishReason.STOP:
        return False
    try:
        jsonschema.validate(
            json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    except jsonschema.ValidationError as error:
        # RFC 3339 has a year 0000, Python's dates, which the checker asks, do not.
        if error.validator != "format" or not str(error.instance).startswith("0000-"):
            raise
    return True


@pytest.mark.nightly
@pytest.mark.timeout(7200)
def test_every_output_parses_and_validates() -> None:
    maker, own = GrammarMaker(), schemas()
    pairs = [(schema, grammar) for schema in own if (grammar := grammar_of(schema, maker))]
    engine = Engine.from_config(EngineConfig(check_integrity_when_idle=True))
    num_ended = 0
    try:
        for first in range(0, len(pairs), BATCH):
            batch = pairs[first : first + BATCH]
            requests = [
                GenerateRequest(
                    f"s{first + index}",
                    PROMPT,
                    SamplingParams(temperature=1.0, seed=index, max_tokens=MAX_TOKENS),
                    grammar=grammar,
                )
                for index, (_, grammar) in enumerate(batch)
            ]
            results = run(engine, *requests)
            num_ended += sum(check(pair[0], one) for pair, one in zip(batch, results, strict=True))
    finally:
        engine.close()
    print(f"{len(own)} schemas, {len(pairs)} taken, {num_ended} outputs ended by themselves")
    if "TESSERA_SCHEMA_FOLDER" not in os.environ:
        assert len(pairs) == num_ended == NUM_SCHEMAS
    assert num_ended > 0.5 * len(pairs) > 0
