"""Frames and handshakes as they are on the wire: another version of this code may be at its end."""

import asyncio
import hmac
import socket

import pytest
import uvloop

from service.channel.errors import AuthenticationError, ChannelError, FrameError
from service.channel.framing import (
    LENGTH_BYTES,
    SLICE_BYTES,
    FrameWriter,
    read_frame,
    write_frame,
)
from service.channel.handshake import greet_ingress, greet_replica, new_channel_key
from service.channel.messages import (
    PROTOCOL_VERSION,
    ClientHello,
    ClientProof,
    ServerHello,
    Welcome,
    decode_handshake,
    encode,
)
from tests.fakes.engine import FakeEngine

pytestmark = pytest.mark.asyncio
WELCOME = Welcome("replica-1", FakeEngine().info)


class Pipe:
    """A writer whose bytes its reader gets."""

    def __init__(self):
        self.reader = asyncio.StreamReader()

    def writelines(self, parts):
        self.reader.feed_data(b"".join(parts))


async def test_a_frame_is_its_length_in_four_bytes_and_its_body():
    pipe = Pipe()
    write_frame(pipe, b"abc" * 100)
    pipe.reader.feed_eof()
    assert await pipe.reader.read() == b"\x00\x00\x01\x2c" + b"abc" * 100


async def test_a_body_may_be_as_long_as_the_limit_and_no_longer():
    pipe = Pipe()
    write_frame(pipe, b"x" * 64)
    assert await read_frame(pipe.reader, 64) == b"x" * 64
    write_frame(pipe, b"x" * 65)
    with pytest.raises(FrameError, match="frame of 65 bytes; at most 64"):
        await read_frame(pipe.reader, 64)


async def test_a_frame_that_is_cut_off_is_a_closed_connection():
    pipe = Pipe()
    pipe.reader.feed_data(b"\x00\x00\x00\x05ab")
    pipe.reader.feed_eof()
    with pytest.raises(ChannelError, match="closed"):
        await read_frame(pipe.reader, 64)


async def test_both_ends_prove_the_key_and_learn_who_the_other_is():
    to_replica, to_ingress, key = Pipe(), Pipe(), new_channel_key()
    welcome, name = await asyncio.gather(
        greet_replica(to_ingress.reader, to_replica, key, "ingress-1"),
        greet_ingress(to_replica.reader, to_ingress, key, WELCOME),
    )
    assert welcome == WELCOME
    assert name == "ingress-1"


async def test_proofs_are_those_of_the_protocols_version():
    """A proof that differs is another PROTOCOL_VERSION: what runs elsewhere could not connect."""
    to_replica, to_ingress = Pipe(), Pipe()
    greeting = asyncio.create_task(greet_ingress(to_replica.reader, to_ingress, b"k" * 32, WELCOME))
    write_frame(to_replica, encode(ClientHello(PROTOCOL_VERSION, b"n" * 32, "ingress-1")))
    hello = decode_handshake(await read_frame(to_ingress.reader, 1 << 16), ServerHello)

    def proof(role):
        nonces = "|".join(nonce.hex() for nonce in (b"n" * 32, hello.nonce))
        said = f"tessera-channel|{role}|{nonces}|ingress-1"
        return hmac.new(b"k" * 32, said.encode(), "sha256").digest()

    assert len(hello.nonce) == 32
    assert hello.proof == proof("replica")
    write_frame(to_replica, encode(ClientProof(proof("ingress"))))
    assert await greeting == "ingress-1"


@pytest.mark.parametrize(
    ("hello", "error"),
    [
        (ClientHello(PROTOCOL_VERSION + 1, b"n" * 32, "i"), "protocol version 3, this is 2"),
        (ClientHello(PROTOCOL_VERSION, b"n" * 31, "i"), "a nonce has 32 bytes"),
        (ClientHello(PROTOCOL_VERSION, b"n" * 33, "i"), "a nonce has 32 bytes"),
    ],
)
async def test_a_hello_of_another_kind_is_refused_before_anything_is_proven(hello, error):
    to_replica, to_ingress = Pipe(), Pipe()
    write_frame(to_replica, encode(hello))
    with pytest.raises(ChannelError, match=error):
        await greet_ingress(to_replica.reader, to_ingress, b"k" * 32, WELCOME)
    to_ingress.reader.feed_eof()
    assert await to_ingress.reader.read() == b""


async def test_an_ingress_tells_nothing_to_a_replica_without_the_key():
    to_replica, to_ingress = Pipe(), Pipe()
    write_frame(to_ingress, encode(ServerHello(b"s" * 32, b"p" * 32)))
    with pytest.raises(AuthenticationError, match="replica does not hold"):
        await greet_replica(to_ingress.reader, to_replica, b"k" * 32, "ingress-1")
    hello = decode_handshake(await read_frame(to_replica.reader, 1 << 16), ClientHello)
    assert (hello.version, len(hello.nonce), hello.ingress_id) == (
        PROTOCOL_VERSION,
        32,
        "ingress-1",
    )
    to_replica.reader.feed_eof()
    assert await to_replica.reader.read() == b""


async def test_a_handshake_does_not_wait_for_long_messages():
    pipe = Pipe()
    pipe.reader.feed_data((1 << 17).to_bytes(4, "big"))
    with pytest.raises(FrameError, match="at most 65536"):
        await greet_ingress(pipe.reader, Pipe(), b"k" * 32, WELCOME)
    with pytest.raises(FrameError, match="expected ServerHello, got Welcome"):
        decode_handshake(encode(WELCOME), ServerHello)


async def connected():
    """A reader and a writer at the two ends of a socket."""
    ours, theirs = socket.socketpair()
    _, writer = await asyncio.open_connection(sock=ours)
    reader, other = await asyncio.open_connection(sock=theirs)
    return writer, reader, other


async def test_long_bodies_pass_in_slices_and_in_order():
    writer, reader, other = await connected()
    frames = FrameWriter(writer)
    bodies = [b"a" * (9 * SLICE_BYTES + 1), b"b", b"c" * (2 * SLICE_BYTES), b"d" * SLICE_BYTES]
    for body in bodies:
        frames.write(body)
    assert frames.num_unread_bytes == sum(LENGTH_BYTES + len(body) for body in bodies)
    finishing = asyncio.create_task(frames.finish())
    assert [await read_frame(reader, 1 << 30) for _ in bodies] == bodies
    await finishing
    assert frames.num_unread_bytes == 0
    assert await reader.read() == b""
    other.close()


async def test_others_have_their_turns_while_a_long_body_is_written_and_read():
    writer, reader, other = await connected()
    frames = FrameWriter(writer)
    frames.write(b"a" * (16 * SLICE_BYTES))
    assert writer.transport.get_write_buffer_size() == 0, "nothing is copied at once"
    reading, num_turns = asyncio.create_task(read_frame(reader, 1 << 30)), 0
    while not reading.done():
        await asyncio.sleep(0)
        assert writer.transport.get_write_buffer_size() <= 2 * SLICE_BYTES
        num_turns += 1
    assert num_turns > 16
    frames.abort()
    other.close()


async def test_what_waits_for_a_peer_that_has_gone_is_given_up():
    writer, _, other = await connected()
    frames = FrameWriter(writer)
    frames.write(b"a" * (64 * SLICE_BYTES))
    await asyncio.sleep(0.01)
    assert frames.num_unread_bytes > SLICE_BYTES
    other.transport.abort()
    async with asyncio.timeout(5):
        await frames.finish()
    assert frames.num_unread_bytes == 0


async def test_an_abort_drops_what_waits():
    writer, reader, other = await connected()
    frames = FrameWriter(writer)
    frames.write(b"a" * (64 * SLICE_BYTES))
    frames.abort()
    assert frames.num_unread_bytes == 0
    with pytest.raises(ChannelError, match="closed"):
        await read_frame(reader, 1 << 30)
    other.close()


async def _write_to_who_has_gone():
    writer, _, other = await connected()
    frames = FrameWriter(writer)
    writer.transport.abort()
    await asyncio.sleep(0.01)
    for body in (b"a", b"b" * (2 * SLICE_BYTES)):
        frames.write(body)
    assert frames.num_unread_bytes == 0
    other.close()


@pytest.mark.parametrize("run_on_loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
async def test_a_frame_to_who_has_gone_is_nothing(run_on_loop):
    """Behind it others get theirs in the same call."""
    await asyncio.to_thread(lambda: run_on_loop(_write_to_who_has_gone()))
