"""Sends raw exchanges over sockets and judges what came back."""

import random
import re
import socket
import struct
import time

from tests.integration.fuzz.busy_machine import ANSWER as BUSY
from tests.integration.fuzz.busy_machine import MESSAGE
from tests.integration.fuzz.raw_requests import HTTP_MAKERS, Exchange, grpc_port_nonsense
from tests.integration.fuzz.tally import Tally

HTTP = "http by raw bytes"
GRPC = "grpc by raw bytes"
EXCHANGES_PER_BATCH = 15
# An answer to what is complete comes at once; what is not complete gets none.
_QUIET_S = 1.0
_WHOLE_S = 60.0
# No JSON holds a line break, so no body has one of these.
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3}) [^\r\n]*\r\n")
_OK = b"200"


class RawFuzzer:
    """One connection an exchange."""

    def __init__(self, model: str, http_port: int, grpc_port: int, tally: Tally, seed: int) -> None:
        self._model = model
        self._http_port = http_port
        self._grpc_port = grpc_port
        self._tally = tally
        self._random = random.Random(seed)

    def run_batch(self) -> None:
        for _ in range(EXCHANGES_PER_BATCH):
            if self._random.random() < 0.15:
                exchange = grpc_port_nonsense(self._random, self._model)
                send(self._grpc_port, exchange)
                self._tally.count(GRPC, "sent")
                continue
            maker = self._random.choice(HTTP_MAKERS)
            exchange = maker(self._random, self._model)
            self._judge(maker.__name__, exchange, send(self._http_port, exchange))

    def _judge(self, name: str, exchange: Exchange, received: bytes) -> None:
        statuses = [status.decode() for status in _STATUS.findall(received)]
        if statuses[-1:] == ["503"] and MESSAGE.encode() in received:
            self._tally.count(HTTP, BUSY)
            return
        for status in statuses or ["none"]:
            self._tally.count(HTTP, status)
            if status.startswith("5"):
                self._tally.fail(HTTP, f"{name}: {received[:500]!r} to {exchange.parts[0][:300]!r}")
        if exchange.num_answers is not None and statuses.count("200") != exchange.num_answers:
            text = f"{name}: {exchange.num_answers} answers wanted, {statuses} came"
            self._tally.fail(HTTP, f"{text}: {received[:500]!r}")


def send(port: int, exchange: Exchange) -> bytes:
    """What came back until the other end closed, was quiet, or had given every answer wanted."""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        try:
            for part in exchange.parts:
                connection.sendall(part)
                time.sleep(exchange.pause_s)
        except OSError:
            pass  # it was cut off while it still sent, which is an answer too
        if exchange.leaves:
            # A reset instead of an orderly end.
            linger = struct.pack("ii", 1, 0)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            return b""
        return _receive(connection, exchange)


def _receive(connection: socket.socket, exchange: Exchange) -> bytes:
    received = b""
    end_s = time.monotonic() + _WHOLE_S
    connection.settimeout(_QUIET_S)
    while time.monotonic() < end_s:
        try:
            data = connection.recv(1 << 16)
        except TimeoutError:
            if not exchange.num_answers or _num_ok(received) >= exchange.num_answers:
                return received
            continue
        except OSError:
            return received
        if not data:
            return received
        received += data
    return received


def _num_ok(received: bytes) -> int:
    return _STATUS.findall(received).count(_OK)
