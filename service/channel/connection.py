"""The replica's end of one ingress connection: its live requests and its bounded outbox.

Runs on the channel's event loop only. Knows nothing of other connections.
"""

import asyncio
import time
from dataclasses import dataclass

from service.channel.framing import LENGTH_BYTES, FrameWriter
from service.channel.messages import ReplicaLoad, StepFrame, encode
from service.channel.settings import ChannelSettings
from service.channel.silence import Silence
from workers.engine.protocol import EngineStats, FinishReason, OutputError, StepOutput
from workers.errors import ErrorCode


@dataclass(slots=True)
class LiveRequest:
    """A request of a connection. engine_id is unique over all connections and all time."""

    connection: "IngressConnection"
    request_id: str
    engine_id: str
    arrived_s: float


class IngressConnection:
    """live maps the ingress's request ids to requests that have not ended."""

    def __init__(
        self, ingress_id: str, writer: asyncio.StreamWriter, settings: ChannelSettings
    ) -> None:
        self.ingress_id = ingress_id
        self.live: dict[str, LiveRequest] = {}
        self.seen_sequence = 0
        self._silence = Silence(settings.look_interval_s, time.monotonic())
        self._writer = FrameWriter(writer)
        self._settings = settings
        self._last_load_s = 0.0
        self._is_draining_told = False

    @property
    def is_overfull(self) -> bool:
        """True when the ingress leaves more unread than it may."""
        return self._writer.num_unread_bytes > self._settings.max_outbox_bytes

    def on_heard(self) -> None:
        """The ingress has said something."""
        self._silence.on_heard(time.monotonic())

    def look_if_silent(self) -> bool:
        """True when the ingress has said nothing for the heartbeat timeout. See Silence."""
        return self._silence.look(time.monotonic()) > self._settings.heartbeat_timeout_s

    def send(
        self,
        outputs: list[StepOutput],
        engine_s: dict[str, float],
        stats: EngineStats,
        is_draining: bool,
    ) -> None:
        """Queue one frame, with the load if it is due. Never waits."""
        now = time.monotonic()
        is_due = now - self._last_load_s >= self._settings.load_interval_s
        load = None
        if is_due or not outputs or is_draining is not self._is_draining_told:
            load = ReplicaLoad(stats, self.seen_sequence, is_draining)
            self._last_load_s = now
            self._is_draining_told = is_draining
        self._send_frame(StepFrame(outputs, engine_s, load))

    def is_load_due(self, now: float) -> bool:
        return now - self._last_load_s >= self._settings.heartbeat_interval_s

    def close(self) -> None:
        """Drop the connection at once, with whatever is still unsent."""
        self._writer.abort()

    async def finish(self) -> None:
        """Close after everything queued was sent or the peer has gone."""
        await self._writer.finish()

    def _send_frame(self, frame: StepFrame) -> None:
        body = encode(frame)
        if len(body) + LENGTH_BYTES <= self._settings.max_frame_bytes:
            self._writer.write(body)
        elif len(frame.outputs) > 1:
            middle = len(frame.outputs) // 2
            self._send_frame(_part(frame, frame.outputs[:middle], frame.load))
            self._send_frame(_part(frame, frame.outputs[middle:], None))
        else:
            self._send_frame(StepFrame([_too_large(frame.outputs[0])], frame.engine_s, frame.load))


def _part(frame: StepFrame, outputs: list[StepOutput], load: ReplicaLoad | None) -> StepFrame:
    ended = {o.request_id for o in outputs if o.finish_reason is not None}
    return StepFrame(outputs, {k: v for k, v in frame.engine_s.items() if k in ended}, load)


def _too_large(output: StepOutput) -> StepOutput:
    message = "the output of one step exceeds the channel's frame limit; ask for fewer logprobs"
    return StepOutput(
        request_id=output.request_id,
        token_ids=[],
        finish_reason=FinishReason.ERROR,
        error=OutputError(ErrorCode.INVALID_REQUEST, message),
    )
