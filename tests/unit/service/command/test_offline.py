"""Offline generation: streamed text is the whole text, stop strings end it, nothing is left over.

The tokenizer has one token a byte, and the fake engine counts upwards from the prompt's last token,
so the text of a prompt "a" is "bcdef...".
"""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from service.command.offline import OfflineGenerator, OfflineResult, OfflineText
from service.handler.requests import TextOptions
from service.tokenizer.encoder import EncodeRefusedError
from tests.fakes.engine import FakeEngine
from workers.errors import RequestRejectedError
from workers.sampling.params import SamplingParams


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> OfflineText:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {char: index for index, char in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder: Path = tmp_path_factory.mktemp("model")
    tokenizer.save(str(folder / "tokenizer.json"))
    return OfflineText.load(folder)


def generate(
    text: OfflineText, engine: FakeEngine, max_tokens: int, *stop: str
) -> tuple[OfflineResult, list[str]]:
    parts: list[str] = []
    result = OfflineGenerator(engine, text.pieces).generate(
        text.encode("a", is_chat=False),
        SamplingParams(max_tokens=max_tokens),
        TextOptions(stop=stop),
        parts.append,
    )
    return result, parts


def test_parts_add_up_to_the_text(text: OfflineText) -> None:
    result, parts = generate(text, FakeEngine(vocab_size=256), 5)
    assert result.text == "bcdef" == "".join(parts)
    assert len(parts) == 5
    assert (result.num_prompt_tokens, result.num_output_tokens) == (1, 5)
    assert result.finish_reason == "length"
    assert result.stop_reason is None
    assert 0 < result.time_to_first_token_s <= result.elapsed_s


def test_a_stop_string_ends_it_hidden_and_ends_the_request_in_the_engine(
    text: OfflineText,
) -> None:
    engine = FakeEngine(vocab_size=256)
    result, parts = generate(text, engine, 50, "ef", "zz")
    assert result.text == "bcd" == "".join(parts)
    assert (result.finish_reason, result.stop_reason) == ("stop", "ef")
    assert not engine.has_work
    assert engine.num_output_tokens < 10


def test_a_refused_request_raises_the_engines_reason(text: OfflineText) -> None:
    with pytest.raises(RequestRejectedError, match="too long"):
        generate(text, FakeEngine(max_context_len=1), 5)


def test_chat_without_a_template_is_refused(text: OfflineText) -> None:
    with pytest.raises(EncodeRefusedError, match="chat template"):
        text.encode("hello", is_chat=True)
