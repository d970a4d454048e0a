"""A tokenizer process from the inside: its frames, its replies, and what it refuses."""

import io

import msgspec
import pytest

from service.tokenizer import encoder as encoders
from service.tokenizer.encoder import TextEncoder
from service.tokenizer.jobs import (
    FRAME_HEADER,
    Decoded,
    DecodeTokens,
    EncodeChat,
    Encoded,
    EncodeText,
    Job,
    Refused,
    Reply,
    TooLong,
    frame,
    job_bytes,
    pack_token_ids,
    unpack_token_ids,
)
from service.tokenizer.worker import Tools, run_job, serve
from tests.fakes.tokenizer_folders import make_byte_level_folder


def run(encoder, job):
    return run_job(Tools(encoder, None), job)


@pytest.fixture
def encoder(tmp_path):
    return TextEncoder(make_byte_level_folder(tmp_path), 1 << 20)


def framed(*jobs):
    return b"".join(frame(msgspec.msgpack.encode(job)) for job in jobs)


def replies_of(encoder, data):
    replies = io.BytesIO()
    serve(Tools(encoder, None), io.BytesIO(data), replies)
    rest, found = replies.getvalue(), []
    while rest:
        (size,) = FRAME_HEADER.unpack(rest[: FRAME_HEADER.size])
        end = FRAME_HEADER.size + size
        found.append(msgspec.msgpack.decode(rest[FRAME_HEADER.size : end], type=Reply))
        rest = rest[end:]
    return found


def test_jobs_are_answered_in_order_until_the_input_ends(encoder):
    ids = encoder.encode_text(EncodeText("hello"))
    chat = EncodeChat([{"role": "user", "content": "hi"}])
    jobs: list[Job] = [EncodeText("hello"), chat, DecodeTokens(pack_token_ids(ids))]
    assert replies_of(encoder, framed(*jobs)) == [
        Encoded(pack_token_ids(ids)),
        Encoded(pack_token_ids(encoder.encode_chat(chat))),
        Decoded("hello"),
    ]
    assert replies_of(encoder, b"") == []


@pytest.mark.parametrize("num_bytes_cut", [1, 5])
def test_a_frame_that_is_cut_off_is_not_answered(encoder, num_bytes_cut):
    jobs = framed(EncodeText("hello"), EncodeText("world"))
    assert len(replies_of(encoder, jobs[:-num_bytes_cut])) == 1
    header = framed(EncodeText("hello")) + FRAME_HEADER.pack(7)[:-1]
    assert len(replies_of(encoder, header)) == 1


def test_bad_input_is_refused_with_the_field_that_is_at_fault(encoder):
    chat = EncodeChat([{"role": "user", "content": "hi"}], template_kwargs={"tools": []})
    refused = run(encoder, chat)
    assert refused == Refused("tools cannot be set", "chat_template_kwargs")


def test_what_is_too_long_is_told_with_the_tokens_that_it_has_at_least(encoder, monkeypatch):
    monkeypatch.setattr(encoders, "_MIN_MEASURED_CHARS", 16)
    text = "hello world " * 100
    num_tokens = len(encoder.encode_text(EncodeText(text)))
    reply = run(encoder, EncodeText(text, max_tokens=20))
    assert isinstance(reply, TooLong)
    assert 20 < reply.min_tokens <= num_tokens
    chat = EncodeChat([{"role": "user", "content": text}], max_tokens=20)
    assert isinstance(run(encoder, chat), TooLong)
    assert isinstance(run(encoder, EncodeText(text, max_tokens=num_tokens)), Encoded)
    short = EncodeText("hello world " * 3, max_tokens=36)
    assert isinstance(run(encoder, short), Encoded), "it has no more characters than that"


def test_a_prompt_that_takes_all_memory_is_refused_and_not_the_process_lost(encoder, monkeypatch):
    def exhaust(job):
        raise MemoryError

    monkeypatch.setattr(encoder, "encode_text", exhaust)
    refused = run(encoder, EncodeText("x"))
    assert isinstance(refused, Refused)
    assert "memory" in refused.message


def test_special_tokens_of_an_answer_are_hidden_or_shown(encoder):
    ids = pack_token_ids(encoder.encode_text(EncodeText("a<|im_end|>")))
    assert run(encoder, DecodeTokens(ids)) == Decoded("a")
    assert run(encoder, DecodeTokens(ids, skip_special_tokens=False)) == Decoded("a<|im_end|>")


def test_ids_are_four_little_endian_bytes_each():
    assert pack_token_ids([1, 258]) == b"\x01\0\0\0\x02\x01\0\0"
    assert unpack_token_ids(pack_token_ids([0, 1 << 31])).tolist() == [0, 1 << 31]


def test_a_job_costs_what_there_is_to_go_through():
    assert job_bytes(EncodeText("abc")) == 3
    assert job_bytes(EncodeText("é🙂")) == 6
    assert job_bytes(EncodeText("\ud800")) == 3
    assert job_bytes(DecodeTokens(pack_token_ids([1, 2, 3]))) == 12
    one = job_bytes(EncodeChat([{"role": "u", "content": ""}]))
    two = job_bytes(EncodeChat([{"role": "u", "content": "é"}, {"role": "u", "content": None}]))
    assert two == 2 * one + 2
    assert one > 1, "a message without text takes its time, too"
