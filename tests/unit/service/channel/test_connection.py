"""The replica's end of a connection: when a frame carries the load."""

from service.channel.connection import IngressConnection
from service.channel.framing import LENGTH_BYTES
from service.channel.messages import decode_step_frame
from service.channel.settings import ChannelSettings
from workers.protocol import EngineStats, StepOutput


class Writer:
    """Keeps frames instead of sending them."""

    def __init__(self):
        self.frames = []

    def writelines(self, parts):
        self.write(b"".join(parts))

    def write(self, data):
        self.frames.append(decode_step_frame(data[LENGTH_BYTES:]))


def sent(connection, writer, has_output=True, is_draining=False):
    outputs = [StepOutput("r", [1])] if has_output else []
    connection.send(outputs, {}, EngineStats(num_steps=3), is_draining)
    return writer.frames[-1].load


def test_the_load_is_told_when_it_is_due_when_nothing_else_is_and_when_a_drain_begins():
    writer = Writer()
    settings = ChannelSettings(load_interval_s=3600.0)
    connection = IngressConnection("in", writer, settings)
    connection._last_load_s = -7200.0
    connection.seen_sequence = 5
    first = sent(connection, writer)
    assert (first.seen_sequence, first.stats.num_steps, first.is_draining) == (5, 3, False)
    assert sent(connection, writer) is None, "not due again"
    assert sent(connection, writer, has_output=False) is not None, "a heartbeat always says it"
    assert sent(connection, writer, is_draining=True).is_draining
    assert sent(connection, writer, is_draining=True) is None, "it has been told"
