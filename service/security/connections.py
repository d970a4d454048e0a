"""Ceilings and deadlines of connections, before anybody knows who is at the other end.

Of each ingress process. Knows no socket and no server.
"""

from pydantic import BaseModel, ConfigDict, Field

_UNREAD_BYTES = 16 << 10


class HttpConnectionLimits(BaseModel):
    """What a connection to the HTTP port may hold, and for how long.

    max_connections: beyond it the one that has waited longest without a request gives way; when
    all have one, new ones are answered 503. head_timeout_s: from a head's first byte to its last.
    A body has body_timeout_s and a second for every min_bytes_per_s that it has brought; time
    during which the server does not read counts in neither. write_timeout_s: a client that has
    answers to read must take min_bytes_per_s on average of so long.
    tls_handshake_timeout_s: from the connection to the end of its handshake.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_connections: int = Field(default=4096, ge=1)
    head_timeout_s: float = Field(default=20.0, gt=0)
    body_timeout_s: float = Field(default=30.0, gt=0)
    write_timeout_s: float = Field(default=60.0, gt=0)
    min_bytes_per_s: int = Field(default=1024, ge=1)
    tls_handshake_timeout_s: float = Field(default=10.0, gt=0)


class GrpcConnectionLimits(BaseModel):
    """What a connection to the gRPC port may hold, and for how long.

    max_connections: from three quarters on, those without a call of a known caller give way; beyond
    it new ones are closed as they come. max_streams_per_connection: calls of one
    connection at once; its client keeps further ones waiting. handshake_timeout_s: from the
    connection to its first HTTP/2 settings, TLS included. keepalive_interval_s: of pings to a
    quiet connection, which is closed if one is not answered within keepalive_timeout_s.
    min_ping_interval_s: a client that pings more often three times is told to calm down and
    closed. max_idle_s: of a connection without calls. max_age_s: then its client is told to come
    anew for its next call; calls under way go on for as long as they last. receive_timeout_s: of a
    call's message. write_timeout_s: for which a client may leave no room for the next answer.

    Side streams are calls of health and reflection, which need no key or none of ours.
    max_side_streams: of all connections; one more ends the oldest. A quarter as many calls that
    have ended may wait for their clients to read so; then connections with the most are closed.
    max_side_stream_age_s: then its client has to ask again.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    max_connections: int = Field(default=1024, ge=1)
    max_streams_per_connection: int = Field(default=1024, ge=1)
    handshake_timeout_s: float = Field(default=10.0, gt=0)
    keepalive_interval_s: float = Field(default=60.0, gt=0)
    keepalive_timeout_s: float = Field(default=20.0, gt=0)
    min_ping_interval_s: float = Field(default=10.0, gt=0)
    max_idle_s: float = Field(default=600.0, gt=0)
    max_age_s: float = Field(default=3600.0, gt=0)
    receive_timeout_s: float = Field(default=60.0, gt=0)
    write_timeout_s: float = Field(default=60.0, gt=0)
    max_side_streams: int = Field(default=512, ge=1)
    max_side_streams_per_connection: int = Field(default=32, ge=1)
    max_side_stream_age_s: float = Field(default=3600.0, gt=0)

    def to_grpc_options(self) -> tuple[tuple[str, int], ...]:
        """Arguments of a gRPC server."""
        return (
            ("grpc.max_allowed_incoming_connections", self.max_connections),
            ("grpc.max_concurrent_streams", self.max_streams_per_connection),
            ("grpc.server_handshake_timeout_ms", _to_ms(self.handshake_timeout_s)),
            ("grpc.keepalive_time_ms", _to_ms(self.keepalive_interval_s)),
            ("grpc.keepalive_timeout_ms", _to_ms(self.keepalive_timeout_s)),
            # Of one ping; the timeout above is of one that nothing at all comes after.
            ("grpc.http2.ping_timeout_ms", _to_ms(self.keepalive_timeout_s)),
            ("grpc.keepalive_permit_without_calls", 1),
            (
                "grpc.http2.min_ping_interval_without_data_ms",
                _to_ms(self.min_ping_interval_s),
            ),
            ("grpc.http2.max_ping_strikes", 2),
            ("grpc.max_connection_idle_ms", _to_ms(self.max_idle_s)),
            # What a client may send before anybody reads it, of each stream. A message that is
            # being read has room for all of it, whatever its size.
            ("grpc.http2.lookahead_bytes", _UNREAD_BYTES),
            ("grpc.http2.bdp_probe", 0),
            # Without a max_connection_age_grace calls may outlive their connection's age.
            ("grpc.max_connection_age_ms", _to_ms(self.max_age_s)),
        )


def _to_ms(seconds: float) -> int:
    return max(1, round(seconds * 1e3))
