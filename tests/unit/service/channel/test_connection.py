"""The replica's end of a connection: when a frame carries the load."""

from service.channel.connection import IngressConnection
from service.channel.framing import LENGTH_BYTES
from service.channel.messages import decode_step_frame
from service.channel.settings import ChannelSettings
from workers.engine.protocol import EngineStats, FinishReason, StepOutput
from workers.errors import ErrorCode


class Writer:
    """Keeps frames instead of sending them."""

    def __init__(self):
        self.frames = []
        self.sizes_bytes = []

    def is_closing(self):
        return False

    def writelines(self, parts):
        self.write(b"".join(parts))

    def write(self, data):
        self.frames.append(decode_step_frame(data[LENGTH_BYTES:]))
        self.sizes_bytes.append(len(data))


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


def test_a_beat_is_due_when_the_load_was_last_told_an_interval_ago():
    connection = IngressConnection("in", Writer(), ChannelSettings(heartbeat_interval_s=2.0))
    connection._last_load_s = 10.0
    assert [connection.is_load_due(now_s) for now_s in (11.9, 12.0, 13.0)] == [False, True, True]


def ended(request_id, num_tokens=1):
    return StepOutput(request_id, [1 << 20] * num_tokens, FinishReason.LENGTH)


def written(outputs, max_frame_bytes=1 << 10):
    writer = Writer()
    connection = IngressConnection("in", writer, ChannelSettings(max_frame_bytes=max_frame_bytes))
    engine_s = {output.request_id: float(i) for i, output in enumerate(outputs)}
    connection.send(outputs, engine_s, EngineStats(num_steps=3), is_draining=True)
    return writer.frames


def test_a_step_longer_than_a_frame_is_split_and_every_end_keeps_its_time():
    outputs = [ended(f"r{i}", num_tokens=120) for i in range(5)]
    frames = written(outputs)
    assert [output for frame in frames for output in frame.outputs] == outputs
    assert len(frames) == 5
    for i, frame in enumerate(frames):
        assert frame.engine_s == {f"r{i}": float(i)}


def test_two_outputs_that_do_not_fit_together_go_one_by_one_and_the_load_goes_once():
    frames = written([ended("a", num_tokens=120), ended("b", num_tokens=120)])
    assert [[output.request_id for output in frame.outputs] for frame in frames] == [["a"], ["b"]]
    assert frames[0].load.stats.num_steps == 3
    assert frames[1].load is None


def test_one_output_longer_than_a_frame_ends_its_request_with_an_error():
    (frame,) = written([ended("huge", num_tokens=1000)])
    (output,) = frame.outputs
    assert (output.request_id, output.token_ids) == ("huge", [])
    assert output.finish_reason is FinishReason.ERROR
    assert output.error.code is ErrorCode.INVALID_REQUEST
    assert frame.engine_s == {"huge": 0.0}
    assert frame.load.is_draining


def test_a_frame_may_be_as_long_as_the_limit():
    writer = Writer()
    connection = IngressConnection("in", writer, ChannelSettings(max_frame_bytes=1 << 20))
    connection.send([ended("r", num_tokens=300)], {}, EngineStats(), is_draining=False)
    writer.sizes_bytes.clear()
    connection.send([ended("r", num_tokens=300)], {}, EngineStats(), is_draining=False)
    (size_bytes,) = writer.sizes_bytes
    for limit_bytes, is_whole in ((size_bytes, True), (size_bytes - 1, False)):
        exact = IngressConnection("in", writer, ChannelSettings(max_frame_bytes=limit_bytes))
        exact._last_load_s = float("inf")
        exact.send([ended("r", num_tokens=300)], {}, EngineStats(), is_draining=False)
        assert (writer.frames[-1].outputs[0].error is None) is is_whole
