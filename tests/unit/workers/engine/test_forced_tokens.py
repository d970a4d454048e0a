"""What a grammar forces comes several tokens a step, and is what comes one token a step."""

import json
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from llguidance import LLMatcher

from tests.unit.workers.engine.test_grammars import TOKENIZER, request_of, run
from workers import Engine
from workers.config import EngineConfig
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.engine.results import GenerateResult, ResultCollector
from workers.runner import model_runner
from workers.scheduler import forced_rows

NAMES = [f"the_{word}_of_the_customer" for word in ("name", "street", "number")]
SCHEMA = {
    "type": "object",
    "properties": {
        name: {"type": "integer", "minimum": 0, "maximum": 99}
        if "number" in name
        else {"type": "string", "pattern": "^[a-z]{1,3}$"}
        for name in NAMES
    },
    "required": NAMES,
    "additionalProperties": False,
}
FORM = LLMatcher.grammar_from_json_schema(
    json.dumps(SCHEMA), overrides={"whitespace_flexible": False}
)
TEXT = "this is the only text that may be written, all of it"
FIXED = LLMatcher.grammar_from_lark(f'start: "{TEXT}"')


def requests() -> list[GenerateRequest]:
    common = {"max_tokens": 100, "logprobs": 3}
    return [
        request_of(0, FORM, **common),
        request_of(1, "", temperature=0.9, max_tokens=60, logprobs=1),
        request_of(2, FORM, **common, temperature=0.0),
        request_of(3, FORM, **common, presence_penalty=0.8, frequency_penalty=0.3),
        request_of(4, FIXED, **common, top_k=5),
        request_of(5, FORM, **{**common, "logprobs": None}, top_p=0.8, logit_bias={5: 3.0}),
        request_of(6, FORM, **{**common, "max_tokens": 23}),
        request_of(7, FIXED, **common, stop_token_ids=(TOKENIZER.encode(" that")[0],)),
    ]


def start(**settings: Any) -> Engine:
    return Engine.from_config(
        EngineConfig(num_cpu_threads=1, check_integrity_when_idle=True, **settings)
    )


def told(results: list[GenerateResult]) -> list[Any]:
    """Everything that a caller sees but log probabilities."""
    return [(one.token_ids, one.finish_reason, one.stop_token_id, one.error) for one in results]


def logprobs_of(results: list[GenerateResult]) -> list[float]:
    entries = [entry for one in results for entry in one.logprobs]
    return [value for entry in entries for value in (entry.logprob, *entry.top_logprobs)]


@pytest.fixture(scope="module")
def token_by_token() -> Iterator[list[GenerateResult]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model_runner, "can_repeat_slots", lambda config, model: False)
        engine = start()
    try:
        yield run(engine, *requests())
    finally:
        engine.close()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"page_size": 4, "max_step_tokens": 24},
        {"enable_overlap": False, "enable_mixed_batches": False},
        pytest.param({"max_running_requests": 5}, marks=pytest.mark.nightly),
    ],
    ids=["together", "small_pages_and_chunks", "step_by_step", "few_rows"],
)
def test_texts_are_those_of_one_token_a_step(
    token_by_token: list[GenerateResult], settings: dict[str, Any]
) -> None:
    expected = token_by_token
    engine = start(**settings)
    try:
        results = run(engine, *requests())
        stats = engine.stats()
    finally:
        engine.close()
    assert told(results) == told(expected)
    # Batches of other sizes round otherwise.
    assert logprobs_of(results) == pytest.approx(logprobs_of(expected), abs=5e-3)
    assert stats.num_output_tokens == sum(len(one.token_ids) for one in results)
    for index in (0, 2, 3, 5):
        assert list(json.loads(TOKENIZER.decode(results[index].token_ids))) == NAMES
    assert results[7].finish_reason is FinishReason.STOP
    assert TOKENIZER.decode(results[7].token_ids).endswith("text that")


def test_who_is_retracted_within_a_run_goes_on_with_it(
    token_by_token: list[GenerateResult],
) -> None:
    engine = start(enable_overlap=False)
    try:
        collector = ResultCollector()
        for request in requests():
            engine.submit(request)
            collector.expect(request.request_id)
        while collector.is_waiting:
            collector.add(engine.step())
            if engine.stats().num_steps % 3 == 0 and engine.stats().num_running > 1:
                engine._scheduler._retractor.retract_one()
        assert engine.stats().num_preemptions > 5
    finally:
        engine.close()
    assert told(collector.results()) == told(token_by_token)


def test_a_form_takes_fewer_steps_than_tokens() -> None:
    engine = start()
    try:
        (result,) = run(engine, requests()[0])
        assert engine.stats().num_steps < 0.6 * len(result.token_ids)
    finally:
        engine.close()


def test_a_request_gets_one_output_a_step_with_all_of_its_tokens() -> None:
    engine = start()
    try:
        engine.submit(request_of(0, FIXED, max_tokens=100))
        steps: list[list[StepOutput]] = []
        while engine.has_work:
            steps.append(engine.step())
    finally:
        engine.close()
    outputs = [output for outputs in steps for output in outputs]
    assert all(len(outputs) <= 1 for outputs in steps)
    # The first mask had one token, which the rest follows.
    assert [len(one.token_ids) for one in outputs] == [1, len(TOKENIZER.encode(TEXT)) - 1]
    assert all(len(one.logprobs or []) == len(one.token_ids) for one in outputs)


def test_a_step_of_grammars_alone_is_longer_than_what_rows_cost_nothing(monkeypatch) -> None:
    monkeypatch.setattr(forced_rows, "FLAT_ROWS", 1)
    monkeypatch.setattr(forced_rows, "MAX_SHARE", 1)
    engine = start()
    try:
        (result,) = run(engine, request_of(0, FIXED, max_tokens=100))
        assert engine.stats().num_steps < 0.7 * len(result.token_ids)
    finally:
        engine.close()


def test_who_has_no_grammar_waits_for_nobody_s_forced_tokens(monkeypatch) -> None:
    monkeypatch.setattr(forced_rows, "FLAT_ROWS", 1)
    monkeypatch.setattr(forced_rows, "MAX_SHARE", 1)
    engine = start()
    try:
        # Outlives them all, however late their grammars are compiled.
        engine.submit(request_of(9, "", temperature=0.0, max_tokens=1000, ignore_eos=True))
        for index in range(6):
            engine.submit(request_of(index, FIXED, max_tokens=100))
        most, unfinished = 0, 6
        while unfinished:
            for output in engine.step():
                most = max(most, len(output.token_ids))
                unfinished -= output.finish_reason is not None
        engine.abort("r9")
        while engine.has_work:
            engine.step()
    finally:
        engine.close()
    assert most == 1


def test_what_another_engine_began_may_go_on_within_what_is_forced(
    token_by_token: list[GenerateResult],
) -> None:
    whole = token_by_token[0].token_ids
    engine = start()
    try:
        for cut in (1, 3, 8):
            own = msgspec.structs.replace(
                requests()[0], request_id=f"again-{cut}", resumed_token_ids=whole[:cut]
            )
            assert run(engine, own)[0].token_ids == whole[cut:]
    finally:
        engine.close()


def test_a_request_may_be_aborted_within_its_run() -> None:
    engine = start()
    try:
        for after in range(4):
            engine.submit(request_of(after, FIXED, max_tokens=100))
            engine.submit(request_of(10 + after, FORM, max_tokens=100))
            while not engine.stats().num_running:
                engine.step()
            for _ in range(after):
                engine.step()
            engine.abort(f"r{after}")
            while engine.has_work:
                engine.step()
            engine.check_integrity()
    finally:
        engine.close()


def test_who_rules_out_a_forced_token_gets_an_error() -> None:
    """By name, and what was sampled instead is no output."""
    engine = start()
    try:
        (result,) = run(engine, request_of(0, FIXED, allowed_token_ids=(7, 9), max_tokens=50))
    finally:
        engine.close()
    assert result.finish_reason is FinishReason.ERROR
    assert "must follow" in result.error.message or "cannot be followed" in result.error.message
