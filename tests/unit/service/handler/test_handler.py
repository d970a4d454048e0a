"""What the handler hands on: to tokenizer, quota, engines, the record, and whoever asked."""

import asyncio
import time
from array import array

import msgspec
import pytest

from service.errors import ApiError, ApiErrorCode
from service.handler import echo
from service.handler.beams import BeamOptions
from service.handler.checks import FittedPrompt
from service.handler.collect import collect
from service.handler.encoding import EnginePrompt, check_range, for_engine
from service.handler.events import TopLogprob
from service.handler.requests import GenerationRequest, TextOptions, TokenPrompt
from service.limits import Limits
from service.observability.request_log.record import RequestRecord
from service.request_context import RequestContext
from service.security.callers import Caller
from service.security.quota import FreeLease, UnlimitedQuota
from service.tokenizer.jobs import EncodeChat, EncodeText
from tests.fakes.backend import MODEL_INFO, make_outputs
from tests.fakes.text import ANSWER, make_bench
from workers.engine.protocol import FinishReason, StepOutput
from workers.sampling.params import MAX_SEED, SamplingParams

pytestmark = pytest.mark.asyncio
CALLER = Caller("alice", UnlimitedQuota(), cache_salt="hers")


class RecordingLease:
    """Of a quota; remembers what it was told."""

    def __init__(self):
        self.told = []

    def take_sequences(self, num_sequences):
        self.told.append(("sequences", num_sequences))

    def take_up_to(self, num_sequences):
        self.told.append(("up to", num_sequences))
        return num_sequences

    def charge_prompt(self, num_tokens):
        self.told.append(("prompt", num_tokens))

    def cancel(self):
        self.told.append(("cancel", None))

    def end(self, num_output_tokens):
        self.told.append(("end", num_output_tokens))


@pytest.fixture
def bench(tmp_path):
    return make_bench(tmp_path)


def context(**fields):
    return RequestContext(caller=CALLER, record=RequestRecord(), **fields)


def request(*prompts, sampling=None, **fields):
    prompts = prompts or (EncodeText("hello"),)
    return GenerationRequest(prompts, sampling or SamplingParams(max_tokens=4), **fields)


async def results_of(bench, made, used=None, lease=None):
    used = used or context()
    async with await bench.handler.start(made, used, lease or FreeLease()) as generation:
        return await collect(generation)


async def test_the_quota_learns_sequences_prompt_and_output_once(bench):
    lease = RecordingLease()
    prompts = TokenPrompt([5, 6, 7]), TokenPrompt([8])
    await results_of(bench, request(*prompts, n=2), lease=lease)
    assert lease.told == [("sequences", 4), ("prompt", 4), ("end", 4 * 4)]


async def test_what_is_refused_gives_its_lease_back(bench):
    lease = RecordingLease()
    with pytest.raises(ApiError):
        await bench.handler.start(request(n=0), context(), lease)
    assert lease.told == [("cancel", None)]


async def test_engines_get_the_callers_salt_the_priority_and_the_session(bench):
    used = context()
    await results_of(bench, request(cache_salt="mine", session_id="talk"), used)
    (sent,) = bench.backend.requests
    assert sent.cache_salt == "hers:mine"
    assert sent.priority == 0
    assert bench.backend.contexts[0].session == "talk"
    assert bench.backend.contexts[0].record is used.record
    assert bench.backend.contexts[0].caller is CALLER


async def test_the_record_tells_the_model_its_tokens_and_every_choices_times(tmp_path):
    bench = make_bench(tmp_path, lambda sent: make_outputs(sent, [40, 41, 2], num_cached_tokens=2))
    used = context()
    await results_of(bench, request(TokenPrompt([5, 6, 7]), n=2), used)
    record = used.record
    assert [one.record for one in bench.backend.contexts] == [record] * 2
    assert (record.model, record.is_accepted) == (MODEL_INFO.name, True)
    assert (record.num_prompt_tokens, record.num_cached_tokens) == (3, 2)
    assert record.num_output_tokens == 2 * 3
    assert len(record.choices) == 2
    for choice in record.choices:
        assert (choice.reason, choice.num_output_tokens) == ("stop", 3)
        assert (choice.queue_s, choice.prefill_s) == (0.001, 0.002)
        assert choice.submitted_s <= choice.first_output_s <= choice.ended_s


async def test_what_is_accepted_is_counted_with_its_prompt_and_choices(bench):
    await results_of(bench, request(TokenPrompt([5, 6, 7]), n=3))
    assert bench.metrics.named("accepted") == [(3, 3)]
    ends = bench.metrics.named("finished")
    assert [(reason, numbers["num_prompt_tokens"]) for reason, numbers in ends] == [
        ("length", 3)
    ] * 3
    assert [numbers["num_output_tokens"] for _, numbers in ends] == [4] * 3


async def test_leaving_tells_how_much_there_was_and_that_the_client_left(bench):
    lease, used = RecordingLease(), context()
    bench.backend.gate = asyncio.Semaphore(2)
    generation = await bench.handler.start(request(), used, lease)
    async with generation:
        deltas = aiter(generation)
        await anext(deltas)
        await anext(deltas)
        await deltas.aclose()
    assert bench.backend.streams[0].is_aborted
    ((reason, numbers),) = bench.metrics.named("finished")
    assert (reason, numbers["num_output_tokens"]) == ("abort", 2)
    assert lease.told[-1] == ("end", 2)
    assert used.record.choices[0].reason == "abort"
    await generation.aclose()
    assert len(bench.metrics.named("finished")) == 1


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (ZeroDivisionError(), "internal"),
        (ApiError(ApiErrorCode.TIMEOUT, "late"), "abort"),
        (asyncio.CancelledError(), "abort"),
    ],
)
async def test_a_bug_behind_it_is_no_leaving_of_the_client(bench, failure, reason):
    generation = await bench.handler.start(request(), context(), FreeLease())
    with pytest.raises(type(failure)):
        async with generation:
            raise failure
    assert [ended for ended, _ in bench.metrics.named("finished")] == [reason]


async def test_a_request_is_named_as_its_client_says_or_anew(bench):
    names = []
    for name in ("mine", "", ""):
        generation = await bench.handler.start(request(request_id=name), context(), FreeLease())
        async with generation:
            names.append(generation.info.request_id)
            assert generation.info.model == MODEL_INFO.name
            assert abs(generation.info.created_s - time.time()) < 10
    assert names[0] == "mine"
    assert len(set(names)) == 3
    assert all(names)


async def test_seeds_of_choices_follow_each_other_around_the_top(bench):
    seeds = []
    for seed in (None, 7, MAX_SEED - 1):
        sampling = SamplingParams(max_tokens=1, seed=seed)
        bench.backend.requests.clear()
        bench.backend.streams.clear()
        await results_of(bench, request(n=3, sampling=sampling))
        seeds.append([sent.sampling.seed for sent in bench.backend.requests])
    assert seeds == [[None] * 3, [7, 8, 9], [MAX_SEED - 1, MAX_SEED, 0]]


async def test_the_tokenizer_has_turns_by_caller_and_by_request(bench, monkeypatch):
    flows = []

    def noted(method):
        async def call(*arguments, **options):
            flows.append(arguments[1])
            return await method(*arguments, **options)

        return call

    for name in ("encode_text", "encode_chat", "decode"):
        monkeypatch.setattr(bench.tokenizer, name, noted(getattr(bench.tokenizer, name)))
    first, second = context(), context()
    await results_of(bench, request(text=TextOptions(echo=True)), first)
    await bench.handler.detokenise([40, 41], first)
    await bench.handler.tokenise(EncodeText("a"), second)
    assert {flow[0] for flow in flows} == {"alice"}
    assert flows[0] == flows[1] == flows[2] != flows[3]


async def test_text_becomes_tokens_and_tokens_text_within_the_ceilings(tmp_path):
    bench = make_bench(tmp_path, limits=Limits(max_prompt_tokens=4, max_prompt_bytes=16))
    ids = bench.tokenizer.ids("hello")
    assert await bench.handler.tokenise(EncodeText("hello"), context()) == ids
    assert await bench.handler.tokenise(TokenPrompt([5, 6]), context()) == [5, 6]
    assert await bench.handler.detokenise([*ids[:3], 2], context()) != ""
    with_end = await bench.handler.detokenise([40, 2], context())
    without = await bench.handler.detokenise([40, 2], context(), skip_special_tokens=True)
    assert with_end.startswith(without)
    assert len(with_end) > len(without)
    for call, code, param in (
        (bench.handler.tokenise(EncodeText("x" * 17), context()), "LIMIT_EXCEEDED", "prompt"),
        (bench.handler.tokenise(TokenPrompt([420]), context()), "INVALID_REQUEST", "prompt"),
        (bench.handler.detokenise([1] * 5, context()), "LIMIT_EXCEEDED", "tokens"),
        (bench.handler.detokenise([420], context()), "INVALID_REQUEST", "tokens"),
    ):
        with pytest.raises(ApiError) as caught:
            await call
        assert (caught.value.code, caught.value.param) == (ApiErrorCode[code], param)


async def test_a_token_stands_for_its_bytes(bench):
    ids = bench.tokenizer.ids(ANSWER)
    assert b"".join(bench.handler.token_bytes(ids)).decode() == ANSWER
    assert len(bench.handler.token_bytes(ids)) == len(ids)


async def test_a_chat_is_rendered_before_it_is_tokenised(bench, monkeypatch):
    jobs = []

    async def encode_chat(job, flow):
        jobs.append(job)
        return [5, 6]

    monkeypatch.setattr(bench.tokenizer, "encode_chat", encode_chat)
    chat = EncodeChat([{"role": "user", "content": "hi"}])
    await results_of(bench, request(chat))
    assert bench.backend.requests[0].prompt_token_ids == [5, 6]
    assert jobs == [msgspec.structs.replace(chat, max_tokens=MODEL_INFO.max_request_len - 1)]


@pytest.mark.parametrize("place", [0, 1, (1 << 16) - 1, 1 << 16, (1 << 17) + 3])
@pytest.mark.parametrize("wrong", [-1, 420])
async def test_a_token_that_the_model_has_not_is_found_wherever_it_is(place, wrong):
    token_ids = [419] * ((1 << 17) + 4)
    await check_range(token_ids, MODEL_INFO, "p")
    token_ids[place] = wrong
    with pytest.raises(ApiError) as caught:
        await check_range(token_ids, MODEL_INFO, "p")
    assert (caught.value.code, caught.value.param) == (ApiErrorCode.INVALID_REQUEST, "p")


@pytest.mark.parametrize("num_ids", [0, 1, 1 << 16, (1 << 17) + 1])
async def test_engines_get_lists_whatever_the_ids_were_in(num_ids):
    ids = array("i", (i % 400 for i in range(num_ids)))
    (made,) = await for_engine([FittedPrompt(ids, 3)])
    assert made == EnginePrompt(list(ids), 3)


# Whatever waits for somebody waits every time; a machine that stands still does not.
NUM_TRIES = 3


async def turns_of(work):
    """How often another task runs while this one does, and the seconds that it takes."""
    turns = 0

    async def count():
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    counting = asyncio.create_task(count())
    started_s = time.monotonic()
    await work
    taken_s = time.monotonic() - started_s
    counting.cancel()
    return turns, taken_s


async def test_many_ids_leave_others_their_turns_and_wait_for_nothing():
    ids = array("i", [5]) * (1 << 18)
    fitted = [FittedPrompt(ids, 1)]
    for work in (lambda: check_range(ids, MODEL_INFO, "p"), lambda: for_engine(fitted)):
        tried = [await turns_of(work()) for _ in range(NUM_TRIES)]
        assert min(turns for turns, _ in tried) >= 2
        assert min(taken_s for _, taken_s in tried) < 0.9


async def test_few_ids_do_not_wait_for_others():
    async def check_often():
        for _ in range(5):
            await check_range([5] * 4096, MODEL_INFO, "p")

    turns, _ = await turns_of(check_often())
    assert turns == 0


async def test_a_long_echo_comes_in_parts_that_make_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(echo, "MAX_CHARS", 4)
    monkeypatch.setattr(echo, "MAX_VALUES", 9)
    bench = make_bench(tmp_path)
    ids = bench.tokenizer.ids("hello world, naïve")
    sampling = SamplingParams(max_tokens=2, logprobs=1, prompt_logprobs=2)
    made = request(TokenPrompt(ids), sampling=sampling, text=TextOptions(echo=True))
    taken_s = []
    for _ in range(NUM_TRIES):
        started_s = time.monotonic()
        async with await bench.handler.start(made, context(), FreeLease()) as generation:
            deltas = [delta async for delta in generation]
        taken_s.append(time.monotonic() - started_s)
    assert min(taken_s) < 0.9, "turns of others, not seconds of nobody's"
    assert "".join(delta.text for delta in deltas).startswith("hello world, naïve")
    assert max(len(delta.text) for delta in deltas[:4]) == 4
    parts = [delta.prompt_logprobs for delta in deltas if delta.prompt_logprobs]
    assert {len(part) for part in parts[:-1]} == {3}, "a position has its token and two more"
    prompt = [entry for part in parts for entry in part]
    assert [entry.token_id for entry in prompt] == ids
    assert (prompt[0].logprob, prompt[0].rank, prompt[0].top) == (None, None, ())
    for entry in prompt[1:]:
        assert (entry.logprob, entry.rank) == (-0.5, 1)
        assert [top.logprob for top in entry.top] == [-0.5, -1.5]
    text = "hello world, naïve"
    starts = [entry.text_offset for entry in prompt]
    assert starts == sorted(starts)
    for entry in prompt:
        assert (
            text.encode()[len(text[: entry.text_offset].encode()) :].startswith(entry.token[:1])
            or entry.token[:1] >= b"\x80"
        )
    own = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert own[: len(ids)] == prompt
    assert len(own) == len(ids) + 2
    assert own[len(ids)].text_offset == len(text)
    assert own[-1].top == (TopLogprob(own[-1].token_id, own[-1].token, -0.5),)


async def test_the_choices_of_two_prompts_echo_their_own(bench):
    made = request(EncodeText("hello"), EncodeText("naïve"), n=2, text=TextOptions(echo=True))
    results = await results_of(bench, made)
    shown = ["hello", "hello", "naïve", "naïve"]
    assert [result.index for result in results] == [0, 1, 2, 3]
    for result, begin in zip(results, shown, strict=True):
        assert result.text.startswith(begin)
        assert result.logprobs is None
        assert result.finish_reason == "length"


async def test_collected_choices_are_their_deltas_joined(tmp_path):
    bench = make_bench(tmp_path)
    stop_id = bench.tokenizer.ids("!")[0]
    answer = [*bench.tokenizer.ids("hi"), stop_id]
    bench.backend.script = lambda sent: make_outputs(sent, answer)
    sampling = SamplingParams(
        max_tokens=9, logprobs=0, prompt_logprobs=0, stop_token_ids=(stop_id,)
    )
    first, second = await results_of(bench, request(TokenPrompt([5, 6]), n=2, sampling=sampling))
    for result in (first, second):
        assert (result.text, result.token_ids) == ("hi", answer)
        assert [entry.token_id for entry in result.logprobs] == answer
        assert [entry.token_id for entry in result.prompt_logprobs] == [5, 6]
        assert (result.finish_reason, result.stop_reason) == ("stop", stop_id)


async def test_an_output_of_many_tokens_leaves_others_a_turn(tmp_path):
    def script(sent):
        return [StepOutput(sent.request_id, [40] * 300, FinishReason.LENGTH)]

    bench = make_bench(tmp_path, script)
    made = request(sampling=SamplingParams(max_tokens=300))
    taken_s = []
    for _ in range(NUM_TRIES):
        started_s = time.monotonic()
        (result,) = await results_of(bench, made)
        taken_s.append(time.monotonic() - started_s)
        assert len(result.token_ids) == 300
    assert min(taken_s) < 0.9


@pytest.mark.parametrize("beams", [None, BeamOptions()])
async def test_what_fails_while_a_request_is_put_together_leaves_nothing_at_a_replica(
    bench, monkeypatch, beams
):
    def broken(*_):
        raise RuntimeError("a bug")

    monkeypatch.setattr(bench.handler, "_assemblers", lambda *_: broken)
    before = asyncio.all_tasks()
    with pytest.raises(RuntimeError, match="a bug"):
        await bench.handler.start(request(n=2, beams=beams), context(), FreeLease())
    await asyncio.sleep(0.01)
    assert asyncio.all_tasks() == before
    assert bench.backend.num_live == 0
    assert bench.backend.requests == []
