"""Whisper behind /v1/audio/transcriptions, with OpenAI's client and a real engine."""

import asyncio
from dataclasses import replace

import httpx
import numpy as np
import openai
import pytest
import torch
from transformers import GenerationMixin

from service.api.http import build_http_app
from service.limits import Limits
from tests.fakes.engine_script import EngineScript, engine_bench
from tests.fakes.served_seq2seq import (
    ENGLISH,
    EOS,
    GERMAN,
    NO_TIMESTAMPS,
    PREVIOUS,
    RATE_HZ,
    START,
    SUPPRESSED,
    TRANSCRIBE,
    tiny_extractor,
    tiny_whisper,
)
from tests.fakes.sounds import tones, wav
from tests.fakes.text import make_bench
from workers.config import EngineConfig
from workers.models.transformers_seq2seq import _SourceReader

pytestmark = pytest.mark.asyncio
SOUNDS = {
    name: wav(tones(duration_s, RATE_HZ, *frequencies_hz), RATE_HZ)
    for name, duration_s, *frequencies_hz in (
        ("low", 0.5, 220.0, 300.0),
        ("high", 1.0, 2000.0),
        ("both", 0.75, 220.0, 2500.0, 5000.0),
    )
}


@pytest.fixture(scope="module")
def model():
    return tiny_whisper()


@pytest.fixture(scope="module")
def extractor():
    return tiny_extractor()


@pytest.fixture(scope="module")
def script(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("whisper")
    model.save_pretrained(folder)
    script = EngineScript(EngineConfig(model=str(folder), page_size=4, num_pages=128))
    yield script
    script.close()


@pytest.fixture
def bench(tmp_path, script, extractor):
    extractor.save_pretrained(tmp_path)
    return engine_bench(tmp_path, script)


@pytest.fixture
def transcribe(openai_client, script):
    async def ask(name="low", **asked):
        file = asked.pop("file", ("sound.wav", SOUNDS.get(name)))
        return await openai_client.audio.transcriptions.create(
            model=script.engine.info.name, file=file, **asked
        )

    return ask


class Truth:
    """What transformers makes of a sound."""

    def __init__(self, model, extractor, name):
        samples = np.frombuffer(SOUNDS[name], dtype="<i2", offset=44) / 2.0**15
        heard = extractor(samples.astype(np.float32), sampling_rate=RATE_HZ, return_tensors="pt")
        self._features, self._model = heard.input_features, model

    @torch.inference_mode()
    def language(self):
        logits = self._model(self._features, decoder_input_ids=torch.tensor([[START]])).logits
        return (ENGLISH, GERMAN)[int(logits[0, -1, [ENGLISH, GERMAN]].argmax())]

    @torch.inference_mode()
    def token_ids(self, *before):
        """The language's token and those before it are given."""
        whole = GenerationMixin.generate(
            self._model,
            self._features,
            decoder_input_ids=torch.tensor([before]),
            do_sample=False,
            num_beams=1,
            max_length=64,
        )[0].tolist()
        start = whole.index(before[0]) + len(before)
        return [one for one in whole[start:] if one != EOS]


def text_of(bench, token_ids):
    return bench.tokenizer.encoder.decode(token_ids, skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", SOUNDS)
async def test_a_transcript_is_what_transformers_writes(transcribe, bench, model, extractor, name):
    truth = Truth(model, extractor, name)
    language = truth.language()
    expected = truth.token_ids(START, language, TRANSCRIBE, NO_TIMESTAMPS)
    assert SUPPRESSED not in expected
    answer = await transcribe(name, temperature=0, response_format="verbose_json")
    assert answer.text == text_of(bench, expected)
    assert answer.language == {ENGLISH: "en", GERMAN: "de"}[language]
    assert answer.task == "transcribe"
    assert answer.duration == {"low": 0.5, "high": 1.0, "both": 0.75}[name]
    assert (await transcribe(name)).text == answer.text
    assert await transcribe(name, response_format="text") == answer.text + "\n"


async def test_an_audio_is_heard_once_however_often_it_is_asked_about(transcribe, monkeypatch):
    read, encode = [], _SourceReader.encode
    monkeypatch.setattr(
        _SourceReader, "encode", lambda self, source: read.append(source) or encode(self, source)
    )
    fresh = wav(tones(0.3, RATE_HZ, 777.0), RATE_HZ)
    for language in ("en", "de", openai.omit):
        await transcribe(file=("sound.wav", fresh), language=language)
    assert len(read) == 1


async def test_language_and_prompt_come_before_the_text(transcribe, bench, model, extractor):
    answer = await transcribe("both", language="de", prompt="hello world")
    before = [PREVIOUS, *bench.tokenizer.ids(" hello world")]
    told = (START, GERMAN, TRANSCRIBE, NO_TIMESTAMPS)
    expected = Truth(model, extractor, "both").token_ids(*before, *told)
    assert answer.text == text_of(bench, expected)
    long = await transcribe("both", language="de", prompt="hello world, " * 100)
    assert long.text != answer.text
    sent = bench.backend.requests[-1].prompt_token_ids
    assert len(sent) == 1 + 31 + len(told)
    assert sent[-len(told) :] == list(told)


REFUSED = {
    "no audio": ({"file": ("a.mp3", b"ID3 something")}, "invalid_request", "file"),
    "too long": (
        {"file": ("a.wav", wav(np.zeros(RATE_HZ + 1), RATE_HZ))},
        "invalid_request",
        "file",
    ),
    "a language that it does not know": ({"language": "xx"}, "invalid_request", "language"),
    "subtitles": ({"response_format": "srt"}, "unsupported_parameter", "response_format"),
    "words": (
        {"response_format": "verbose_json", "timestamp_granularities": ["word"]},
        "unsupported_parameter",
        "timestamp_granularities[]",
    ),
    "a stream": ({"stream": True}, "unsupported_parameter", "stream"),
    "log probabilities": ({"include": ["logprobs"]}, "unsupported_parameter", "include[]"),
    "a temperature of 2": ({"temperature": 2.0}, "invalid_request", "temperature"),
    "a name of one's own": ({"extra_body": {"beams": 5}}, "unknown_parameter", "beams"),
}


@pytest.mark.parametrize(("asked", "code", "param"), REFUSED.values(), ids=REFUSED)
async def test_what_is_not_honoured_is_refused_by_name(transcribe, asked, code, param):
    with pytest.raises(openai.BadRequestError) as caught:
        await transcribe(**asked)
    assert (caught.value.code, caught.value.param) == (code, param)


FORMS = {
    "json": ({"json": {"model": "x"}}, 415, "unsupported_media_type"),
    "no file": ({"files": {"model": (None, "x")}}, 400, "invalid_request"),
    "two files": (
        {"files": [("file", ("a", b"1")), ("file", ("b", b"2"))]},
        400,
        "invalid_request",
    ),
    "a field twice": (
        {"files": [("file", ("a", b"1")), ("prompt", (None, "1")), ("prompt", (None, "2"))]},
        400,
        "invalid_request",
    ),
    "a long field": (
        {"files": {"file": ("a", b"1"), "prompt": (None, "x" * (65 << 10))}},
        400,
        "invalid_request",
    ),
    "no boundary": (
        {"content": b"x", "headers": {"content-type": "multipart/form-data"}},
        400,
        "invalid_request",
    ),
    "broken": (
        {"content": b"x", "headers": {"content-type": "multipart/form-data; boundary=y"}},
        400,
        "invalid_request",
    ),
}


@pytest.mark.parametrize(("sent", "status", "code"), FORMS.values(), ids=FORMS)
async def test_forms_that_are_none_are_refused(client, sent, status, code):
    answer = await client.post("/v1/audio/transcriptions", **sent)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_a_body_over_the_ceiling_is_cut_off(client):
    files = {"file": ("a.wav", b"\0" * (Limits().max_body_bytes + 1))}
    answer = await client.post("/v1/audio/transcriptions", files=files)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "payload_too_large")


async def test_a_model_that_hears_reads_no_text(openai_client, script):
    with pytest.raises(openai.BadRequestError, match="use /v1/audio/transcriptions"):
        await openai_client.completions.create(model=script.engine.info.name, prompt="hello")


async def test_a_model_that_reads_text_hears_nothing(services, tmp_path):
    other = build_http_app(replace(services, models=make_bench(tmp_path / "other").models))
    transport = httpx.ASGITransport(app=other)
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as client:
        files = {"file": ("a.wav", SOUNDS["low"])}
        answer = await client.post("/v1/audio/transcriptions", files=files)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "this model reads no audio"


async def test_several_audios_at_once_are_answered_each(transcribe):
    alone = [(await transcribe(name)).text for name in SOUNDS]
    together = await asyncio.gather(*(transcribe(name) for name in SOUNDS))
    assert [answer.text for answer in together] == alone
