"""The engine of encoders: order, ceilings, aborts, refusals, records; and its batches."""

import numpy as np
import pytest
import torch

from tests.fakes.tiny_encoders import VOCAB_SIZE, save_tiny_encoder
from tests.unit.workers.encoder_only.test_models import engine_of, random_texts, vectors_of
from workers import Engine
from workers.config import EngineConfig
from workers.encoder_only.batches import batches_of
from workers.engine.engine import Engine as DecoderEngine
from workers.engine.loop import EngineLoop
from workers.engine.protocol import EngineStats, FinishReason, GenerateRequest
from workers.engine.single_rank import build_engine
from workers.errors import ErrorCode, IntegrityError, ModelLoadError, RequestRejectedError
from workers.pooling.params import Pooling, PoolingParams
from workers.sampling.params import SamplingParams

RAW = PoolingParams(Pooling.MEAN, is_normalised=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bert")
    save_tiny_encoder("bert", folder)
    return folder


@pytest.fixture
def engine(folder):
    return engine_of(folder, check_integrity_when_idle=True)


def asked(name, num_tokens=3, **fields):
    return GenerateRequest(name, [7] * num_tokens, SamplingParams(), **{"pooling": RAW, **fields})


def ended(outputs):
    return [(one.request_id, one.finish_reason) for one in outputs]


def test_a_step_takes_whole_texts_in_order_within_its_budget(folder):
    engine = engine_of(folder, max_step_tokens=10, max_running_requests=3)
    for name, num_tokens, priority in (
        ("long", 30, 0),
        ("a", 4, 0),
        ("b", 4, 0),
        ("c", 4, 0),
        ("d", 1, 0),
        ("first", 1, -1),
    ):
        engine.submit(asked(name, num_tokens, priority=priority))
    steps = []
    while engine.has_work:
        steps.append([name for name, _ in ended(engine.step())])
    # A text that no step has room for has one of its own.
    assert steps == [["first"], ["long"], ["a", "b"], ["c", "d"]]


def test_stats_and_records_tell_what_was_done(folder):
    records, now_s = [], iter(range(100))
    engine = build_engine(
        EngineConfig(model=str(folder), num_cpu_threads=1), records.append, lambda *_: None
    )
    engine._clock = lambda: float(next(now_s))
    engine.submit(asked("a", 5))
    engine.submit(asked("b", 2))
    assert engine.stats() == EngineStats(num_waiting=2, queued_tokens=7)
    outputs = engine.step()
    assert [(one.queue_s, one.prefill_s) for one in outputs] == [(2.0, 1.0), (1.0, 1.0)]
    assert engine.stats() == EngineStats(num_steps=1, num_prompt_tokens=7, num_finished=2)
    (record,) = records
    assert (record.phase, record.step_s, record.batch_size) == ("extend", 1.0, 2)
    assert (record.num_prefill_tokens, record.attention) == (7, ())


def test_an_aborted_text_runs_no_more_and_says_so_once(engine):
    for name in "abc":
        engine.submit(asked(name))
    engine.abort("b")
    engine.abort("unknown")
    with pytest.raises(RequestRejectedError, match="is in use"):
        engine.submit(asked("b"))
    outputs = ended(engine.step())
    assert outputs[0] == ("b", FinishReason.ABORT)
    assert outputs[1:] == [("a", FinishReason.STOP), ("c", FinishReason.STOP)]
    assert not engine.has_work
    engine.submit(asked("b"))
    assert ended(engine.step()) == [("b", FinishReason.STOP)]
    assert engine.stats().num_finished == 4


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"pooling": None}, ErrorCode.INVALID_REQUEST, "model"),
        ({"pooling": PoolingParams(Pooling.CLS)}, ErrorCode.INVALID_REQUEST, "pooling"),
        (
            {"pooling": PoolingParams(Pooling.MEAN, dimensions=65)},
            ErrorCode.INVALID_REQUEST,
            "dimensions",
        ),
        ({"grammar": "{}"}, ErrorCode.INVALID_REQUEST, "grammar"),
        ({"resumed_token_ids": [3]}, ErrorCode.INVALID_REQUEST, "resumed_token_ids"),
        ({"prompt_token_ids": []}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"prompt_token_ids": [VOCAB_SIZE]}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"prompt_token_ids": [-1]}, ErrorCode.INVALID_REQUEST, "prompt"),
        ({"second_text_start": 3}, ErrorCode.INVALID_REQUEST, "second_text_start"),
        ({"second_text_start": -1}, ErrorCode.INVALID_REQUEST, "second_text_start"),
        ({"prompt_token_ids": [7] * 67}, ErrorCode.CONTEXT_LENGTH_EXCEEDED, "prompt"),
    ],
)
def test_what_cannot_run_is_refused_and_leaves_nothing(engine, fields, code, param):
    request = GenerateRequest(
        **{
            "request_id": "a",
            "prompt_token_ids": [7] * 3,
            "sampling": SamplingParams(),
            "pooling": RAW,
            **fields,
        }
    )
    with pytest.raises(RequestRejectedError) as refused:
        engine.submit(request)
    assert (refused.value.code, refused.value.param) == (code, param)
    assert not engine.has_work
    engine.check_integrity()


def test_a_full_queue_refuses(folder):
    engine = engine_of(folder, max_waiting_requests=2, max_waiting_tokens=20)
    engine.submit(asked("long", 60))
    with pytest.raises(RequestRejectedError) as refused:
        engine.submit(asked("too much", 1))
    assert refused.value.code is ErrorCode.QUEUE_FULL
    engine.abort("long")
    for name in "ab":
        engine.submit(asked(name, 1))
    with pytest.raises(RequestRejectedError) as refused:
        engine.submit(asked("too many", 1))
    assert refused.value.code is ErrorCode.QUEUE_FULL


def test_what_is_no_number_ends_its_text_alone(engine, monkeypatch):
    run = engine._runner.run

    def broken(texts):
        vectors = run(texts)
        vectors[1] = np.full_like(vectors[1], np.nan)
        return vectors

    monkeypatch.setattr(engine._runner, "run", broken)
    for name in "abc":
        engine.submit(asked(name))
    outputs = {one.request_id: one for one in engine.step()}
    assert [outputs[name].finish_reason for name in "abc"] == ["stop", "error", "stop"]
    assert outputs["b"].error.code is ErrorCode.INTERNAL


def test_without_memory_a_batch_runs_in_halves_and_what_does_not_fit_alone_ends(
    engine, monkeypatch
):
    texts = random_texts((4, 4, 4, 4, 30))
    expected = vectors_of(engine, texts)
    run = engine._runner._run_batch

    def small(batch):
        if sum(len(text.token_ids) for text in batch) > 8:
            raise torch.OutOfMemoryError("there is none")
        return run(batch)

    monkeypatch.setattr(engine._runner, "_run_batch", small)
    np.testing.assert_allclose(vectors_of(engine, texts[:4]), expected[:4], atol=1e-5)
    engine.submit(asked("long", 30))
    (output,) = engine.step()
    assert output.error.code is ErrorCode.OUT_OF_MEMORY


def test_accounts_that_do_not_fit_are_found(engine):
    engine.submit(asked("a"))
    engine._queue._num_tokens += 1
    with pytest.raises(IntegrityError):
        engine.check_integrity()


def test_a_loop_drives_it_and_a_generation_is_refused_by_an_output(engine):
    import queue

    outputs: queue.Queue = queue.Queue()
    loop = EngineLoop(engine, lambda some: [outputs.put(one) for one in some], outputs.put)
    engine.warm_up()
    loop.start()
    loop.submit([asked("a"), asked("b", pooling=None)])
    found = {}
    while len(found) < 2:
        one = outputs.get(timeout=60)
        found[one.request_id] = one
    assert found["a"].finish_reason is FinishReason.STOP
    assert found["b"].error.message == "this model is an encoder and generates no text"
    loop.stop()


def test_an_engine_of_decoders_says_what_it_is_not(folder):
    assert Engine is DecoderEngine
    with pytest.raises(ModelLoadError, match="BertModel is an encoder alone"):
        Engine.from_config(EngineConfig(model=str(folder)))


def test_batches_have_each_text_once_and_little_padding():
    random = np.random.default_rng(3)
    for size in (1, 2, 17, 256):
        lens = random.integers(1, 512, size=size).tolist()
        batches = batches_of(lens)
        assert sorted(index for batch in batches for index in batch) == list(range(size))
        for batch in batches:
            real = sum(lens[index] for index in batch)
            padded = max(lens[index] for index in batch) * len(batch)
            assert padded - real <= max(32, 0.02 * real)
    assert batches_of([]) == []
    assert batches_of([500, 3, 500, 4]) == [[1, 3], [0, 2]]
