"""A request that another engine began goes on as it would have there, wherever it was cut."""

import pytest

from tests.fakes.logprobs import prompt_entries
from tests.unit.workers.scheduler.driver import TIGHT, Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.errors import ErrorCode, RequestRejectedError

PROMPT = [3, 9, 4, 9, 5, 8]
LIMITED = make_request("limited", PROMPT, seed=4, max_tokens=12, logprobs=1)
STOPPED = make_request(
    "stopped", PROMPT, seed=5, max_tokens=40, min_tokens=5, stop_token_ids=tuple(range(2, 9))
)
ENDED = make_request("ended", PROMPT, seed=6, max_tokens=50, min_tokens=6, ignore_eos=False)
SCORED = make_request("scored", PROMPT, seed=7, max_tokens=6, prompt_logprobs=1)


def resumed(request: GenerateRequest, token_ids: list[int]) -> GenerateRequest:
    return GenerateRequest(
        f"{request.request_id} from {len(token_ids)}",
        request.prompt_token_ids,
        request.sampling,
        resumed_token_ids=token_ids,
    )


@pytest.mark.parametrize("is_overlapped", [False, True])
@pytest.mark.parametrize("whole", [LIMITED, STOPPED, ENDED, SCORED], ids=lambda r: r.request_id)
def test_the_rest_is_what_came_next_wherever_it_was_cut(
    whole: GenerateRequest, is_overlapped: bool
):
    config = make_config(**TIGHT | {"num_pages": 65, "max_context_len": 60})
    expected = run_alone(config, whole)
    for num_done in range(len(expected.token_ids)):
        driver = Driver(config, is_overlapped)
        request = resumed(whole, expected.token_ids[:num_done])
        driver.submit(request)
        driver.finish()
        outputs = driver.outputs[request.request_id]
        assert driver.tokens(request.request_id) == expected.token_ids[num_done:]
        assert outputs[-1].finish_reason is expected.finish_reason
        assert outputs[-1].stop_token_id == expected.stop_token_id
        if whole.sampling.logprobs is not None:
            entries = [entry for output in outputs for entry in output.logprobs or ()]
            assert entries == expected.logprobs[num_done:]
        is_scored = whole.sampling.prompt_logprobs is not None and num_done == 0
        assert prompt_entries(outputs[0]) == (expected.prompt_logprobs if is_scored else None)


def test_what_came_with_the_first_token_does_not_come_twice():
    driver = Driver(make_config())
    driver.submit(make_request("warm", [3] * 12, max_tokens=2))
    driver.finish()
    request = resumed(make_request("r", [3] * 12, max_tokens=8), [7, 7])
    driver.submit(request)
    driver.clock.now_s += 5.0
    driver.finish()
    first = driver.outputs[request.request_id][0]
    assert (first.num_cached_tokens, first.queue_s, first.prefill_s) == (0, 0.0, 0.0)


def test_output_that_it_came_with_counts_as_taken_in_and_not_as_generated():
    driver = Driver(make_config())
    driver.submit(resumed(make_request("r", [3] * 6, max_tokens=8), [7, 8, 9]))
    driver.finish()
    stats = driver.scheduler.stats()
    assert (stats.num_prompt_tokens, stats.num_output_tokens) == (9, 5)
    assert stats.num_written_tokens == 14


def test_it_runs_before_new_requests_of_its_priority_and_after_more_urgent_ones():
    driver = Driver(make_config(max_running_requests=1))
    driver.submit(make_request("new", [4] * 6, seed=4))
    driver.submit(make_request("urgent", [3] * 6, priority=-1, seed=3))
    driver.submit(resumed(make_request("r", [5] * 6, seed=5), [7]))
    driver.finish()
    order = [admitted.seed for plan in driver.plans for admitted in plan.admitted]
    assert order == [3, 5, 4]


def rejection(driver: Driver, request: GenerateRequest) -> RequestRejectedError:
    before = driver.scheduler.stats()
    with pytest.raises(RequestRejectedError) as caught:
        driver.scheduler.submit(request)
    assert driver.scheduler.stats() == before
    return caught.value


@pytest.mark.parametrize("token_id", [-1, 32, 2**31, 2**70])
def test_impossible_tokens_are_refused(token_id: int):
    error = rejection(Driver(make_config()), resumed(make_request("r", [3]), [4, token_id]))
    assert error.code is ErrorCode.INVALID_REQUEST
    assert str(token_id) in error.message


@pytest.mark.parametrize("num_done", [8, 9, 1000])
def test_a_request_that_wants_no_more_tokens_is_refused(num_done: int):
    error = rejection(Driver(make_config()), resumed(make_request("r", [3]), [4] * num_done))
    assert (error.code, error.param) == (ErrorCode.INVALID_REQUEST, "resumed_token_ids")


def test_without_a_limit_of_its_own_the_engines_limit_is_the_end():
    driver = Driver(make_config(max_context_len=16))
    request = make_request("r", [3] * 6, max_tokens=None)
    error = rejection(driver, resumed(request, [4] * 10))
    assert error.param == "resumed_token_ids"
    last_one = resumed(request, [4] * 9)
    driver.submit(last_one)
    driver.finish()
    assert len(driver.tokens(last_one.request_id)) == 1
    assert driver.last(last_one.request_id).finish_reason is FinishReason.LENGTH


def test_its_output_counts_against_the_queue():
    driver = Driver(make_config(max_waiting_tokens=16))
    driver.submit(make_request("waits", [3] * 6))
    long_output = resumed(make_request("r", [4] * 5, max_tokens=20), [7] * 6)
    assert rejection(driver, long_output).code is ErrorCode.QUEUE_FULL
    driver.submit(resumed(make_request("r", [4] * 5, max_tokens=20), [7] * 5))


def test_a_resumed_request_that_is_retracted_goes_on_as_well():
    config = make_config(**TIGHT)
    driver = Driver(config, has_reserve=False)
    wholes = [make_request(f"r{i}", [i + 3] * 6, seed=i, max_tokens=20) for i in range(4)]
    answers = [run_alone(config, whole).token_ids for whole in wholes]
    pairs = zip(wholes, answers, strict=True)
    requests = [resumed(one, ids[: 3 * i]) for i, (one, ids) in enumerate(pairs)]
    driver.submit(*requests)
    driver.finish()
    assert driver.scheduler.stats().num_preemptions > 0
    for index, (request, token_ids) in enumerate(zip(requests, answers, strict=True)):
        assert driver.tokens(request.request_id) == token_ids[3 * index :]
