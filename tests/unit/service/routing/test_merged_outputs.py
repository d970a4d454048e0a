"""Merging outputs changes how many there are, never what they say."""

from collections import deque

from hypothesis import given
from hypothesis import strategies as st

from service.routing.merged_outputs import take_merged
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, OutputError, StepOutput
from workers.errors import ErrorCode


def take_all(outputs):
    queue = deque(outputs)
    taken = []
    while queue:
        taken.append(take_merged(queue))
    return taken


def logprobs_of(token_id):
    return TokenLogprobs(-float(token_id), 1, [token_id], [-float(token_id)])


def test_piled_up_outputs_become_one():
    outputs = [
        StepOutput("r", [1], num_cached_tokens=7, queue_s=0.1, prefill_s=0.2),
        StepOutput("r", [2, 3]),
        StepOutput("r", [4], FinishReason.STOP, 4),
    ]
    assert take_all(outputs) == [
        StepOutput("r", [1, 2, 3, 4], FinishReason.STOP, 4, 7, queue_s=0.1, prefill_s=0.2)
    ]


def test_so_many_become_one_that_what_is_made_of_it_takes_a_moment():
    taken = take_all([StepOutput("r", [token]) for token in range(600)])
    assert [len(output.token_ids) for output in taken] == [256, 256, 88]
    assert [token for output in taken for token in output.token_ids] == list(range(600))


def test_a_single_output_is_passed_on_as_it_is():
    output = StepOutput("r", [1])
    assert take_all([output])[0] is output


def test_a_failure_comes_after_the_tokens_before_it():
    error = OutputError(ErrorCode.INTERNAL, "broken")
    failed = StepOutput("r", [], FinishReason.ERROR, error=error)
    first, second = take_all([StepOutput("r", [1]), StepOutput("r", [2]), failed])
    assert first.token_ids == [1, 2]
    assert first.finish_reason is None
    assert second is failed


def test_an_abort_is_not_merged_either():
    aborted = StepOutput("r", [], FinishReason.ABORT)
    assert take_all([StepOutput("r", [1]), aborted])[1] is aborted


def test_the_outputs_that_were_merged_are_not_changed():
    first, second = StepOutput("r", [1], logprobs=[logprobs_of(1)]), StepOutput("r", [2])
    second.logprobs = [logprobs_of(2)]
    (merged,) = take_all([first, second])
    assert merged.logprobs == [logprobs_of(1), logprobs_of(2)]
    assert (first.token_ids, second.token_ids) == ([1], [2])
    assert len(first.logprobs) == 1


def test_outputs_with_and_without_log_probabilities_stay_apart():
    taken = take_all([StepOutput("r", [1], logprobs=[logprobs_of(1)]), StepOutput("r", [2])])
    assert [output.token_ids for output in taken] == [[1], [2]]


@given(st.lists(st.lists(st.integers(0, 99), max_size=3), min_size=1, max_size=20), st.booleans())
def test_tokens_and_end_are_those_of_the_whole(steps, has_logprobs):
    outputs = [
        StepOutput(
            "r",
            list(tokens),
            FinishReason.LENGTH if index == len(steps) - 1 else None,
            logprobs=[logprobs_of(token) for token in tokens] if has_logprobs else None,
        )
        for index, tokens in enumerate(steps)
    ]
    (merged,) = take_all(outputs)
    expected = [token for tokens in steps for token in tokens]
    assert merged.token_ids == expected
    assert merged.finish_reason is FinishReason.LENGTH
    assert merged.logprobs == ([logprobs_of(t) for t in expected] if has_logprobs else None)
