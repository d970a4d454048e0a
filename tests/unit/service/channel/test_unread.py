"""When a peer is left that does not read."""

from service.channel.unread import Unread


def test_a_peer_that_takes_nothing_is_left_at_the_second_look() -> None:
    unread = Unread(max_bytes=100)
    unread.add(150)
    assert not unread.look(150)
    assert unread.look(150)


def test_one_that_takes_some_of_it_is_not() -> None:
    unread = Unread(max_bytes=100)
    unread.add(1000)
    assert not any(unread.look(left) for left in range(1000, 100, -10))
    unread.add(500)
    assert not unread.look(590)


def test_little_may_lie_there_for_ever() -> None:
    unread = Unread(max_bytes=100)
    unread.add(100)
    assert not any(unread.look(100) for _ in range(9))
