"""One ingress watches a folder, and another one when it has fallen silent."""

from service.adapters.lease import FolderClaim, FolderLease, FolderLeases


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


def has_it(leases, model, ingress_id):
    return leases.take(FolderClaim(model, ingress_id, "node", 20.0)).has_it


def test_one_holds_it_until_it_falls_silent() -> None:
    clock = Clock()
    leases = FolderLeases(5.0, clock)
    assert not has_it(leases, "m", "a")
    clock.now_s = 105.0
    assert has_it(leases, "m", "a")
    assert not has_it(leases, "m", "b")
    assert has_it(leases, "n", "b")
    clock.now_s = 120.0
    assert has_it(leases, "m", "a")
    clock.now_s = 139.0
    assert not has_it(leases, "m", "b")
    clock.now_s = 140.0
    assert has_it(leases, "m", "b")
    assert not has_it(leases, "m", "a")


def test_who_has_it_next_learns_where_adapters_were_on_its_node() -> None:
    clock = Clock()
    leases = FolderLeases(0.0, clock)
    first = leases.take(FolderClaim("m", "a", "node", 5.0))
    assert first == FolderLease(has_it=True, device=None)
    assert leases.take(FolderClaim("m", "a", "node", 5.0, 7)).device == 7
    assert leases.take(FolderClaim("m", "b", "node", 5.0)) == FolderLease(has_it=False)
    clock.now_s += 5.0
    assert leases.take(FolderClaim("m", "b", "node", 5.0)) == FolderLease(has_it=True, device=7)
    assert leases.take(FolderClaim("n", "b", "node", 5.0)).device is None
    clock.now_s += 5.0
    assert leases.take(FolderClaim("m", "c", "other", 5.0)) == FolderLease(has_it=True, device=None)
