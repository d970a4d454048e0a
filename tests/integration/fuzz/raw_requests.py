"""Bytes for an HTTP or gRPC port that are no request, or one that no library would send.

Each maker takes a random generator. Knows no socket.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass

_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@dataclass(frozen=True, slots=True)
class Exchange:
    """parts: sent one by one, pause_s apart. num_answers: of status 200 that must come; None: any
    answer or none. leaves: the connection is reset once the parts are sent."""

    parts: tuple[bytes, ...]
    pause_s: float = 0.0
    num_answers: int | None = None
    leaves: bool = False


Maker = Callable[[random.Random, str], Exchange]


def body_of(model: str, **fields) -> bytes:
    return json.dumps({"model": model, "prompt": "def ", "max_tokens": 2, **fields}).encode()


def _post(body: bytes, *headers: bytes) -> bytes:
    lines = b"".join(header + b"\r\n" for header in headers)
    return _HEAD + lines + b"Content-Length: %d\r\n\r\n" % len(body) + body


def _chunked(*pieces: bytes) -> bytes:
    return _HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"".join(pieces)


def oversized_head(rng: random.Random, model: str) -> Exchange:
    size = rng.choice((16_000, 17_000, 70_000, 300_000))
    head = rng.choice(
        (
            b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: x\r\n\r\n",
            _HEAD + b"X-Long: " + b"b" * size + b"\r\n\r\n",
            _HEAD + b"".join(b"X-%d: y\r\n" % i for i in range(size // 10)) + b"\r\n",
            _HEAD + b"X" * size,
        )
    )
    step = rng.choice((len(head), 4096, 1000))
    return Exchange(tuple(head[i : i + step] for i in range(0, len(head), step)))


def broken_line(rng: random.Random, model: str) -> Exchange:
    return Exchange(
        (
            rng.choice(
                (
                    rng.randbytes(rng.randint(1, 400)) + b"\r\n\r\n",
                    b"\r\n" * 50,
                    b"GET\r\n\r\n",
                    b"GET / HTTP/9.9\r\n\r\n",
                    b"GET / HTTP/1.1\r\n\r\n",
                    b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
                    b"GET / HTTP/1.1\r\nHost: x\r\n folded: y\r\n\r\n",
                    b"GET / HTTP/1.1\r\nHost: x\r\nX: \xff\xfe\x00\r\n\r\n",
                    b"GET /%00%ff/\xff HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"GET http://[::1/ HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"OPTIONS * HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"CONNECT a:1 HTTP/1.1\r\nHost: x\r\n\r\n",
                    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
                    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(60),
                )
            ),
        )
    )


def odd_lengths(rng: random.Random, model: str) -> Exchange:
    body = body_of(model)
    lengths = rng.choice(
        (
            (b"-1",),
            (b"abc",),
            (b"9" * 30,),
            (b"%d" % (len(body) + 5),),
            (b"%d" % (len(body) - 5),),
            (b"5", b"6"),
            (b"%d" % (1 << 40),),
        )
    )
    lines = b"".join(b"Content-Length: " + length + b"\r\n" for length in lengths)
    extra = rng.choice((b"", b"Transfer-Encoding: chunked\r\n", b"Transfer-Encoding: xyz\r\n"))
    return Exchange((_HEAD + lines + extra + b"\r\n", body), pause_s=0.01)


def bad_chunks(rng: random.Random, model: str) -> Exchange:
    body = body_of(model)
    good = b"%x\r\n" % len(body) + body + b"\r\n"
    return rng.choice(
        (
            Exchange((_chunked(good, b"0\r\n\r\n"),), num_answers=1),
            Exchange((_chunked(b"zz\r\nab\r\n"),)),
            Exchange((_chunked(b"-5\r\nabcde\r\n"),)),
            Exchange((_chunked(b"f" * 40 + b"\r\nabc"),)),
            Exchange((_chunked(b"3\r\nabcdef\r\n0\r\n\r\n"),)),
            Exchange((_chunked(b"%x;" % len(body) + b"e" * 50_000 + b"\r\n" + body),)),
            Exchange((_chunked(good, b"0\r\n", *[b"T: x\r\n"] * 9000, b"\r\n"),)),
            Exchange(tuple(_chunked(good)[i : i + 7] for i in range(0, 200, 7)), pause_s=0.001),
        )
    )


def slow_body(rng: random.Random, model: str) -> Exchange:
    request = _post(body_of(model))
    is_whole = rng.random() < 0.5
    parts = tuple(request[i : i + 9] for i in range(0, len(request), 9))
    if is_whole:
        return Exchange(parts, pause_s=0.01, num_answers=1)
    return Exchange(parts[: len(parts) // 2], pause_s=0.02, leaves=rng.random() < 0.5)


def pipelined(rng: random.Random, model: str) -> Exchange:
    count = rng.randint(2, 12)
    request = _post(body_of(model))
    if rng.random() < 0.3:
        return Exchange((request * count,), leaves=True)
    return Exchange((request * count,), num_answers=count)


def abandoned_stream(rng: random.Random, model: str) -> Exchange:
    request = _post(body_of(model, max_tokens=200, stream=True, n=rng.randint(1, 4)))
    return Exchange((request, b""), pause_s=rng.choice((0.0, 0.05, 0.3)), leaves=True)


def odd_json(rng: random.Random, model: str) -> Exchange:
    name = json.dumps(model).encode()
    body = rng.choice(
        (
            b"\xef\xbb\xbf" + body_of(model),
            body_of(model).decode().encode("utf-16"),
            b"[" * rng.choice((500, 60_000, 200_000)),
            b'{"a":' * 30_000,
            b'{"model":%s,"prompt":"\\ud800","max_tokens":2}' % name,
            b'{"model":%s,"prompt":"a","seed":%s}' % (name, b"9" * 5000),
            b'{"model":%s,"prompt":"a","temperature":1e999}' % name,
            b'{"model":%s,"model":1,"prompt":"a"}' % name,
            b'{"model":%s,"prompt":[%s]}' % (name, b",".join([b"[1]"] * 500_000)),
            b'{"model":%s,"prompt":[%s]}' % (name, b",".join([b"1"] * 1_500_000)),
            b'{"model":%s,"prompt":"%s"}' % (name, b"x" * 7_000_000),
            b"x" * 9_000_000,
            rng.randbytes(2000),
        )
    )
    return Exchange((_post(body, *rng.choice(((), (b"Content-Encoding: gzip",)))),))


def odd_headers(rng: random.Random, model: str) -> Exchange:
    header = rng.choice(
        (
            b"Expect: 100-continue",
            b"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n"
            b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
            b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk",
            b"X-Request-Id: \xff\xff",
            b"X-Request-Id: " + b"a" * 200,
            b"Authorization: Bearer \xe9",
            b"traceparent: 00-zz-zz-zz",
            b"Content-Type: text/html",
            b"X-HTTP-Method-Override: DELETE",
            b"Range: bytes=0-1",
        )
    )
    return Exchange((_post(body_of(model), header),))


HTTP_MAKERS: tuple[Maker, ...] = (
    oversized_head,
    broken_line,
    odd_lengths,
    bad_chunks,
    slow_body,
    pipelined,
    abandoned_stream,
    odd_json,
    odd_headers,
)


def grpc_port_nonsense(rng: random.Random, model: str) -> Exchange:
    """HTTP/2 that is none, for the gRPC port."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    frame = rng.randbytes(3) + bytes([rng.randint(0, 12), rng.randint(0, 255)]) + rng.randbytes(24)
    settings = b"\x00\x00\x00\x04\x00\x00\x00\x00\x00"
    return Exchange(
        rng.choice(
            (
                (_post(body_of(model)),),
                (preface, rng.randbytes(100)),
                (preface + settings, frame * rng.randint(1, 50)),
                (preface + settings * 2000,),
                (rng.randbytes(500),),
            )
        )
    )
