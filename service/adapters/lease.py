"""Which ingress watches a model's folder of adapters: one. Others wait for it to fall silent."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FolderClaim:
    """That an ingress is to watch a model's folder for for_s. device: of the file system on which
    it has seen adapters there, None where it has not; a number of its node's own."""

    model: str
    ingress_id: str
    node_id: str
    for_s: float
    device: int | None = None


@dataclass(frozen=True, slots=True)
class FolderLease:
    """Of whom a folder is now. device: on which adapters were seen there last by an ingress of the
    same node, None where none has."""

    has_it: bool
    device: int | None = None


class FolderLeases:
    """The registry's own, by model. grace_s: before that none is given, as ingresses first tell a
    registry that starts anew what its predecessor knew."""

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin_s = clock() + grace_s
        self._leases: dict[str, tuple[str, float]] = {}
        self._devices: dict[tuple[str, str], int] = {}

    def take(self, claim: FolderClaim) -> FolderLease:
        """What comes of it; to be repeated."""
        now_s = self._clock()
        if now_s < self._begin_s:
            return FolderLease(has_it=False)
        holder, end_s = self._leases.get(claim.model, (claim.ingress_id, now_s))
        if holder != claim.ingress_id and now_s < end_s:
            return FolderLease(has_it=False)
        self._leases[claim.model] = claim.ingress_id, now_s + claim.for_s
        place = claim.model, claim.node_id
        if claim.device is not None:
            self._devices[place] = claim.device
        return FolderLease(True, self._devices.get(place))
