"""Outputs under schemas: which are taken, and whether each output is what its schema says."""

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import numpy as np

from service.tokenizer.constraints import JsonSchema
from service.tokenizer.grammars import GrammarMaker, GrammarRefusedError
from tests.nightly.random_schemas import Schema
from tests.unit.workers.engine.test_grammars import PROMPT, TOKENIZER
from workers import Engine
from workers.config import EngineConfig
from workers.constraints.desk import CompilingDesk
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.parallel.local_followers import start_local_followers
from workers.parallel.tp_engine import build_tp_engine
from workers.sampling.params import SamplingParams

MAX_REFUSAL_S = 1.0

Taken = tuple[Schema, str]
"""A schema and its grammar."""


@dataclass(frozen=True)
class Way:
    """How outputs come about. num_choices: of one prompt, by seeds of their own. is_retracted: more
    streams are admitted than there are pages for. num_streams: that are submitted at once."""

    num_choices: int = 1
    is_retracted: bool = False
    num_streams: int = 50
    max_tokens: int = 600
    settings: dict[str, Any] = field(default_factory=dict)


def taken(schemas: Sequence[Schema]) -> list[Taken]:
    """Without those that are refused, each in time."""
    maker = GrammarMaker()
    pairs = ((schema, _grammar_of(schema, maker)) for schema in schemas)
    return [(schema, grammar) for schema, grammar in pairs if grammar is not None]


def _grammar_of(schema: Schema, maker: GrammarMaker) -> str | None:
    start_s = time.process_time()
    try:
        return maker.make(JsonSchema(json.dumps(schema)))
    except GrammarRefusedError:
        return None
    finally:
        assert time.process_time() - start_s < MAX_REFUSAL_S


@contextmanager
def engine_of(way: Way) -> Iterator[Engine]:
    """On child processes beside this one where it has several ranks."""
    pages = {"page_size": 1, "num_pages": way.max_tokens + 40} if way.is_retracted else {}
    config = EngineConfig(check_integrity_when_idle=True, **way.settings, **pages)
    if config.tp_size == 1:
        engine = Engine.from_config(config)
    else:
        engine = build_tp_engine(
            config,
            start_local_followers,
            lambda rank: None,
            lambda record: None,
            lambda done, total: None,
        )
    if way.is_retracted:
        engine._scheduler._forecast.new_tokens = np.zeros_like  # type: ignore[method-assign]
    try:
        yield engine
    finally:
        engine.close()


def count_valid(engine: Engine, pairs: Sequence[Taken], way: Way) -> int:
    """How many outputs ended by themselves, every one of which is what its schema says."""
    wanted = [pair for pair in pairs for _ in range(way.num_choices)]
    num_ended = 0
    for first in range(0, len(wanted), way.num_streams):
        own = wanted[first : first + way.num_streams]
        requests = [
            GenerateRequest(
                f"s{first + index}",
                PROMPT,
                SamplingParams(temperature=1.0, seed=first + index, max_tokens=way.max_tokens),
                grammar=grammar,
            )
            for index, (_, grammar) in enumerate(own)
        ]
        results = _run(engine, requests)
        num_ended += sum(
            _is_valid(schema, one) for (schema, _), one in zip(own, results, strict=True)
        )
    return num_ended


def _run(engine: Engine, requests: Sequence[GenerateRequest]) -> list[GenerateResult]:
    """All of them from the first step on, however long their grammars take."""
    collector = ResultCollector()
    for request in requests:
        engine.submit(request)
        collector.expect(request.request_id)
    assert isinstance(engine._grammars, CompilingDesk)
    wait([future for _, future in engine._grammars._waiting.values()])
    while collector.is_waiting or engine.has_work:
        collector.add(engine.step())
    return collector.results()


def _is_valid(schema: Schema, result: GenerateResult) -> bool:
    """Whether the output ended by itself; then it must be what the schema says."""
    assert result.error is None, (schema, result.error)
    if result.finish_reason is not FinishReason.STOP:
        return False
    text = TOKENIZER.decode(result.token_ids, skip_special_tokens=True)
    try:
        jsonschema.validate(
            json.loads(text), schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
    except jsonschema.ValidationError as error:
        # RFC 3339 has a year 0000, Python's dates, which the checker asks, do not.
        if error.validator != "format" or not str(error.instance).startswith("0000-"):
            raise
    return True
