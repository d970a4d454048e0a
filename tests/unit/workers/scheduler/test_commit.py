"""What a result does to requests, and results that do not fit their plan."""

import numpy as np
import pytest

from tests.fakes.logprobs import pack, prompt_entries
from tests.unit.workers.scheduler.driver import EOS, Clock, make_config, make_request
from workers.engine.logprobs import TokenLogprobs
from workers.engine.protocol import FinishReason, GenerateRequest, StepOutput
from workers.errors import ErrorCode
from workers.scheduler.plan import NAN_TOKEN, StepPlan, StepResult
from workers.scheduler.scheduler import Scheduler


def result(*token_ids: int) -> StepResult:
    return StepResult(np.array(token_ids, dtype=np.int32))


def outputs_of(request: GenerateRequest, *token_ids: int) -> list[StepOutput]:
    """One request alone; the sampler says token_ids."""
    scheduler = Scheduler(make_config())
    scheduler.submit(request)
    outputs: list[StepOutput] = []
    for token_id in token_ids:
        plan = scheduler.schedule()
        assert plan is not None
        outputs += scheduler.commit(plan, result(token_id))
    scheduler.check_integrity()
    return outputs


def ends(outputs: list[StepOutput]) -> list[tuple[FinishReason | None, int | None]]:
    return [(output.finish_reason, output.stop_token_id) for output in outputs]


def test_end_of_sequence_ends_a_request_and_is_part_of_its_tokens():
    outputs = outputs_of(make_request("r", [3], ignore_eos=False), 7, EOS)
    assert ends(outputs) == [(None, None), (FinishReason.STOP, EOS)]
    assert [output.token_ids for output in outputs] == [[7], [EOS]]


def test_ignored_end_of_sequence_is_a_token_like_others():
    outputs = outputs_of(make_request("r", [3], max_tokens=3), EOS, 7, EOS)
    assert ends(outputs) == [(None, None), (None, None), (FinishReason.LENGTH, None)]


def test_a_stop_id_ends_a_request_even_when_end_of_sequence_is_ignored():
    outputs = outputs_of(make_request("r", [3], stop_token_ids=(9,)), EOS, 9)
    assert ends(outputs) == [(None, None), (FinishReason.STOP, 9)]


def test_a_stop_id_as_the_last_allowed_token_is_a_stop():
    outputs = outputs_of(make_request("r", [3], stop_token_ids=(9,), max_tokens=1), 9)
    assert ends(outputs) == [(FinishReason.STOP, 9)]


def test_nothing_ends_before_min_tokens():
    request = make_request("r", [3], stop_token_ids=(9,), ignore_eos=False, min_tokens=2)
    outputs = outputs_of(request, 9, EOS, EOS)
    assert ends(outputs) == [(None, None), (None, None), (FinishReason.STOP, EOS)]


@pytest.mark.parametrize("num_good_tokens", [0, 3])
def test_logits_without_a_number_end_a_request_with_an_error_and_leave_no_page(num_good_tokens):
    scheduler = Scheduler(make_config())
    prompt = list(range(3, 12))
    scheduler.submit(make_request("r", prompt, max_tokens=20))
    outputs: list[StepOutput] = []
    for token_id in [7] * num_good_tokens + [NAN_TOKEN]:
        plan = scheduler.schedule()
        assert plan is not None
        outputs += scheduler.commit(plan, result(token_id))
    scheduler.check_integrity()
    assert outputs[-1].finish_reason is FinishReason.ERROR
    assert outputs[-1].error is not None
    assert outputs[-1].error.code is ErrorCode.INTERNAL
    assert not scheduler.has_work
    assert scheduler.stats().num_used_pages == 0
    if num_good_tokens == 0:
        assert scheduler.stats().num_evictable_pages == 0


def test_max_tokens_and_the_context_end_a_request():
    assert len(outputs_of(make_request("r", [3], max_tokens=2), 7, 7)) == 2
    outputs = outputs_of(make_request("r", [3] * 62, max_tokens=None), 7, 7)
    assert ends(outputs)[-1] == (FinishReason.LENGTH, None)


def test_the_first_output_alone_tells_the_times_and_the_cached_tokens():
    clock = Clock()
    scheduler = Scheduler(make_config(page_size=4, max_step_tokens=4), clock)
    for name, cached in (("cold", 0), ("warm", 8)):
        scheduler.submit(make_request(name, list(range(2, 12)), max_tokens=2))
        clock.now_s += 3.0
        outputs: list[StepOutput] = []
        while (plan := scheduler.schedule()) is not None:
            clock.now_s += 0.5
            tokens = np.full(int(plan.samples.sum()), 7, dtype=np.int32)
            unfinished = (False,) * (1 - len(tokens))
            outputs += scheduler.commit(plan, StepResult(tokens, chunk_has_nan=unfinished))
        first, second = outputs
        num_prefill_steps = 1 if cached else 3
        assert (first.queue_s, first.prefill_s) == (3.0, 0.5 * num_prefill_steps)
        assert first.num_cached_tokens == cached
        assert (second.queue_s, second.prefill_s, second.num_cached_tokens) == (0.0, 0.0, 0)
    assert scheduler.stats().num_cached_prompt_tokens == 8


def test_a_result_that_does_not_tell_of_every_chunk_is_refused():
    scheduler = Scheduler(make_config(max_step_tokens=4))
    scheduler.submit(make_request("r", list(range(2, 12))))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="1 unfinished prefills, its result tells of 0"):
        scheduler.commit(plan, result())


def entry(value: float) -> TokenLogprobs:
    return TokenLogprobs(value, 1, [], [])


def test_log_probabilities_go_to_those_that_asked():
    scheduler = Scheduler(make_config())
    scheduler.submit(make_request("asks", [3], logprobs=0))
    scheduler.submit(make_request("does-not", [4]))
    plan = scheduler.schedule()
    assert plan is not None
    both = StepResult(np.array([7, 8], dtype=np.int32), (entry(-1.0), None))
    asks, does_not = scheduler.commit(plan, both)
    assert (asks.logprobs, does_not.logprobs) == ([entry(-1.0)], None)
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="asked for log probabilities"):
        scheduler.commit(plan, result(7, 8))


def test_prompt_log_probabilities_are_gathered_over_chunks():
    scheduler = Scheduler(make_config(max_step_tokens=3))
    scheduler.submit(make_request("r", [5, 6, 7, 8, 9, 10, 11], prompt_logprobs=4))
    seen, outputs = [], []
    for num_samples in (0, 0, 1):
        plan = scheduler.schedule()
        assert plan is not None
        targets = {}
        for wanted in plan.prompt_logprobs:
            assert (wanted.row, wanted.num_top) == (0, 4)
            seen.append(wanted.target_ids.tolist())
            targets[0] = pack([entry(-float(target)) for target in seen[-1]])
        tokens = np.array([7] * num_samples, dtype=np.int32)
        unfinished = (False,) * (1 - num_samples)
        outputs += scheduler.commit(plan, StepResult(tokens, (), targets, unfinished))
    assert seen == [[6, 7, 8], [9, 10, 11]], "the last chunk has one token and no target"
    assert prompt_entries(outputs[0]) == [None, *(entry(-float(t)) for t in range(6, 12))]


def test_prompt_log_probabilities_keep_a_request_from_the_prefix_cache():
    scheduler = Scheduler(make_config(page_size=2))
    for _ in range(2):
        scheduler.submit(make_request("r", [5, 6, 7], prompt_logprobs=0, max_tokens=1))
        plan = scheduler.schedule()
        assert plan is not None
        assert plan.num_tokens == 3
        entries = (entry(-1.0), entry(-2.0))
        output = scheduler.commit(plan, StepResult(result(7).token_ids, (), {0: pack(entries)}))[0]
        assert prompt_entries(output) == [None, *entries]
        scheduler.check_integrity()


def running(num_requests: int) -> tuple[Scheduler, StepPlan]:
    scheduler = Scheduler(make_config())
    for i in range(num_requests):
        scheduler.submit(make_request(f"r{i}", [3]))
    plan = scheduler.schedule()
    assert plan is not None
    return scheduler, plan


@pytest.mark.parametrize("token_ids", [(), (7,), (7, 7, 7)])
def test_a_result_of_the_wrong_length_is_an_error(token_ids: tuple[int, ...]):
    scheduler, plan = running(2)
    with pytest.raises(ValueError, match="2 sampling rows"):
        scheduler.commit(plan, result(*token_ids))


def test_missing_prompt_log_probabilities_are_an_error():
    scheduler = Scheduler(make_config())
    scheduler.submit(make_request("r", [5, 6], prompt_logprobs=0))
    plan = scheduler.schedule()
    assert plan is not None
    with pytest.raises(ValueError, match="prompt log probabilities"):
        scheduler.commit(plan, result(7))


def test_plans_are_committed_once_and_in_order():
    scheduler, first = running(1)
    second = scheduler.schedule()
    assert second is not None
    with pytest.raises(RuntimeError, match="plan 1 is not next to commit, 0 is"):
        scheduler.commit(second, result(7))
    scheduler.commit(first, result(7))
    with pytest.raises(RuntimeError, match="not next to commit"):
        scheduler.commit(first, result(7))
    scheduler.commit(second, result(7))
    with pytest.raises(RuntimeError, match="none is"):
        scheduler.commit(second, result(7))
