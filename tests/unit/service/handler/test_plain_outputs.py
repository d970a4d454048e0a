"""The short way of outputs that are tokens and nothing else tells what the long way tells."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.handler.choice import ChoiceAssembler, ChoiceOptions
from service.handler.requests import TextOptions
from service.tokenizer.encoder import load_tokenizer
from service.tokenizer.folder import read_tokenizer_files
from service.tokenizer.stop_strings import StopStrings
from workers.builtin import builtin_model_path
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, StepOutput

NEVER = "\x00never in any text\x00"


@pytest.fixture(scope="module")
def options():
    _, pieces = load_tokenizer(read_tokenizer_files(builtin_model_path()))
    return ChoiceOptions(pieces, TextOptions(), None, 0, frozenset())


def told(assembler, steps):
    deltas = [
        assembler.push(StepOutput("r", list(step), FinishReason.LENGTH if last else None))
        for last, step in ((index == len(steps) - 1, step) for index, step in enumerate(steps))
    ]
    shown = [delta for delta in deltas if delta is not None]
    return (
        "".join(delta.text for delta in shown),
        [token for delta in shown for token in delta.token_ids],
        shown[-1].finish_reason,
        shown[-1].num_output_tokens,
    )


@given(steps=st.lists(st.lists(st.integers(0, 4095), max_size=4), min_size=1, max_size=12))
def test_both_ways_tell_the_same(options, steps):
    # A stop string, even one that never occurs, takes the long way.
    long_way = replace(options, stop_strings=StopStrings((NEVER,)))
    assert told(ChoiceAssembler(0, options), steps) == told(ChoiceAssembler(0, long_way), steps)


def test_an_output_without_tokens_tells_nothing(options):
    scoring = replace(options, is_scoring_only=True)
    stopping = replace(options, stop_strings=StopStrings((NEVER,)))
    for each in (options, scoring, stopping):
        assert ChoiceAssembler(0, each).push(StepOutput("r", [])) is None
    assert ChoiceAssembler(0, scoring).push(StepOutput("r", [5])) is None
    last = ChoiceAssembler(0, stopping).push(StepOutput("r", [], FinishReason.LENGTH))
    assert last.finish_reason == "length"


def test_offsets_count_from_behind_an_echo(options):
    assembler = ChoiceAssembler(0, options, num_chars=len("echoed"))
    output = StepOutput("r", [100], logprobs=[TokenLogprobs(-1.0, 1, [], [])])
    assert assembler.push(output).logprobs[0].text_offset == len("echoed")
