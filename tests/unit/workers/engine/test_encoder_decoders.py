"""BART, its kin and Whisper give transformers' own text, however it is batched, cut and cached."""

import pytest
import torch
from msgspec.structs import replace

from tests.fakes import tiny_seq2seq
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.engine.encoder_input import SourceTokens
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason
from workers.errors import ConfigError, RequestRejectedError
from workers.models.features import SEQ2SEQ, ModelFeature
from workers.models.transformers_seq2seq import _SourceReader
from workers.parallel.group import SingleRank
from workers.runner import step_pieces
from workers.runner.model_runner import ModelRunner
from workers.runner.sizing import resolve_device
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import StepPlan

NUM_TOKENS = 64
# What differs between ways to run shows within these.
NUM_FIRST_TOKENS = 22
PENALTY = 4.0
GREEDY = SamplingParams(
    temperature=0.0,
    max_tokens=NUM_FIRST_TOKENS,
    ignore_eos=True,
    logprobs=0,
    repetition_penalty=PENALTY,
)
FAMILIES = ("bart", "whisper")
# What the first two show is shown for their kin every night.
KIN = ("mbart", "marian", "pegasus", "plbart", "blenderbot", "blenderbot-small")
START = 2
LONG = (START, *range(10, 50))
PROMPTS = ((START,), LONG, (START, 7, 9), LONG[:17])


@pytest.fixture(
    scope="module",
    params=[*FAMILIES, *(pytest.param(name, marks=pytest.mark.nightly) for name in KIN)],
)
def family(request):
    return request.param


@pytest.fixture(scope="module")
def folder(family, tmp_path_factory):
    return str(tiny_seq2seq.save(family, tmp_path_factory.mktemp(family)))


@pytest.fixture(scope="module")
def reference(family):
    return tiny_seq2seq.Reference(family, NUM_TOKENS, PENALTY)


@pytest.fixture(scope="module")
def sources(family):
    """Of unlike lengths where there are such."""
    lengths = (5, 60, 1, 33)
    return [tiny_seq2seq.random_source(family, n, seed=n) for n in lengths]


def build(folder, **changes) -> tuple[Engine, ModelRunner]:
    settings = {"page_size": 16, "num_pages": 60, "max_running_requests": 4, **changes}
    config = EngineConfig(model=folder, max_context_len=128, **settings)
    runner = ModelRunner(config, SingleRank(), resolve_device(config), lambda done, total: None)
    return Engine.of_runner(config, runner), runner


def check(engine, reference, prompts, sources, num_tokens=NUM_FIRST_TOKENS) -> None:
    """Every request has transformers' tokens, and their log probabilities."""
    results = engine.generate(prompts, replace(GREEDY, max_tokens=num_tokens), sources)
    for prompt, source, result in zip(prompts, sources, results, strict=True):
        truth = reference.truth(source, tuple(prompt))
        assert result.error is None
        assert result.token_ids == truth.token_ids[:num_tokens]
        found = torch.tensor([entry.logprob for entry in result.logprobs])
        wanted = truth.token_logprobs[:num_tokens]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0.0)
    engine.check_integrity()


@pytest.mark.parametrize(
    "changes",
    [
        {"page_size": 64, "num_pages": 16, "max_step_tokens": 7},
        {"page_size": 1, "num_pages": 960, "enable_prefix_cache": False},
        *(
            pytest.param(changes, marks=pytest.mark.nightly)
            for changes in (
                {},
                {"enable_mixed_batches": False},
                {"enable_overlap": False},
            )
        ),
    ],
    ids=str,
)
@serves(SEQ2SEQ.subject, ModelFeature.CPU)
def test_texts_are_those_of_transformers(folder, reference, sources, changes) -> None:
    """Alone, then together, when one prefix and one input are known."""
    engine, _ = build(folder, **changes)
    check(engine, reference, PROMPTS[1:2], sources[1:2])
    check(engine, reference, PROMPTS, sources)
    engine.close()


def test_texts_of_a_test_are_texts(reference, sources) -> None:
    """A model that repeats itself would prove little."""
    truths = [reference.truth(source, PROMPTS[0]) for source in sources]
    assert all(len(set(truth.token_ids)) > 10 for truth in truths)
    assert len({tuple(truth.token_ids) for truth in truths}) == len(sources)


def test_an_input_is_read_once(folder, reference, sources, monkeypatch) -> None:
    engine, _ = build(folder)
    read = []
    encode = _SourceReader.encode
    monkeypatch.setattr(
        _SourceReader, "encode", lambda self, source: read.append(source) or encode(self, source)
    )
    engine.warm_up()
    check(engine, reference, PROMPTS, sources)
    assert read[1:] == sources
    prefixes = engine.generate([LONG, LONG], GREEDY, [sources[1], sources[0]])
    assert [one.num_cached_tokens for one in prefixes] == [32, 0]
    assert len(read) == 1 + len(sources)
    engine.close()


def test_retracted_requests_go_on_as_they_would_have(folder, reference, sources) -> None:
    """Little memory for tokens, and for the inputs of two requests at a time."""
    engine, _ = build(folder, page_size=4, num_pages=48, max_step_tokens=64)
    engine._scheduler._forecast.new_tokens = lambda tokens: tokens * 0
    check(engine, reference, PROMPTS * 2, sources * 2, NUM_TOKENS)
    assert engine.stats().num_preemptions > 0
    engine.close()


@pytest.mark.parametrize(
    "enable_prefix_cache", [True, pytest.param(False, marks=pytest.mark.nightly)]
)
def test_no_output_depends_on_a_page_that_was_given_back(
    folder, reference, sources, enable_prefix_cache, monkeypatch
) -> None:
    """What is free of the encoder's account when a step is planned is NaN when it runs."""
    engine, runner = build(
        folder, enable_prefix_cache=enable_prefix_cache, page_size=4, num_pages=48
    )
    (memory,), pool = engine._scheduler._encoders, runner._backend.token_to_kv_pool
    account = len(runner.pages_by_account) - 1
    free_at_step: dict[int, list[int]] = {}
    schedule, launch = engine._scheduler.schedule, runner._launch
    num_poisoned = []

    def schedule_and_note():
        plan = schedule()
        if plan is not None:
            free_at_step[plan.step_id] = memory._allocator.free_pages().tolist()
        return plan

    def poison_and_launch(plan: StepPlan):
        pages = free_at_step.pop(plan.step_id)
        num_poisoned.append(len(pages))
        for own_pool, own_account in zip(pool._pools, pool._accounts, strict=True):
            if own_account == account:
                for layer_id in range(own_pool.num_layers):
                    for buffer in own_pool.get_kv_buffer(layer_id):
                        buffer[pages] = torch.nan
        return launch(plan)

    monkeypatch.setattr(engine._scheduler, "schedule", schedule_and_note)
    monkeypatch.setattr(runner, "_launch", poison_and_launch)
    check(engine, reference, PROMPTS * 2, sources * 2)
    assert sum(num_poisoned) > 500
    engine.close()


def test_a_step_in_pieces_reads_each_input_before_its_row(
    folder, reference, sources, monkeypatch
) -> None:
    """The device has memory for a few tokens at a time."""
    monkeypatch.setattr(step_pieces, "MIN_PIECE_TOKENS", 2)
    launch, num_pieces = ModelRunner._launch, []

    def limited(self: ModelRunner, plan: StepPlan):
        if plan.num_tokens > 2:
            raise torch.OutOfMemoryError("injected")
        num_pieces.append(len(plan.encoder.grants))
        return launch(self, plan)

    monkeypatch.setattr(ModelRunner, "_launch", limited)
    engine, _ = build(folder)
    check(engine, reference, PROMPTS[::2], sources[::2])
    assert num_pieces[:2] == [1, 1]
    engine.close()


def test_a_request_is_refused_alone(folder, reference, sources) -> None:
    engine, _ = build(folder)
    for wrong in ([SourceTokens([1] * 500)], ()):
        with pytest.raises(RequestRejectedError) as caught:
            engine.generate([[START]], GREEDY, wrong)
        assert caught.value.param == "encoder_input"
    check(engine, reference, PROMPTS, sources)
    engine.close()


def test_an_end_of_sequence_ends_a_text(folder, reference, sources) -> None:
    engine, _ = build(folder)
    truth = reference.truth(sources[0], PROMPTS[0]).token_ids
    stop = truth[5]
    sampling = replace(GREEDY, ignore_eos=False, stop_token_ids=(stop,))
    (result,) = engine.generate(PROMPTS[:1], sampling, sources[:1])
    ends = min(truth.index(token) for token in (stop, 2) if token in truth)
    assert result.token_ids == truth[: ends + 1]
    assert result.finish_reason is FinishReason.STOP
    engine.close()


def test_memory_that_holds_no_input_is_refused_at_the_start(folder) -> None:
    with pytest.raises(ConfigError, match="the encoder makes of one request"):
        build(folder, num_pages=None, kv_cache_bytes=1 << 15)
