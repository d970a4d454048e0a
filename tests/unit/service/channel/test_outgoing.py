"""In what turns, in what order and under what numbers requests leave for a replica."""

import msgspec

from service.channel.outgoing import TOKEN_BYTES, TURN_BYTES, Outgoing
from workers.engine.encoder_input import SourceFeatures
from workers.engine.pixels import ImagePixels
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams


def plain(name):
    return GenerateRequest(name, [5], SamplingParams())


def with_image(name, num_bytes):
    item = ImagePixels(b"d" * 16, 2, 2, 2, b"", bytes(num_bytes))
    return msgspec.structs.replace(plain(name), media=[item])


def with_sound(name, num_bytes):
    sound = SourceFeatures(1, num_bytes // 4, bytes(num_bytes))
    return msgspec.structs.replace(plain(name), encoder_input=sound)


def turn(outgoing):
    names = [request.request_id for request in outgoing.next_requests()]
    return names, outgoing.sequence, outgoing.next_aborts()


def test_requests_of_a_tick_are_one_message_and_aborts_come_behind_them():
    outgoing = Outgoing()
    assert [outgoing.submit(plain(name)) for name in "ab"] == [1, 1]
    outgoing.abort("a")
    assert outgoing
    assert turn(outgoing) == (["a", "b"], 1, ["a"])
    assert not outgoing
    assert turn(outgoing) == ([], 1, [])
    assert outgoing.submit(plain("c")) == 2


def test_large_requests_have_turns_of_their_own_under_the_number_that_was_said():
    outgoing = Outgoing()
    large = with_image("large", TURN_BYTES - 2 * TOKEN_BYTES)
    requests = [
        plain("a"),
        large,
        with_sound("sound", TURN_BYTES - 3 * TOKEN_BYTES),
        plain("b"),
        plain("c"),
    ]
    assert {outgoing.submit(request) for request in requests} == {1}
    outgoing.abort("a")
    assert turn(outgoing) == (["a", "large"], 1, [])
    assert outgoing.submit(plain("late")) == 2
    outgoing.abort("late")
    assert turn(outgoing) == (["sound", "b", "c"], 1, [])
    assert turn(outgoing) == (["late"], 2, ["a", "late"])
    assert not outgoing
