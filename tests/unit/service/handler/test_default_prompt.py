"""The prompt that a model's folder puts before every text, and what it leaves alone."""

import msgspec
import pytest

from service.handler.embedding import embedding_request, with_prompt
from service.handler.requests import EmbeddingOptions, GenerationRequest, TokenPrompt
from service.request_context import RequestContext
from service.security.quota import FreeLease
from service.tokenizer.jobs import EncodeText
from tests.fakes.backend import MODEL_INFO
from tests.fakes.text import make_bench
from workers.pooling.params import EmbeddingInfo, Pooling
from workers.sampling.params import SamplingParams

PROMPT = "query: "
PROMPTED = msgspec.structs.replace(
    MODEL_INFO, embedding=EmbeddingInfo(4, Pooling.LAST, prompt=PROMPT)
)
TEXTS = (EncodeText("a fox"), EncodeText(""))


@pytest.mark.asyncio
async def test_engines_read_it_before_each_text(tmp_path) -> None:
    bench = make_bench(tmp_path, info=PROMPTED)
    request = embedding_request(TEXTS, EmbeddingOptions())
    async with await bench.handler.start(request, RequestContext(), FreeLease()) as generation:
        async for _ in generation:
            pass
    expected = [bench.tokenizer.ids(PROMPT + text) for text in ("a fox", "")]
    assert [one.prompt_token_ids for one in bench.backend.requests] == expected


def test_token_ids_and_generations_are_left_alone() -> None:
    tokens = embedding_request((TokenPrompt([1, 2]),), EmbeddingOptions())
    assert with_prompt(tokens, PROMPTED).prompts == tokens.prompts
    generation = GenerationRequest(TEXTS, SamplingParams(max_tokens=1))
    assert with_prompt(generation, PROMPTED) is generation
    plain = embedding_request(TEXTS, EmbeddingOptions())
    assert with_prompt(plain, MODEL_INFO) is plain
