"""Mutual challenge and response: both ends prove the channel key before anything else is read.

HMAC-SHA256 over a role, both nonces and the ingress's name, so that no proof can be replayed or
reflected. The bytes that follow are neither encrypted nor signed: the cluster network is the trust
boundary, and this keeps out whoever can reach a port of it but holds no key.
"""

import asyncio
import hmac
import secrets

from service.channel.errors import AuthenticationError, ChannelError, FrameError
from service.channel.framing import read_frame, write_frame
from service.channel.messages import (
    PROTOCOL_VERSION,
    ClientHello,
    ClientProof,
    ServerHello,
    Welcome,
    decode_handshake,
    encode,
)

KEY_BYTES = 32
NONCE_BYTES = 32
MAX_HANDSHAKE_FRAME_BYTES = 1 << 16


def new_channel_key() -> bytes:
    return secrets.token_bytes(KEY_BYTES)


async def greet_replica(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, ingress_id: str
) -> Welcome:
    """The ingress's side. Raises AuthenticationError if the replica does not hold the key."""
    hello = ClientHello(PROTOCOL_VERSION, secrets.token_bytes(NONCE_BYTES), ingress_id)
    write_frame(writer, encode(hello))
    answer = decode_handshake(await read_frame(reader, MAX_HANDSHAKE_FRAME_BYTES), ServerHello)
    if not hmac.compare_digest(answer.proof, _proof(key, b"replica", hello, answer.nonce)):
        raise AuthenticationError("the replica does not hold the channel key")
    write_frame(writer, encode(ClientProof(_proof(key, b"ingress", hello, answer.nonce))))
    return decode_handshake(await read_frame(reader, MAX_HANDSHAKE_FRAME_BYTES), Welcome)


async def greet_ingress(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes, welcome: Welcome
) -> str:
    """The replica's side; returns the ingress's name. Raises AuthenticationError, ChannelError."""
    hello = decode_handshake(await read_frame(reader, MAX_HANDSHAKE_FRAME_BYTES), ClientHello)
    if hello.version != PROTOCOL_VERSION:
        raise ChannelError(f"protocol version {hello.version}, this is {PROTOCOL_VERSION}")
    if len(hello.nonce) != NONCE_BYTES:
        raise FrameError(f"a nonce has {NONCE_BYTES} bytes")
    nonce = secrets.token_bytes(NONCE_BYTES)
    write_frame(writer, encode(ServerHello(nonce, _proof(key, b"replica", hello, nonce))))
    answer = decode_handshake(await read_frame(reader, MAX_HANDSHAKE_FRAME_BYTES), ClientProof)
    if not hmac.compare_digest(answer.proof, _proof(key, b"ingress", hello, nonce)):
        raise AuthenticationError("the ingress does not hold the channel key")
    write_frame(writer, encode(welcome))
    return hello.ingress_id


def _proof(key: bytes, role: bytes, hello: ClientHello, server_nonce: bytes) -> bytes:
    message = b"|".join(
        (b"tessera-channel", role, hello.nonce.hex().encode(), server_nonce.hex().encode())
    )
    return hmac.digest(key, message + b"|" + hello.ingress_id.encode(), "sha256")
