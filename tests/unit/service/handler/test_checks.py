"""Ceilings: what just reaches one is taken, one more is refused by the name of its parameter."""

import msgspec
import pytest

from service.errors import ApiError, ApiErrorCode
from service.handler.checks import check_prompt, check_request, check_rights, fit_prompts
from service.handler.requests import GenerationRequest, TextOptions, TokenPrompt
from service.limits import Limits
from service.request_context import RequestContext
from service.security.callers import Caller
from service.security.priorities import PriorityRange
from service.security.quota import UnlimitedQuota
from service.tokenizer.jobs import EncodeChat, EncodeText
from tests.fakes.backend import MODEL_INFO
from workers.sampling.params import SamplingParams

LIMITS = Limits(
    max_n=3,
    max_prompts=2,
    max_prompt_bytes=10,
    max_prompt_tokens=6,
    max_messages=2,
    max_logprobs=4,
    max_logprob_entries=30,
    max_stop_strings=2,
    max_stop_string_bytes=5,
    max_stop_token_ids=2,
    max_logit_bias_entries=2,
    max_request_cost_tokens=100,
    max_request_id_bytes=7,
    max_cache_salt_bytes=8,
    max_session_id_bytes=9,
)
PROMPT = EncodeText("hello")


def request(prompts=(PROMPT,), sampling=None, **fields):
    return GenerationRequest(prompts, sampling or SamplingParams(max_tokens=1), **fields)


def chat(*contents, **options):
    messages = [{"role": "u", "content": content} for content in contents]
    return EncodeChat(messages, **options)


def refused(make, check=lambda made: check_request(made, LIMITS, MODEL_INFO)):
    with pytest.raises(ApiError) as caught:
        check(make)
    return caught.value.code, caught.value.param


@pytest.mark.parametrize(
    ("make", "most", "param"),
    [
        (lambda n: request(n=n), 3, "n"),
        (lambda n: request((PROMPT,) * n), 2, "prompt"),
        (lambda n: request((EncodeText("x" * n),)), 10, "prompt"),
        (lambda n: request((EncodeText("é" * (n // 2) + "x" * (n % 2)),)), 10, "prompt"),
        (lambda n: request((TokenPrompt([5] * n),)), 6, "prompt"),
        (lambda n: request((chat(*["u"] * n),)), 2, "messages"),
        # The role counts, too: one byte a message.
        (lambda n: request((chat("x" * (n - 2), ""),)), 10, "messages"),
        (lambda n: request(cache_salt="s" * n), 8, "cache_salt"),
        (lambda n: request(request_id="s" * n), 7, "request_id"),
        (lambda n: request(text=TextOptions(stop=("s",) * n)), 2, "stop"),
        (lambda n: request(text=TextOptions(stop=("a", "s" * n))), 5, "stop"),
        (lambda n: request(sampling=SamplingParams(max_tokens=1, logprobs=n)), 4, "logprobs"),
        (
            lambda n: request(sampling=SamplingParams(max_tokens=1, prompt_logprobs=n)),
            4,
            "prompt_logprobs",
        ),
        (
            lambda n: request(
                sampling=SamplingParams(max_tokens=1, logit_bias=dict.fromkeys(range(n), 1.0))
            ),
            2,
            "logit_bias",
        ),
        (
            lambda n: request(
                sampling=SamplingParams(max_tokens=1, stop_token_ids=tuple(range(n)))
            ),
            2,
            "stop_token_ids",
        ),
        # A prompt has one token at least: 2 prompts, 2 choices of each.
        (
            lambda n: request((PROMPT,) * 2, n=2, sampling=SamplingParams(max_tokens=n)),
            24,
            "max_tokens",
        ),
        # 2 choices of 5 tokens, each with the chosen one and 2 more.
        (
            lambda n: request(n=2, sampling=SamplingParams(max_tokens=n, logprobs=2)),
            5,
            "logprobs",
        ),
        (
            lambda n: request(n=2, sampling=SamplingParams(logprobs=2), default_max_tokens=n),
            5,
            "logprobs",
        ),
    ],
)
def test_a_ceiling_can_be_reached_and_not_passed(make, most, param):
    check_request(make(most), LIMITS, MODEL_INFO)
    assert refused(make(most + 1)) == (ApiErrorCode.LIMIT_EXCEEDED, param)


@pytest.mark.parametrize(
    ("made", "param"),
    [
        (request(n=0), "n"),
        (request(()), "prompt"),
        (request((EncodeChat([]),)), "messages"),
    ],
)
def test_nothing_is_too_little(made, param):
    assert refused(made) == (ApiErrorCode.LIMIT_EXCEEDED, param)


def test_one_token_of_the_prompts_end_may_be_kept_and_not_none():
    check_request(request(truncate_prompt_tokens=1), LIMITS, MODEL_INFO)
    refusal = ApiErrorCode.INVALID_REQUEST, "truncate_prompt_tokens"
    assert refused(request(truncate_prompt_tokens=0)) == refusal


def test_an_empty_stop_string_is_refused():
    made = request(text=TextOptions(stop=("a", "")))
    assert refused(made) == (ApiErrorCode.INVALID_REQUEST, "stop")


@pytest.mark.parametrize(
    "prompt",
    [
        chat("a", add_generation_prompt=True, continue_final_message=True),
        EncodeChat(
            [{"role": "u", "content": None}],
            add_generation_prompt=False,
            continue_final_message=True,
        ),
    ],
)
def test_only_a_last_message_with_text_can_be_continued_and_then_no_other_begins(prompt):
    check_prompt(chat("a", add_generation_prompt=False, continue_final_message=True), LIMITS)
    refusal = refused(prompt, lambda made: check_prompt(made, LIMITS))
    assert refusal == (ApiErrorCode.INVALID_REQUEST, "continue_final_message")


def test_what_sampling_itself_refuses_is_refused_here():
    code, param = refused(request(sampling=SamplingParams(max_tokens=1, temperature=-1.0)))
    assert (code, param) == (ApiErrorCode.INVALID_REQUEST, "temperature")
    beyond = SamplingParams(max_tokens=1, stop_token_ids=(MODEL_INFO.vocab_size,))
    assert refused(request(sampling=beyond))[0] is ApiErrorCode.INVALID_REQUEST


def test_a_caller_has_the_priorities_and_sessions_that_it_may_have():
    caller = Caller("c", UnlimitedQuota(), priorities=PriorityRange(min_priority=-2))
    context = RequestContext(caller=caller, session="s" * 9)

    def check(made):
        check_rights(made, context, LIMITS)

    check(request(priority=-2))
    check(request(priority=0))
    for priority in (-3, 1):
        refusal = refused(request(priority=priority), check)
        assert refusal == (ApiErrorCode.LIMIT_EXCEEDED, "priority")
    context = RequestContext(caller=caller, session="s" * 10)
    assert refused(request(), check) == (ApiErrorCode.LIMIT_EXCEEDED, "session_id")


def fitted(*prompts, limits=LIMITS, info=MODEL_INFO, **fields):
    made = request((PROMPT,) * len(prompts), **fields)
    return [
        (list(one.token_ids), one.max_tokens) for one in fit_prompts(made, prompts, limits, info)
    ]


def unfitting(*prompts, **fields):
    return refused(None, lambda _: fitted(*prompts, **fields))


def test_a_prompt_is_cut_from_its_beginning_and_gets_what_was_asked_for():
    sampling = SamplingParams(max_tokens=7, min_tokens=7)
    assert fitted([1, 2, 3], [4], sampling=sampling) == [([1, 2, 3], 7), ([4], 7)]
    assert fitted([1, 2, 3], sampling=sampling, truncate_prompt_tokens=2) == [([2, 3], 7)]


def test_without_an_answers_length_it_gets_the_default_or_the_room_there_is():
    free = SamplingParams()
    room = MODEL_INFO.max_request_len - 2
    wide = Limits()
    assert fitted([1, 2], sampling=free, limits=wide) == [([1, 2], room)]
    asked = {"sampling": free, "limits": wide, "default_max_tokens": room - 1}
    assert fitted([1, 2], **asked) == [([1, 2], room - 1)]
    asked["default_max_tokens"] = room + 1
    assert fitted([1, 2], **asked) == [([1, 2], room)]


def test_a_tokenised_prompt_has_its_ceilings_too():
    assert fitted([1] * 6) == [([1] * 6, 1)]
    assert unfitting([1] * 7) == (ApiErrorCode.LIMIT_EXCEEDED, "prompt")
    assert unfitting([]) == (ApiErrorCode.INVALID_REQUEST, "prompt")
    shortest = SamplingParams(max_tokens=3, min_tokens=4)
    assert unfitting([1], sampling=shortest) == (ApiErrorCode.INVALID_REQUEST, "min_tokens")


def test_the_room_is_the_requests_and_the_refusal_names_what_to_shorten():
    info = msgspec.structs.replace(MODEL_INFO, max_request_len=4)
    assert fitted([1, 2, 3], info=info) == [([1, 2, 3], 1)]
    too_long = ApiErrorCode.CONTEXT_LENGTH_EXCEEDED
    assert unfitting([1, 2, 3, 4], info=info) == (too_long, "prompt")
    two = SamplingParams(max_tokens=2)
    assert fitted([1, 2], info=info, sampling=two) == [([1, 2], 2)]
    assert unfitting([1, 2, 3], info=info, sampling=two) == (too_long, "max_tokens")


def test_prompts_and_answers_together_have_a_ceiling_by_the_longest_answer():
    """2 prompts of 5 and 1 tokens, 2 choices of each."""
    prompts = [1] * 5, [2]
    for max_tokens, is_allowed in ((23, True), (24, False)):
        asked = {"n": 2, "sampling": SamplingParams(max_tokens=max_tokens)}
        if is_allowed:
            assert len(fitted(*prompts, **asked)) == 2
        else:
            assert unfitting(*prompts, **asked) == (ApiErrorCode.LIMIT_EXCEEDED, "max_tokens")


def test_log_probabilities_of_a_prompt_count_with_those_of_its_answers():
    """6 prompt tokens with the token and 1 more, and an answer of 9 with the token and 1 more."""
    both = SamplingParams(max_tokens=9, logprobs=1, prompt_logprobs=1)
    assert len(fitted([1] * 6, sampling=both)) == 1
    over = msgspec.structs.replace(both, max_tokens=10)
    assert unfitting([1] * 6, sampling=over) == (ApiErrorCode.LIMIT_EXCEEDED, "logprobs")
    for n, is_allowed in ((2, True), (3, False)):
        asked = {"n": n, "sampling": SamplingParams(max_tokens=1, prompt_logprobs=1)}
        if is_allowed:
            assert len(fitted([1] * 6, **asked)) == 1
        else:
            assert unfitting([1] * 6, **asked) == (ApiErrorCode.LIMIT_EXCEEDED, "logprobs")


def test_an_answer_whose_length_nobody_asked_for_is_not_held_against_log_probabilities():
    wide = LIMITS.model_copy(update={"max_request_cost_tokens": 10**6})
    made = fitted([1], sampling=SamplingParams(logprobs=4), limits=wide)
    assert made == [([1], MODEL_INFO.max_request_len - 1)]
