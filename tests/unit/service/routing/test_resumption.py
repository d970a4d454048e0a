"""When a request that every replica refuses is sent again."""

from service.routing.resumption import retry_delay_s


def test_the_time_between_two_tries_grows_up_to_two_seconds():
    for number, most_s in ((1, 0.1), (2, 0.2), (5, 1.6), (6, 2.0), (10_000, 2.0)):
        assert most_s / 2 <= retry_delay_s(number) <= most_s
