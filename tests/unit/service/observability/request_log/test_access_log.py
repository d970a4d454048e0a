"""The access log's thread: batches, order, a bound, nothing lost at the end."""

import logging
import threading
import time

import pytest

from service.observability.request_log.access_log import AccessLog, access_fields
from service.observability.request_log.formatting import FIELDS
from service.observability.request_log.record import MAX_KEPT_MOVES, RequestRecord, RouteTimes


class Lines(logging.Handler):
    """Keeps records and the threads that brought them; can be held up as a full pipe would."""

    def __init__(self):
        super().__init__()
        self.records = []
        self.threads = set()
        self.may_write = threading.Event()
        self.may_write.set()

    def emit(self, record):
        self.may_write.wait(120)
        self.threads.add(threading.current_thread())
        self.records.append(record)

    @property
    def ids(self):
        return [getattr(record, FIELDS)["request_id"] for record in self.records]


@pytest.fixture
def lines():
    handler = Lines()
    logger = logging.getLogger("service.observability.request_log.access_log")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield handler
    handler.may_write.set()
    logger.removeHandler(handler)


def ended(number):
    record = RequestRecord(str(number), "http", "POST")
    record.ended_s = time.monotonic()
    return record


def wait_for(condition):
    end_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end_s
        time.sleep(0.001)


def test_lines_are_written_in_order_by_another_thread(lines):
    log = AccessLog(interval_s=0.01)
    for number in range(500):
        log.add(ended(number))
    wait_for(lambda: len(lines.records) == 500)
    log.add(ended(500))
    wait_for(lambda: len(lines.records) == 501)
    assert lines.ids == [str(number) for number in range(501)]
    assert threading.main_thread() not in lines.threads
    log.close()


def test_a_line_has_the_time_of_the_end_of_its_request(lines):
    log = AccessLog(interval_s=0.2)
    record = ended(1)
    log.add(record)
    wait_for(lambda: lines.records)
    assert lines.records[0].created == pytest.approx(record.unix_ns(record.ended_s) / 1e9)
    log.close()


def test_closing_writes_what_waits_and_ends_the_thread(lines):
    others = set(threading.enumerate())
    log = AccessLog(interval_s=60)
    log.add(ended(1))
    log.close()
    assert lines.ids == ["1"]
    started = set(threading.enumerate()) - others
    assert "access-log" not in {thread.name for thread in started}
    AccessLog().close()


def test_a_reader_that_is_stuck_stops_nobody_and_holds_a_bounded_number(lines, caplog):
    lines.may_write.clear()
    log = AccessLog(interval_s=0.0, max_waiting=10)
    started_s = time.monotonic()
    for number in range(1000):
        log.add(ended(number))
    assert time.monotonic() - started_s < 60, "the reader is stuck for 120 s"
    lines.may_write.set()
    log.close()
    written = [record for record in lines.records if hasattr(record, FIELDS)]
    dropped = [record.args[0] for record in lines.records if not hasattr(record, FIELDS)]
    assert len(written) + sum(dropped) == 1000
    assert len(written) < 50


def test_a_line_says_how_often_its_request_was_moved():
    record = RequestRecord(request_id="r")
    record.add_route(RouteTimes("a", "prefix", 0.0, 0.1))
    assert "num_moves" not in access_fields(record)
    for reason in ("lost", "drain"):
        record.add_route(RouteTimes("b", reason, 0.2, 0.3, is_move=True))
    assert access_fields(record)["num_moves"] == 2


def test_a_record_keeps_so_many_moves_and_counts_them_all():
    record = RequestRecord()
    record.add_route(RouteTimes("first", "only", 0.0, 0.0))
    for number in range(1000):
        record.add_route(RouteTimes(str(number), "refused", 0.0, 0.0, is_move=True))
    record.add_route(RouteTimes("of another choice", "only", 0.0, 0.0))
    assert record.num_moves == 1000
    assert len(record.routes) == MAX_KEPT_MOVES + 2
