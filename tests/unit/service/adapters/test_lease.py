"""One ingress watches a folder, and another one when it has fallen silent."""

from service.adapters.lease import FolderLeases


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def test_one_holds_it_until_it_falls_silent() -> None:
    clock = Clock()
    leases = FolderLeases(5.0, clock)
    assert not leases.take("m", "a", 20.0)
    clock.now_s = 105.0
    assert leases.take("m", "a", 20.0)
    assert not leases.take("m", "b", 20.0)
    assert leases.take("n", "b", 20.0)
    clock.now_s = 120.0
    assert leases.take("m", "a", 20.0)
    clock.now_s = 139.0
    assert not leases.take("m", "b", 20.0)
    clock.now_s = 140.0
    assert leases.take("m", "b", 20.0)
    assert not leases.take("m", "a", 20.0)
