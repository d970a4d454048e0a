"""Prompts with images through an engine, against transformers: however steps cut and mix them."""

import msgspec
import numpy as np
import pytest
import torch

from tests.fakes.tiny_vision import (
    PATCH_VALUES,
    Prompt,
    image,
    prompt_of,
    reference_greedy,
    reference_logits,
    save_vision_model,
    vision_reference,
)
from workers import Engine
from workers.config import EngineConfig
from workers.engine.content import ContentSpan
from workers.engine.media import ImagePatches
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.errors import ErrorCode, RequestRejectedError
from workers.models.transformers_vision import PatchGridVision
from workers.sampling.params import SamplingParams

NUM_TOKENS = 28
WIDE, TALL, DOT = image(1, 4, 10), image(2, 12, 6), image(3, 2, 2)
OTHER_WIDE = image(4, 4, 10)
TWO_IMAGES = prompt_of(3, TALL, 4, WIDE, 2)
PROMPTS = [
    TWO_IMAGES,
    prompt_of(12),
    prompt_of(5, WIDE, 7),
    prompt_of(DOT, 9, DOT, seed=1),
    prompt_of(5, OTHER_WIDE, 7),
]
TOKEN_BYTES = 64 * 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_vision_model(tmp_path_factory.mktemp("qwen2_5_vl"))


@pytest.fixture(scope="module")
def reference(folder):
    return vision_reference(folder)


@pytest.fixture(scope="module")
def expected(reference):
    return [reference_greedy(reference, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture
def start(folder):
    engines = []

    def start(**changes):
        config = {"page_size": 16, "num_pages": 64, "num_cpu_threads": 1, **changes}
        engines.append(Engine.from_config(EngineConfig(model=str(folder), **config)))
        return engines[-1]

    yield start
    for engine in engines:
        engine.close()


def request_of(prompt: Prompt, request_id: str = "r", **sampling) -> GenerateRequest:
    asked = {"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True, **sampling}
    return GenerateRequest(
        request_id,
        prompt.ids,
        SamplingParams(**asked),
        content_spans=prompt.spans,
        media=prompt.images,
    )


def run(engine, *prompts, **sampling):
    """Tokens by prompt, and how many of each prompt's were cached."""
    for index, prompt in enumerate(prompts):
        engine.submit(request_of(prompt, f"r{index}", **sampling))
    tokens = {f"r{index}": [] for index in range(len(prompts))}
    cached = {}
    while engine.has_work:
        for output in engine.step():
            assert output.error is None, output.error
            cached.setdefault(output.request_id, output.num_cached_tokens)
            tokens[output.request_id] += output.token_ids
        engine.check_integrity()
    return list(tokens.values()), list(cached.values())


def stage_of(engine):
    """What the one rank keeps, which is below any interface of an engine."""
    (stage,) = engine._executor._run_step.__self__._media
    return stage


def test_alone_tokens_are_transformers(start, expected):
    engine = start()
    assert [run(engine, prompt)[0] for prompt in PROMPTS[:2]] == [[expected[0]], [expected[1]]]


@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_batched_tokens_are_transformers(start, expected, page_size):
    assert run(start(page_size=page_size, num_pages=1024 // page_size), *PROMPTS)[0] == expected


@pytest.mark.parametrize(
    "changes",
    [
        # Cut within images, which count as tokens of their steps.
        {"max_step_tokens": 8},
        # Room for one image at a time, so that a prompt is cut between its two.
        {"media_store_bytes": 18 * TOKEN_BYTES},
        {"speculative": "ngram"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_however_steps_are_cut_tokens_are_transformers(start, expected, changes):
    assert run(start(**changes), *PROMPTS)[0] == expected


def test_requests_that_were_retracted_go_on_as_if_they_had_not_been(start, expected):
    engine = start(page_size=1, num_pages=140, max_step_tokens=48)
    engine._scheduler._forecast.new_tokens = np.zeros_like
    assert run(engine, *PROMPTS)[0] == expected
    assert engine.stats().num_preemptions > 0


def test_a_request_goes_on_from_another_engines_output(start, expected):
    request = msgspec.structs.replace(request_of(TWO_IMAGES), resumed_token_ids=expected[0][:20])
    engine = start()
    engine.submit(request)
    tokens = []
    while engine.has_work:
        tokens += [token for output in engine.step() for token in output.token_ids]
    assert tokens == expected[0][20:]


def test_logits_are_transformers(start, reference):
    """As log probabilities, of every token of the prompt."""
    engine = start(max_step_tokens=32)
    for prompt in PROMPTS:
        engine.submit(request_of(prompt, max_tokens=1, logprobs=0, prompt_logprobs=0))
        outputs = []
        while engine.has_work:
            outputs += engine.step()
        want = reference_logits(reference, prompt).log_softmax(-1)
        of_prompt = want[:-1].gather(1, torch.tensor(prompt.ids[1:]).unsqueeze(1))[:, 0]
        got = [entry.logprob for entry in outputs[0].prompt_logprobs.unpack()]
        np.testing.assert_allclose(got, of_prompt.numpy(), rtol=0, atol=1e-4)
        assert abs(outputs[0].logprobs[0].logprob - want[-1].max().item()) < 1e-4


@pytest.fixture
def encoded(monkeypatch):
    """Digests of images, whenever one is encoded."""
    digests, encode = [], PatchGridVision.encode

    def counting(self, item):
        digests.append(item.digest)
        return encode(self, item)

    monkeypatch.setattr(PatchGridVision, "encode", counting)
    return digests


def test_a_prefix_is_found_behind_the_same_image_and_before_another_one(start, expected, encoded):
    engine = start(page_size=1, num_pages=1024)
    same, other = PROMPTS[2], PROMPTS[4]
    assert run(engine, same) == ([expected[2]], [0])
    # All but the last token; or five tokens of text and the mark before the image.
    assert run(engine, same, other) == ([expected[2], expected[4]], [23, 6])
    assert encoded == [WIDE.digest, OTHER_WIDE.digest]


def test_a_prefix_may_end_in_the_middle_of_an_image(start, expected, encoded):
    engine = start(page_size=12)
    assert [run(engine, PROMPTS[2]) for _ in range(2)] == [
        ([expected[2]], [0]),
        ([expected[2]], [12]),
    ]
    assert encoded == [WIDE.digest, WIDE.digest]


def test_one_image_of_a_step_is_encoded_once(start, expected, encoded):
    run(start(), PROMPTS[3])
    assert encoded == [DOT.digest]


def test_embeddings_are_dropped_when_no_request_needs_them(start):
    engine = start(max_step_tokens=8)
    stage = stage_of(engine)
    kept = []
    engine.submit(request_of(TWO_IMAGES))
    while engine.has_work:
        engine.step()
        kept.append(stage.num_bytes)
    run(engine, prompt_of(3))
    assert max(kept) == 18 * TOKEN_BYTES
    assert (stage.num_bytes, stage.num_slots) == (0, 0)


def test_nothing_is_left_of_requests_that_are_aborted(start, expected):
    engine = start(max_step_tokens=8)
    stage = stage_of(engine)
    for num_steps in (0, 1, 2, 3, 5, 8):
        prompt = prompt_of(3, TALL, 4, WIDE, 2, seed=num_steps)
        engine.submit(request_of(prompt))
        for _ in range(num_steps):
            engine.step()
        engine.abort("r")
        while engine.has_work:
            engine.step()
        engine.check_integrity()
    assert run(engine, prompt_of(12))[0] == [expected[1]]
    assert (stage.num_bytes, stage.num_slots) == (0, 0)
    assert engine._scheduler._ledger.num_media_bytes == 0
    assert run(engine, TWO_IMAGES)[0] == [expected[0]]


REFUSED = {
    "a placeholder too few": ({"content_spans": [ContentSpan(6, 9, WIDE.digest)]}, "there are 9"),
    "features of another shape": (
        {"media": [ImagePatches.of(WIDE.digest, 4, 10, np.zeros((40, PATCH_VALUES - 1)))]},
        "float32 have 15360 bytes, not 15200",
    ),
    "no features": ({"media": []}, "no image is brought"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_before_it_is_queued(start, name):
    changes, reason = REFUSED[name]
    engine = start()
    with pytest.raises(RequestRejectedError, match=reason) as refused:
        engine.submit(msgspec.structs.replace(request_of(PROMPTS[2]), **changes))
    assert refused.value.code == ErrorCode.INVALID_REQUEST
    assert not engine.has_work


def test_an_image_larger_than_the_store_is_refused(start, expected):
    engine = start(media_store_bytes=17 * TOKEN_BYTES + 1)
    assert engine.info.media.max_tokens == 17
    with pytest.raises(RequestRejectedError, match="takes 18 tokens, this engine holds 17"):
        engine.submit(request_of(TWO_IMAGES))
    assert not engine.has_work
    assert run(engine, PROMPTS[2])[0] == [expected[2]]


def test_requests_together_bring_no_more_than_the_engine_holds(start):
    engine = start(max_media_bytes=len(WIDE.values) + len(DOT.values))
    # Alone any request gets in.
    engine.submit(request_of(TWO_IMAGES, "first"))
    with pytest.raises(RequestRejectedError, match="requests at hand have brought") as refused:
        engine.submit(request_of(PROMPTS[3], "second"))
    assert refused.value.code == ErrorCode.QUEUE_FULL
    engine.submit(request_of(prompt_of(3), "text"))
    engine.abort("first")
    engine.submit(request_of(PROMPTS[3], "second"))
    engine.submit(request_of(PROMPTS[2], "third"))


def test_an_image_that_makes_no_numbers_fails_its_request_alone(start, expected):
    """Finite values may be too large for the model."""
    engine = start()
    huge = ImagePatches.of(b"h" * 16, 4, 10, np.full((40, PATCH_VALUES), 3e38))
    engine.submit(request_of(prompt_of(5, huge, 7), "huge"))
    engine.submit(request_of(PROMPTS[2], "well"))
    outputs = {"huge": [], "well": []}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
    engine.check_integrity()
    assert outputs["huge"][-1].finish_reason is FinishReason.ERROR
    assert [token for one in outputs["well"] for token in one.token_ids] == expected[2]


def test_an_image_that_finds_no_memory_fails_those_that_show_it_alone(start, expected, monkeypatch):
    """Whatever stands beside them in the step that runs in halves."""
    engine, encode = start(), PatchGridVision.encode

    def without_memory(self, item):
        if item.digest == WIDE.digest:
            raise torch.OutOfMemoryError("injected")
        return encode(self, item)

    monkeypatch.setattr(PatchGridVision, "encode", without_memory)
    requests = {"two": TWO_IMAGES, "text": PROMPTS[1], "wide": PROMPTS[2], "dots": PROMPTS[3]}
    for name, prompt in requests.items():
        engine.submit(request_of(prompt, name))
    outputs = {name: [] for name in requests}
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    ends = {name: of_request[-1].finish_reason for name, of_request in outputs.items()}
    failed, done = FinishReason.ERROR, FinishReason.LENGTH
    assert ends == {"two": failed, "text": done, "wide": failed, "dots": done}
    told = {name: [t for one in of for t in one.token_ids] for name, of in outputs.items()}
    assert (told["text"], told["dots"]) == (expected[1], expected[3])
    monkeypatch.setattr(PatchGridVision, "encode", encode)
    assert run(engine, *PROMPTS)[0] == expected


def test_a_model_without_eyes_says_so():
    engine = Engine.from_config(EngineConfig(num_cpu_threads=1))
    try:
        assert engine.info.media is None
        with pytest.raises(RequestRejectedError, match="this model takes no images"):
            engine.submit(request_of(PROMPTS[2]))
    finally:
        engine.close()
