"""Beam search over an engine says what transformers' beam search says, beam by beam."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from service.handler.beam_streams import SearchPlan, search_streams
from service.handler.beams import BeamOptions
from service.request_context import RequestContext
from service.tokenizer.encoder import TextEncoder
from service.tokenizer.jobs import EncodeText
from workers import Engine
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams

PROMPTS = ("def __init__(self", "import os\n", "class Path:\n    def ", "# The first\nx = ")
MAX_TOKENS = 10
# transformers takes 0 for none.
PAD_ID = 1
LINE_END = next(
    iter(
        TextEncoder(builtin_model_path(), max_rendered_bytes=1024).encode_text(
            EncodeText("\n", add_special_tokens=False)
        )
    )
)


class EngineBackend:
    """An engine in process, a step at a time, whoever asks."""

    def __init__(self, engine):
        self._engine = engine
        self._outputs = {}
        self.num_submitted = 0

    async def submit(self, request, context):
        self._engine.submit(request)
        self.num_submitted += 1
        return self._read(request.request_id)

    async def _read(self, request_id):
        await asyncio.sleep(0)
        while request_id not in self._outputs:
            for output in self._engine.step():
                self._outputs[output.request_id] = output
        yield self._outputs.pop(request_id)


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(device="cpu", dtype="float32", num_cpu_threads=1, page_size=1)
    made = Engine.from_config(config)
    yield made
    made.close()


@pytest.fixture(scope="module")
def reference():
    model = AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32)
    return model.eval()


@pytest.fixture(scope="module")
def prompts():
    encoder = TextEncoder(builtin_model_path(), max_rendered_bytes=1 << 20)
    return [list(encoder.encode_text(EncodeText(text))) for text in PROMPTS]


def searched(engine, prompt, num_beams, options, eos_ids):
    plan = SearchPlan(
        GenerateRequest("search", prompt, SamplingParams(max_tokens=MAX_TOKENS, logprobs=1)),
        num_beams,
        options,
        frozenset(eos_ids),
    )

    async def run():
        streams = search_streams([plan], EngineBackend(engine), RequestContext())
        outputs = [await anext(stream) for stream in streams]
        for stream in streams:
            await stream.aclose()
        return outputs

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("options", "num_beams"),
    [
        (BeamOptions(), 2),
        (BeamOptions(), 4),
        (BeamOptions(2.0, "never"), 4),
        (BeamOptions(0.0, True), 4),
        (BeamOptions(-1.0), 4),
    ],
    ids=["default_2", "default", "long_never", "early", "short"],
)
def test_texts_are_those_of_transformers(engine, reference, prompts, options, num_beams):
    # A line's end is one more end, so that beams end within the few tokens.
    ending_ids = [*engine.info.eos_token_ids, LINE_END]
    lengths = set()
    for prompt in prompts:
        expected = reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            num_beams=num_beams,
            num_return_sequences=num_beams,
            do_sample=False,
            max_new_tokens=MAX_TOKENS,
            eos_token_id=ending_ids,
            pad_token_id=PAD_ID,
            length_penalty=options.length_penalty,
            early_stopping=options.early_stopping,
        )[:, len(prompt) :].tolist()
        outputs = searched(engine, prompt, num_beams, options, ending_ids)
        found = [output.token_ids for output in outputs]
        assert [ids + [PAD_ID] * (len(expected[0]) - len(ids)) for ids in found] == expected
        lengths |= {len(ids) for ids in found}
    # A search for long texts may well end none early.
    assert len(lengths) > 1 or options.length_penalty > 1


def test_a_beams_log_probabilities_are_those_of_its_tokens(engine, prompts):
    (best, _) = searched(engine, prompts[0], 2, BeamOptions(), engine.info.eos_token_ids)
    (alone,) = engine.generate(
        [prompts[0] + best.token_ids],
        SamplingParams(max_tokens=1, prompt_logprobs=1),
    )
    expected = [entry.logprob for entry in alone.prompt_logprobs if entry is not None]
    found = [entry.logprob for entry in best.logprobs]
    assert found == pytest.approx(expected[-len(found) :], abs=1e-3)
    assert all(len(entry.top_token_ids) == 1 for entry in best.logprobs)


def test_a_search_that_nobody_wants_leaves_nothing_running(engine, prompts):
    backend = EngineBackend(engine)
    plan = SearchPlan(
        GenerateRequest("left", prompts[0], SamplingParams(max_tokens=MAX_TOKENS)),
        2,
        BeamOptions(),
        frozenset(),
    )

    async def run():
        streams = search_streams([plan], backend, RequestContext())
        await asyncio.sleep(0)
        await streams[0].aclose()
        before = backend.num_submitted
        for _ in range(10):
            await asyncio.sleep(0)
        return before

    assert asyncio.run(run()) == backend.num_submitted
