"""The account of what encoders made: granted with a slot or not at all, given back once, shared by
content, and never seen by another request.
"""

import random

import numpy as np
import pytest

from tests.unit.workers.scheduler.driver import Driver, make_config, make_request
from tests.unit.workers.scheduler.history_runner import run_alone
from workers.engine.encoder_input import FeatureEncoder, SourceFeatures, SourceTokens, TextEncoder
from workers.engine.protocol import AccountPages, FinishReason, GenerateRequest
from workers.errors import ConfigError, ErrorCode, IntegrityError, RequestRejectedError
from workers.scheduler import prefills_under_way
from workers.scheduler.config import EncoderAccount

READER = TextEncoder(max_tokens=24, vocab_size=32)


def config_of(num_encoder_pages: int = 33, **changes):
    account = EncoderAccount(num_encoder_pages, READER)
    return make_config(**{"encoder": account, **changes})


def request_of(request_id, prompt, source, **options) -> GenerateRequest:
    salt, priority = options.pop("salt", ""), options.pop("priority", 0)
    plain = make_request(request_id, prompt, priority, salt, **options)
    return GenerateRequest(
        plain.request_id,
        plain.prompt_token_ids,
        plain.sampling,
        plain.priority,
        plain.cache_salt,
        encoder_input=SourceTokens(source),
    )


def check_alone(driver: Driver, *requests: GenerateRequest) -> None:
    for request in requests:
        expected = run_alone(driver.config, request).token_ids
        assert driver.tokens(request.request_id) == expected, request.request_id


def num_used(driver: Driver) -> int:
    return driver.scheduler._encoders[0].counts().num_used


def test_equal_prompts_of_unlike_inputs_share_nothing():
    driver = Driver(config_of())
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    one, other = request_of("one", prompt, [1, 2, 3]), request_of("other", prompt, [1, 2, 4])
    for request in (one, other):
        driver.submit(request)
        driver.finish()
    check_alone(driver, one, other)
    assert driver.outputs["other"][0].num_cached_tokens == 0
    assert driver._runner.encoders.num_encoded == 2


def test_statistics_tell_of_the_inputs_account_beside_the_tokens():
    driver = Driver(config_of())
    driver.submit(request_of("r", [3, 4, 5], [1, 2, 3, 4, 5]))
    driver.launch()
    tokens, inputs = driver.scheduler.stats().accounts
    assert (tokens.name, tokens.num_used) == ("every_token", 1)
    assert inputs == AccountPages("encoder", 32, 2, 0)
    driver.commit()
    driver.finish()
    assert driver.scheduler.stats().accounts[1] == AccountPages("encoder", 32, 0, 2)


def test_an_input_is_read_once_for_all_that_bring_it_later():
    driver = Driver(config_of())
    prompt = [3, 4, 5, 6, 7, 8, 9, 10, 11]
    requests = [request_of(str(index), prompt, [7] * 9, seed=index) for index in range(3)]
    driver.submit(requests[0])
    driver.step()
    assert num_used(driver) == 3
    driver.submit(*requests[1:])
    driver.step()
    assert num_used(driver) == 3
    driver.finish()
    check_alone(driver, *requests)
    assert driver._runner.encoders.num_encoded == 1
    assert driver.outputs["2"][0].num_cached_tokens == 8
    # Another tenant reads it anew.
    stranger = request_of("stranger", prompt, [7] * 9, salt="tenant")
    driver.submit(stranger)
    driver.finish()
    check_alone(driver, stranger)
    assert driver._runner.encoders.num_encoded == 2


def test_who_brings_the_same_long_input_waits_until_it_was_read(monkeypatch):
    monkeypatch.setattr(prefills_under_way, "MIN_SAVED_TOKENS", 20)
    driver = Driver(config_of(num_encoder_pages=65))
    long = [request_of(f"long {index}", [3, index], [7] * 20) for index in range(3)]
    short = [request_of(f"short {index}", [3, index], [7] * 19) for index in range(2)]
    driver.submit(*long, *short)
    driver.finish()
    check_alone(driver, *long, *short)
    assert driver._runner.encoders.num_encoded == 1 + 2
    assert num_used(driver) == 0


def test_without_a_prefix_cache_nothing_is_kept():
    driver = Driver(config_of(enable_prefix_cache=False))
    for name in ("one", "two"):
        driver.submit(request_of(name, [3], [7] * 9))
        driver.finish()
    assert driver._runner.encoders.num_encoded == 2
    assert driver.scheduler._encoders[0].counts().num_evictable == 0


def test_pages_are_granted_with_admission_or_not_at_all():
    """Room for the input of one request at a time, and slots and tokens for all."""
    driver = Driver(config_of(num_encoder_pages=7))
    requests = [request_of(str(index), [3, index], [index] * 20) for index in range(4)]
    driver.submit(*requests)
    for _ in driver.steps():
        assert driver.scheduler.stats().num_running <= 1
        assert num_used(driver) in (0, 5)
    check_alone(driver, *requests)
    assert driver._runner.encoders.num_encoded == 4


def test_inputs_used_longest_ago_go_first():
    driver = Driver(config_of(num_encoder_pages=9))
    for name in ("a", "b", "a", "c", "a", "b"):
        driver.submit(request_of(name, [3], [ord(name) - ord("a")] * 16))
        driver.finish()
    # The third distinct input does not fit beside the first two, and b was used longest ago.
    assert driver._runner.encoders.num_encoded == 4


def test_a_retracted_request_finds_its_input_again():
    driver = Driver(
        config_of(page_size=4, num_pages=9, max_context_len=33, max_step_tokens=24),
        has_reserve=False,
    )
    requests = [
        request_of(name, [ord(name)] * 6, [ord(name)] * 10, max_tokens=20) for name in "\x03\x04"
    ]
    driver.submit(*requests)
    driver.step_until_preempted()
    driver.finish()
    check_alone(driver, *requests)
    assert driver._runner.encoders.num_encoded == 2


def test_a_request_that_ends_gives_its_pages_back_however_it_ends():
    driver = Driver(config_of(enable_prefix_cache=False))
    driver.submit(request_of("aborted", [3], [4] * 9), request_of("failed", [3], [5] * 9))
    driver.step()
    driver.scheduler.abort("aborted")
    driver.scheduler.check_integrity()
    assert num_used(driver) == 3
    driver.fail_row(0)
    driver.finish()
    assert driver.last("failed").finish_reason is FinishReason.ERROR
    assert num_used(driver) == 0


def test_what_no_state_has_vouched_for_is_cleared_and_kept_for_nobody():
    driver = Driver(config_of())
    driver.fail_row(0)
    failed = request_of("failed", [3], [5] * 9)
    driver.submit(failed)
    driver.step()
    assert driver.last("failed").finish_reason is FinishReason.ERROR
    assert num_used(driver) == 0
    again = request_of("again", [3], [5] * 9)
    driver.submit(again)
    driver.finish()
    check_alone(driver, again)
    assert driver._runner.encoders.num_encoded == 2
    (cleared,) = [plan.encoder.cleared for plan in driver.plans if len(plan.encoder.cleared)]
    assert cleared.tolist() == list(range(4, 13))


def test_inputs_count_in_the_budget_of_a_step():
    driver = Driver(config_of(num_encoder_pages=65, max_step_tokens=30))
    requests = [request_of(str(index), [3] * 5, [index] * 12) for index in range(3)]
    driver.submit(*requests)
    driver.finish()
    check_alone(driver, *requests)
    read = [plan.encoder.lengths for plan in driver.plans]
    assert read[:2] == [[12, 12], [12]]
    # The second prompt is owed a token beside its encoder's, and goes on in the next step.
    assert [plan.num_tokens for plan in driver.plans[:2]] == [5 + 1, 1 + 4 + 5]


def test_an_input_longer_than_a_step_is_read_in_one_without_other_prompts():
    driver = Driver(config_of(num_encoder_pages=65, max_step_tokens=8))
    requests = [request_of(str(index), [3] * 5, [index] * 24) for index in range(3)]
    driver.submit(*requests)
    driver.finish()
    check_alone(driver, *requests)
    assert all(len(plan.encoder.lengths) <= 1 for plan in driver.plans)


WRONG = {
    "nothing": None,
    "no token": SourceTokens([]),
    "features": SourceFeatures.of(np.zeros((2, 3))),
    "an id that is none": SourceTokens([3, 32]),
    "a negative id": SourceTokens([3, -1]),
}


@pytest.mark.parametrize("source", WRONG.values(), ids=WRONG)
def test_an_input_that_the_encoder_does_not_take_is_refused(source):
    driver = Driver(config_of())
    plain = make_request("r", [3])
    with pytest.raises(RequestRejectedError) as caught:
        driver.scheduler.submit(
            GenerateRequest("r", plain.prompt_token_ids, plain.sampling, encoder_input=source)
        )
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.param == "encoder_input"
    assert not driver.scheduler.has_work


def test_an_input_that_can_never_fit_is_refused_by_its_length():
    with pytest.raises(RequestRejectedError) as caught:
        Driver(config_of()).scheduler.submit(request_of("r", [3], [4] * 25))
    assert caught.value.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
    with pytest.raises(ConfigError, match="do not hold the 24 tokens"):
        config_of(num_encoder_pages=6)


def test_a_model_without_an_encoder_takes_no_input():
    with pytest.raises(RequestRejectedError, match="has no encoder"):
        Driver(make_config()).scheduler.submit(request_of("r", [3], [4]))


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((4, 5)), "shape"),
        (np.array([[0.0] * 6] * 3 + [[np.nan] * 6]), "finite"),
        (np.array([[0.0] * 6] * 3 + [[np.inf] * 6]), "finite"),
    ],
)
def test_features_are_checked(array, message):
    reader = FeatureEncoder(max_tokens=3, num_bins=4, num_frames=6)
    assert reader.num_tokens_of(SourceFeatures.of(np.zeros((4, 6)))) == 3
    with pytest.raises(RequestRejectedError, match=message):
        reader.num_tokens_of(SourceFeatures.of(array))
    with pytest.raises(RequestRejectedError, match="95 bytes"):
        reader.num_tokens_of(SourceFeatures(4, 6, b"\0" * 95))
    with pytest.raises(RequestRejectedError, match="reads features"):
        reader.num_tokens_of(SourceTokens([1]))


def test_a_lost_page_is_noticed():
    driver = Driver(config_of())
    driver.submit(request_of("r", [3], [4] * 9))
    driver.step()
    held = driver.scheduler._encoders[0]._held[0]
    held.pages = held.pages[:2]
    with pytest.raises(IntegrityError, match="encoder pages"):
        driver.scheduler.check_integrity()


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize(
    ("is_overlapped", "enable_prefix_cache"), [(False, False), (True, True), (True, False)]
)
@pytest.mark.parametrize("enable_mixed_batches", [False, True])
def test_every_request_of_a_storm_gets_what_it_gets_alone(
    page_size, is_overlapped, enable_prefix_cache, enable_mixed_batches
):
    rng = random.Random(page_size)
    config = config_of(
        num_encoder_pages=1 + 80 // page_size,
        page_size=page_size,
        num_pages=1 + 64 // page_size,
        max_step_tokens=rng.choice([12, 24]),
        enable_prefix_cache=enable_prefix_cache,
        enable_mixed_batches=enable_mixed_batches,
    )
    driver = Driver(config, is_overlapped, has_reserve=False)
    requests = [_random_request(rng, str(index)) for index in range(50)]
    for request in requests:
        driver.submit(request)
        if rng.random() < 0.5:
            driver.step()
        if rng.random() < 0.1:
            driver.scheduler.abort(rng.choice(requests[: len(driver.outputs)]).request_id)
        if rng.random() < 0.05:
            driver.fail_row(rng.randrange(3))
    driver.finish()
    for request in requests:
        tokens, expected = driver.tokens(request.request_id), run_alone(config, request).token_ids
        assert tokens == expected[: len(tokens)]
        reason = driver.last(request.request_id).finish_reason
        cut_off = reason in (FinishReason.ABORT, FinishReason.ERROR)
        assert len(tokens) == len(expected) or cut_off
    assert num_used(driver) == 0
    assert driver.scheduler.stats().num_preemptions > 0 or page_size == 16


def _random_request(rng: random.Random, request_id: str) -> GenerateRequest:
    stem = rng.choice([[5, 6, 7, 8] * 4, [9] * 16, []])
    return request_of(
        request_id,
        stem[: rng.randrange(17)] + [rng.randrange(32) for _ in range(rng.randrange(1, 5))],
        [rng.randrange(3)] * rng.choice([1, 5, 11, 24]),
        priority=rng.choice([0, 0, 1]),
        salt=rng.choice(["", "", "tenant"]),
        seed=rng.randrange(4),
        max_tokens=rng.randrange(1, 33),
        ignore_eos=rng.random() < 0.8,
    )
