"""How a step's plan reaches the follower ranks: one UNIX socket each, raw frames, no pickle.

multiprocessing.connection does the framing and the HMAC handshake; only its byte methods are used.
An empty frame asks for one piece of preparation.
"""

import contextlib
import logging
import os
import secrets
import select
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path

from workers.constraints.masks import StepMasks
from workers.errors import EngineFailedError
from workers.scheduler.plan import (
    StepPlan,
    make_masks_decoder,
    make_plan_decoder,
    make_plan_encoder,
)

logger = logging.getLogger(__name__)

AUTH_KEY_BYTES = 32
_PREPARE = b""
MAX_FRAME_BYTES = 256 << 20


def make_auth_key() -> bytes:
    return secrets.token_bytes(AUTH_KEY_BYTES)


class PlanSender:
    """Rank 0's end: broadcasts plans and notices followers that go away.

    on_lost is called once, on a watcher thread, with the rank whose connection ended first.
    """

    def __init__(self, socket_path: Path, auth_key: bytes) -> None:
        self._address = str(socket_path)
        self._listener = Listener(self._address, family="AF_UNIX", authkey=auth_key)
        self._connections: dict[int, Connection[bytes, bytes]] = {}
        self._encoder = make_plan_encoder()
        self._is_closing = False
        self._lost = threading.Lock()

    def accept(self, num_followers: int, on_lost: Callable[[int], None]) -> None:
        """Wait for every follower, then watch them; or return when this end is closed."""
        while len(self._connections) < num_followers:
            try:
                connection = self._listener.accept()
                rank = int.from_bytes(connection.recv_bytes(4), "little")
            except (AuthenticationError, EOFError, OSError) as error:
                if self._is_closing:
                    return
                if isinstance(error, OSError) and not isinstance(error, ConnectionError):
                    raise
                logger.warning("somebody came to the plan channel who is no rank: %s", error)
                continue
            self._connections[rank] = connection
        for rank, connection in self._connections.items():
            threading.Thread(
                target=self._watch,
                args=(rank, connection, on_lost),
                name=f"tessera-rank-{rank}-watch",
                daemon=True,
            ).start()

    @property
    def num_followers(self) -> int:
        """How many have come."""
        return len(self._connections)

    def send(self, plan: StepPlan) -> None:
        """Send one plan to every follower. Raises EngineFailedError if one is gone."""
        self._send_frame(self._encoder.encode(plan))

    def send_masks(self, masks: StepMasks) -> None:
        """Send what the last plan's samples wait for. Raises as send does."""
        self._send_frame(self._encoder.encode(masks))

    def send_prepare(self) -> None:
        """Have every follower prepare for later steps. Raises as send does."""
        self._send_frame(_PREPARE)

    def _send_frame(self, frame: bytes) -> None:
        for rank, connection in self._connections.items():
            try:
                connection.send_bytes(frame)
            except OSError as error:
                raise EngineFailedError(f"rank {rank} is gone: {error}") from error

    def close(self) -> None:
        self._is_closing = True
        for connection in self._connections.values():
            # A watcher waits on the connection, which therefore outlives its close.
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(connection.fileno())) as s,
            ):
                s.shutdown(socket.SHUT_RDWR)
            connection.close()
        # An accept under way in another thread does not notice that its socket is closed.
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as caller:
            caller.connect(self._address)
        self._listener.close()

    def _watch(
        self, rank: int, connection: "Connection[bytes, bytes]", on_lost: Callable[[int], None]
    ) -> None:
        # A follower never sends after its greeting: whatever ends this wait is its end.
        with contextlib.suppress(EOFError, OSError):
            connection.recv_bytes(1)
        if not self._is_closing and self._lost.acquire(blocking=False):
            on_lost(rank)


class Preparation:
    """What a follower receives instead of a plan when it is to prepare for later ones."""


class PlanReceiver:
    """A follower's end."""

    def __init__(self, socket_path: Path, auth_key: bytes, rank: int) -> None:
        self._connection = Client(str(socket_path), family="AF_UNIX", authkey=auth_key)
        self._connection.send_bytes(rank.to_bytes(4, "little"))
        self._decoder = make_plan_decoder()
        self._masks_decoder = make_masks_decoder()
        self._masks: StepMasks | None = None

    def receive(self) -> StepPlan | Preparation | None:
        """The next plan, or None when rank 0 has closed or died."""
        try:
            frame = self._connection.recv_bytes(MAX_FRAME_BYTES)
        except (EOFError, ConnectionError):
            return None
        return self._decoder.decode(frame) if frame else Preparation()

    def wait(self, step_id: int) -> StepMasks:
        """The masks of the plan received last, as often as they are asked for. A MaskSource.

        Raises EngineFailedError when rank 0 has closed or died.
        """
        if self._masks is None or self._masks.step_id != step_id:
            try:
                frame = self._connection.recv_bytes(MAX_FRAME_BYTES)
            except (EOFError, ConnectionError) as error:
                raise EngineFailedError("rank 0 is gone, a step waits for masks") from error
            self._masks = self._masks_decoder.decode(frame)
            if self._masks.step_id != step_id:
                raise EngineFailedError(f"step {step_id} got masks of {self._masks.step_id}")
        return self._masks

    def wait_for_hang_up(self) -> None:
        """Return when rank 0 has closed or died, whatever it sent before. For another thread."""
        watched = select.poll()
        watched.register(self._connection.fileno(), select.POLLRDHUP)
        watched.poll()

    def close(self) -> None:
        self._connection.close()
