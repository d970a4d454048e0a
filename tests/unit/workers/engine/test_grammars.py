"""Outputs obey their grammars, whatever shares the step, and end when those allow no more."""

import json
import re
import threading
from collections.abc import Iterator
from concurrent.futures import wait
from typing import Any

import pytest
from llguidance import LLMatcher
from transformers import AutoTokenizer

from workers import Engine
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.constraints.compiler import GrammarCompiler
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.engine.results import GenerateResult, ResultCollector
from workers.errors import ErrorCode, RequestRejectedError
from workers.sampling.params import SamplingParams

TOKENIZER = AutoTokenizer.from_pretrained(builtin_model_path())
PROMPT = TOKENIZER.encode("def answer(question):\n    return")
ANSWER = LLMatcher.grammar_from_regex("(yes|no|perhaps)")
PERSON = LLMatcher.grammar_from_json_schema(
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[a-z]{1,8}$"},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
                "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 3},
            },
            "required": ["name", "age", "tags"],
            "additionalProperties": False,
        }
    ),
    overrides={"whitespace_flexible": False},
)


def start(**settings: Any) -> Engine:
    return Engine.from_config(
        EngineConfig(num_cpu_threads=1, check_integrity_when_idle=True, **settings)
    )


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    engine = start()
    yield engine
    engine.close()


def request_of(index: int, grammar: str, **changes: Any) -> GenerateRequest:
    fields = {"temperature": 1.0, "seed": index, "max_tokens": 40, "logprobs": 1, **changes}
    return GenerateRequest(f"r{index}", PROMPT, SamplingParams(**fields), grammar=grammar)


def run(engine: Engine, *requests: GenerateRequest) -> list[GenerateResult]:
    collector = ResultCollector()
    for request in requests:
        engine.submit(request)
        collector.expect(request.request_id)
    while collector.is_waiting or engine.has_work:
        collector.add(engine.step())
    return collector.results()


def run_together(engine: Engine, *requests: GenerateRequest) -> list[GenerateResult]:
    """All of them begin in one step, however long their grammars are compiled."""
    collector = ResultCollector()
    for request in requests:
        engine.submit(request)
        collector.expect(request.request_id)
    wait_until_compiled(engine)
    while collector.is_waiting or engine.has_work:
        collector.add(engine.step())
    return collector.results()


def wait_until_compiled(engine: Engine) -> None:
    """Whatever has been submitted begins with the next step."""
    wait([future for _, future in engine._grammars._waiting.values()])


def text_of(result: GenerateResult) -> str:
    return TOKENIZER.decode(result.token_ids)


MIXED = [
    request_of(0, PERSON),
    request_of(1, ""),
    request_of(2, ANSWER),
    request_of(3, PERSON, temperature=0.0),
    request_of(4, ANSWER, presence_penalty=0.5, top_k=3),
    request_of(5, "", temperature=0.0),
    request_of(6, PERSON, ignore_eos=True, top_p=0.9),
]


def check(results: list[GenerateResult]) -> None:
    for request, result in zip(MIXED, results, strict=True):
        assert len(result.logprobs) == len(result.token_ids)
        if request.grammar == ANSWER:
            assert re.fullmatch("yes|no|perhaps", text_of(result))
        if request.grammar == PERSON:
            assert set(json.loads(text_of(result))) == {"name", "age", "tags"}
        if request.grammar:
            # What ends the text belongs to it.
            assert (result.finish_reason, result.stop_token_id) == (FinishReason.STOP, None)


@pytest.fixture(scope="module")
def alone(shared: Engine) -> list[GenerateResult]:
    return [run(shared, request)[0] for request in MIXED]


def test_every_output_obeys_its_grammar(alone: list[GenerateResult]) -> None:
    check(alone)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 4, "num_pages": 14, "max_step_tokens": 24},
        {"enable_overlap": False, "enable_mixed_batches": False},
        {"speculative": "ngram"},
    ],
    ids=["together", "few_pages_and_chunks", "step_by_step", "beside_drafts"],
)
def test_the_company_changes_nothing(alone: list[GenerateResult], settings: dict[str, Any]) -> None:
    engine = start(**settings)
    try:
        results = run(engine, *MIXED)
    finally:
        engine.close()
    assert [one.token_ids for one in results] == [one.token_ids for one in alone]
    check(results)


def test_a_request_that_another_engine_began_goes_on_in_its_grammar(
    shared: Engine, alone: list[GenerateResult]
) -> None:
    whole = alone[0].token_ids
    began = GenerateRequest(
        "again", PROMPT, MIXED[0].sampling, grammar=PERSON, resumed_token_ids=whole[:5]
    )
    assert run(shared, began)[0].token_ids == whole[5:]


def test_a_grammar_that_cannot_be_compiled_ends_its_request_alone(shared: Engine) -> None:
    broken, fine = run(shared, request_of(8, "junk"), request_of(9, ANSWER))
    assert broken.finish_reason is FinishReason.ERROR
    assert broken.error.code is ErrorCode.INVALID_REQUEST
    assert re.fullmatch("yes|no|perhaps", text_of(fine))


def test_an_id_is_in_use_while_its_grammar_is_compiled(
    shared: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    compile_, may_compile = GrammarCompiler.compile, threading.Event()

    def slowly(*args: Any) -> Any:
        assert may_compile.wait(60)
        return compile_(*args)

    monkeypatch.setattr(GrammarCompiler, "compile", slowly)
    shared.submit(request_of(0, ANSWER))
    for grammar in (ANSWER, ""):
        with pytest.raises(RequestRejectedError, match="is in use"):
            shared.submit(request_of(0, grammar))
    assert shared.stats().num_waiting == 1
    shared.abort("r0")
    (output,) = shared.step()
    assert output.finish_reason is FinishReason.ABORT
    may_compile.set()
    while shared.has_work:
        assert shared.step() == []


def test_an_engine_ends_while_a_step_waits_for_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start()
    monkeypatch.setattr(engine, "_provide_masks", lambda: None)
    engine.submit(request_of(0, ANSWER))
    while not engine._in_flight:
        engine.step()
    engine.close()


def test_where_there_is_no_tokenizer_grammars_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.runner.grammars.TOKENIZER_FILE", "nothing.json")
    engine = start()
    try:
        assert not engine.info.has_grammars
        with pytest.raises(RequestRejectedError, match=r"no nothing\.json"):
            engine.submit(request_of(0, ANSWER))
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("grammar", "text"),
    [(r"start: /[^\s\S]/", ""), ('start: "yes" B\nB: /a/ & /b/', "yes")],
    ids=["from_the_start", "later"],
)
def test_a_grammar_that_leads_nowhere_is_an_error_and_no_end(
    shared: Engine, grammar: str, text: str
) -> None:
    (result,) = run(shared, request_of(20, LLMatcher.grammar_from_lark(grammar)))
    assert result.finish_reason is FinishReason.ERROR
    assert result.error.code is ErrorCode.INVALID_REQUEST
    assert len(result.error.message.splitlines()) < 5
    assert text_of(result) == text


def test_a_grammar_alone_says_when_a_text_may_end(shared: Engine) -> None:
    (result,) = run(shared, request_of(21, ANSWER, min_tokens=30))
    assert re.fullmatch("yes|no|perhaps", text_of(result))


class Panic(BaseException):
    """As pyo3 raises what panics in Rust."""


@pytest.mark.parametrize("failure", [KeyError, Panic])
def test_whatever_a_compiler_raises_ends_one_request(
    shared: Engine, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]
) -> None:
    def fail(*args: Any) -> None:
        raise failure("added_tokens")

    monkeypatch.setattr(GrammarCompiler, "_fresh", fail)
    broken, fine = run(shared, request_of(22, ANSWER), request_of(23, "", max_tokens=2))
    assert (broken.error.code, fine.error) == (ErrorCode.INTERNAL, None)


@pytest.mark.parametrize("token_id", [-1, 2**33])
def test_what_is_wrong_beside_the_grammar_is_refused_at_the_door(
    shared: Engine, token_id: int
) -> None:
    request = GenerateRequest(
        "r", PROMPT, SamplingParams(), grammar=ANSWER, resumed_token_ids=[token_id]
    )
    with pytest.raises(RequestRejectedError, match="is not in"):
        shared.submit(request)


def test_what_is_being_compiled_counts_as_waiting() -> None:
    engine = start(max_waiting_requests=2)
    try:
        for index in range(2):
            engine.submit(request_of(index, ANSWER, max_tokens=4))
        assert engine.stats().queued_tokens == 2 * len(PROMPT)
        with pytest.raises(RequestRejectedError, match="waiting already"):
            engine.submit(request_of(2, ANSWER))
    finally:
        engine.close()


def test_an_aborted_id_is_in_use_until_its_end_is_told(shared: Engine) -> None:
    shared.submit(request_of(24, ANSWER))
    shared.abort("r24")
    with pytest.raises(RequestRejectedError, match="is in use"):
        shared.submit(request_of(24, ANSWER))
    while shared.has_work:
        shared.step()
