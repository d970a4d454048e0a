"""What goes from rank 0 to a follower beside plans: preparation, and the end."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from workers.parallel.plan_channel import PlanReceiver, PlanSender, Preparation, make_auth_key

WAIT_S = 60.0


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[PlanSender, PlanReceiver]]:
    key = make_auth_key()
    sender = PlanSender(tmp_path / "plans.sock", key)
    accepting = threading.Thread(target=sender.accept, args=(1, lambda rank: None))
    accepting.start()
    receiver = PlanReceiver(tmp_path / "plans.sock", key, 1)
    accepting.join(WAIT_S)
    yield sender, receiver
    sender.close()
    receiver.close()


def test_a_follower_is_asked_to_prepare(ends):
    sender, receiver = ends
    sender.send_prepare()
    assert isinstance(receiver.receive(), Preparation)


def test_hang_up_is_noticed_before_what_was_sent_is_read(ends):
    sender, receiver = ends
    noticed = threading.Event()

    def watch() -> None:
        receiver.wait_for_hang_up()
        noticed.set()

    threading.Thread(target=watch, daemon=True).start()
    sender.send_prepare()
    assert not noticed.wait(0.2)
    sender.close()
    assert noticed.wait(WAIT_S)
    assert isinstance(receiver.receive(), Preparation)
    assert receiver.receive() is None
