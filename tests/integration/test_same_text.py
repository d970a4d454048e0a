"""One prompt, temperature 0, float32: the same text by every way through the product."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from transformers import AutoTokenizer

from tests.integration.services import (
    grpc_stream_text,
    grpc_text,
    http_stream_text,
    http_text,
    running_service,
    wait_until,
)
from workers import Engine
from workers.builtin import builtin_model_path
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

PROMPT = '''class Cache:
    """A dictionary that forgets what was not used for long."""

    def __init__(self, max_size):
        self.max_size = max_size
        self.items = {}

    def get(self, key'''
NUM_TOKENS = 48
NUM_OTHERS = 12
WAYS = {
    "http": http_text,
    "http_stream": http_stream_text,
    "grpc": grpc_text,
    "grpc_stream": grpc_stream_text,
}
LAYOUTS = {
    "page_1": {"page_size": 1},
    "page_16": {"page_size": 16},
    "page_64": {"page_size": 64},
    "chunked_at_64": {"max_step_tokens": 64},
    "chunked_at_16_page_1": {"max_step_tokens": 16, "page_size": 1},
}


def other_prompt(index: int) -> str:
    return f"import os\n\n\ndef function_{index}(path, mode):\n    " + "# comment\n    " * index


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(builtin_model_path())


def generate(tokenizer, config, prompts, runs=1):
    engine = Engine.from_config(config)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    try:
        for _ in range(runs):
            results = engine.generate([tokenizer.encode(prompt) for prompt in prompts], sampling)
        engine.check_integrity()
        texts = [tokenizer.decode(r.token_ids, skip_special_tokens=True) for r in results]
        return texts, results, engine.stats()
    finally:
        engine.close()


@pytest.fixture(scope="module")
def expected(tokenizer):
    (text,), _, _ = generate(tokenizer, EngineConfig(page_size=1), [PROMPT])
    assert len(text) > NUM_TOKENS
    return text


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_page_size_and_chunking_change_no_character(tokenizer, expected, layout) -> None:
    (text,), _, _ = generate(tokenizer, EngineConfig(**layout), [PROMPT])
    assert text == expected


@pytest.mark.parametrize("page_size", [1, 16])
def test_a_prefix_hit_changes_no_character(tokenizer, expected, page_size) -> None:
    (text,), (result,), _ = generate(tokenizer, EngineConfig(page_size=page_size), [PROMPT], runs=2)
    assert result.num_cached_tokens > 0
    assert text == expected


def test_a_batch_of_others_changes_no_character(tokenizer, expected) -> None:
    prompts = [PROMPT, *map(other_prompt, range(NUM_OTHERS))]
    texts, _, _ = generate(tokenizer, EngineConfig(), prompts)
    assert texts[0] == expected


def test_retraction_changes_no_character(tokenizer, expected) -> None:
    prompts = [*map(other_prompt, range(8)), PROMPT]
    config = EngineConfig(page_size=4, num_pages=80)
    texts, _, stats = generate(tokenizer, config, prompts)
    assert stats.num_preemptions > 0
    assert texts[-1] == expected


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def service(request, ray_session):
    tp_size = request.param
    with running_service(f"same-tp{tp_size}", 18100, engine={"tp_size": tp_size}) as running:
        yield running


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_every_protocol_gives_the_same_text(service, expected, way) -> None:
    assert way(service, PROMPT, NUM_TOKENS) == expected


def test_a_chat_streams_what_it_answers_whole(service) -> None:
    chat = service.openai().chat.completions
    messages = [{"role": "user", "content": "What does os.path.join do?"}]
    whole = chat.create(model="builtin", messages=messages, temperature=0, max_tokens=200)
    chunks = list(
        chat.create(
            model="builtin",
            messages=messages,
            temperature=0,
            max_tokens=200,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    parts = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    assert len([part for part in parts if part]) > 5
    assert "".join(parts) == whole.choices[0].message.content
    assert whole.choices[0].finish_reason == "stop"
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_the_same_text_comes_out_of_a_busy_service(service, expected) -> None:
    with ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
        others = [
            pool.submit(http_text, service, other_prompt(index), NUM_TOKENS)
            for index in range(NUM_OTHERS)
        ]
        texts = [pool.submit(way, service, PROMPT, NUM_TOKENS) for way in WAYS.values()]
        assert [text.result() for text in texts] == [expected] * len(WAYS)
        assert all(other.result() for other in others)
    wait_until(lambda: service.metric("tessera_kv_pages_used") == 0)
