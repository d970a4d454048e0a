"""Every message of a channel, as msgspec structs with closed types, and their codecs.

No pickle, no free-form values: bytes that are not exactly one of these messages are refused.
"""

from typing import TypeVar

import msgspec

from service.channel.errors import FrameError
from workers.engine.protocol import EngineStats, GenerateRequest, ModelInfo, StepOutput
from workers.engine.rest import SleepOrder

PROTOCOL_VERSION = 2


class ClientHello(msgspec.Struct, frozen=True, tag="client_hello", forbid_unknown_fields=True):
    """First message of an ingress. nonce: 32 random bytes."""

    version: int
    nonce: bytes
    ingress_id: str


class ServerHello(msgspec.Struct, frozen=True, tag="server_hello", forbid_unknown_fields=True):
    """The replica's challenge and its proof that it holds the key."""

    nonce: bytes
    proof: bytes


class ClientProof(msgspec.Struct, frozen=True, tag="client_proof", forbid_unknown_fields=True):
    """The ingress's proof that it holds the key."""

    proof: bytes


class Welcome(msgspec.Struct, frozen=True, tag="welcome", forbid_unknown_fields=True):
    """The handshake is over; the ingress may submit."""

    replica_id: str
    model: ModelInfo


class Submit(msgspec.Struct, frozen=True, tag=1, array_like=True):
    """The requests of one event-loop tick. sequence counts Submit messages of a connection."""

    sequence: int
    requests: list[GenerateRequest]


class Abort(msgspec.Struct, frozen=True, tag=2, array_like=True):
    """End these requests without further output."""

    request_ids: list[str]


class Ping(msgspec.Struct, frozen=True, tag=3, array_like=True):
    """The ingress is alive and has nothing to say."""


class ReplicaLoad(msgspec.Struct, frozen=True, array_like=True):
    """The replica's load. seen_sequence: the last Submit of this connection that stats include."""

    stats: EngineStats
    seen_sequence: int
    is_draining: bool


class StepFrame(msgspec.Struct, frozen=True, tag=4, array_like=True):
    """All outputs of one engine step that belong to one ingress.

    engine_s: for each request that ends in this frame, seconds between its arrival at the replica
    and this step's end. load: at a bounded rate; a frame without outputs is a heartbeat.
    """

    outputs: list[StepOutput]
    engine_s: dict[str, float]
    load: ReplicaLoad | None = None


class SetSleep(msgspec.Struct, frozen=True, tag=5, array_like=True):
    """Sleep or wake. Only for a replica whose model has no sleep_obstacle: older ones know no such
    message."""

    order: SleepOrder


IngressMessage = Submit | Abort | Ping | SetSleep

_encoder = msgspec.msgpack.Encoder()
_ingress_decoder: msgspec.msgpack.Decoder[IngressMessage] = msgspec.msgpack.Decoder(IngressMessage)
_step_decoder = msgspec.msgpack.Decoder(StepFrame)

Handshake = ClientHello | ServerHello | ClientProof | Welcome
HandshakeT = TypeVar("HandshakeT", ClientHello, ServerHello, ClientProof, Welcome)
_handshake_decoder = msgspec.msgpack.Decoder(Handshake)


def encode(message: Handshake | IngressMessage | StepFrame) -> bytes:
    """The message's bytes, without the frame's length prefix."""
    return _encoder.encode(message)


def decode_ingress_message(body: bytes | bytearray) -> IngressMessage:
    """Raises FrameError."""
    try:
        return _ingress_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"no message of an ingress: {error}") from error


def decode_step_frame(body: bytes | bytearray) -> StepFrame:
    """Raises FrameError."""
    try:
        return _step_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"no step frame: {error}") from error


def decode_handshake(body: bytes | bytearray, expected: type[HandshakeT]) -> HandshakeT:
    """Raises FrameError if the body is anything but a message of the expected type."""
    try:
        message = _handshake_decoder.decode(body)
    except msgspec.MsgspecError as error:
        raise FrameError(f"no handshake message: {error}") from error
    if not isinstance(message, expected):
        raise FrameError(f"expected {expected.__name__}, got {type(message).__name__}")
    return message
