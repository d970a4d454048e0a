"""Calls that no client would make on purpose: what hypothesis draws from the proto, and worse."""

import functools
from typing import NamedTuple

from hypothesis import strategies as st

from service.proto import inference_pb2 as pb
from tests.fakes.random_requests import messages_of

REQUESTS = {
    "Generate": pb.GenerateRequest,
    "GenerateStream": pb.GenerateRequest,
    "Embed": pb.EmbedRequest,
    "Score": pb.ScoreRequest,
    "Tokenize": pb.TokenizeRequest,
    "Detokenize": pb.DetokenizeRequest,
    "ListModels": pb.ListModelsRequest,
    "GetModel": pb.GetModelRequest,
}
_PROMPTS = ("text", "chat", "token_ids")
_MB = 1_000_000


class Call(NamedTuple):
    """num_read: messages of the answer after which the client leaves; None reads them all."""

    method: str
    payload: bytes
    metadata: tuple[tuple[str, str | bytes], ...] = ()
    timeout_s: float = 60.0
    num_read: int | None = None


@st.composite
def _valid_payload(draw, kind):
    fields = draw(messages_of(kind.DESCRIPTOR))
    if kind is not pb.DetokenizeRequest:
        for name in [name for name in _PROMPTS if name in fields][1:]:
            del fields[name]
    return kind(**fields).SerializeToString()


@st.composite
def _broken_payload(draw, kind):
    """A valid message with bytes replaced, put in or cut off: other types, lengths and fields."""
    data = bytearray(draw(_valid_payload(kind)))
    for _ in range(draw(st.integers(1, 4))):
        position = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(("replace", "insert", "cut"))):
            case "replace" if position < len(data):
                data[position] = draw(st.integers(0, 255))
            case "insert":
                data[position:position] = draw(st.binary(min_size=1, max_size=6))
            case _:
                del data[position:]
    return bytes(data)


@functools.cache
def _huge_payloads():
    """Made by who draws them: they take a second."""
    text = pb.GenerateRequest(text=pb.Text(text="def " * (_MB // 10))).SerializeToString()
    message = pb.Chat(messages=[pb.Message()]).SerializeToString()
    flood = message * (4 * _MB // len(message))
    chat = pb.GenerateRequest(chat=pb.Chat.FromString(flood)).SerializeToString()
    many = pb.SamplingParams(stop=["x"] * 100_000, stop_token_ids=range(100_000))
    sampling = pb.GenerateRequest(text=pb.Text(text="x"), sampling=many).SerializeToString()
    return (
        text,
        text * 25,
        chat,
        sampling,
        pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * _MB)).SerializeToString(),
        pb.DetokenizeRequest(token_ids=[1] * _MB).SerializeToString(),
        b"\xf8\x7f\x01" * _MB,
    )


_METADATA = st.lists(
    st.sampled_from(
        (
            ("authorization", "Bearer "),
            ("authorization", "Basic eDp5"),
            ("x-request-id", "x" * 200),
            ("x-request-id", "a b"),
            ("traceparent", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"),
            ("traceparent", "garbage"),
            ("tracestate", "=" * 600),
            ("odd-bin", b"\x00\xff" * 50),
            ("x-long", "y" * 12_000),
            ("accept-encoding", "gzip, \x21"),
        )
    ),
    max_size=3,
)
_WAYS = st.sampled_from(
    (
        *[{}] * 5,
        {"num_read": 0},
        {"num_read": 1},
        {"num_read": 3},
        {"timeout_s": 0.001},
        {"timeout_s": 0.05},
    )
)


@st.composite
def _any_payload(draw, kind):
    match draw(st.integers(0, 19)):
        case 0:
            return draw(st.sampled_from(_huge_payloads()))
        case 1:
            return draw(st.binary(max_size=60))
        case number if number < 7:
            return draw(_broken_payload(kind))
        case _:
            return draw(_valid_payload(kind))


@st.composite
def calls(draw):
    method = draw(st.sampled_from((*REQUESTS, "Generate", "GenerateStream", "GenerateStream")))
    payload = draw(_any_payload(REQUESTS[method]))
    return Call(method, payload, tuple(draw(_METADATA)), **draw(_WAYS))
