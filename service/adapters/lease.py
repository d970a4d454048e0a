"""Which ingress watches a model's folder of adapters: one. Others wait for it to fall silent."""

from collections.abc import Callable


class FolderLeases:
    """The registry's own, by model. grace_s: before that none is given, as ingresses first tell a
    registry that starts anew what its predecessor knew."""

    def __init__(self, grace_s: float, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._begin_s = clock() + grace_s
        self._leases: dict[str, tuple[str, float]] = {}

    def take(self, model: str, ingress_id: str, for_s: float) -> bool:
        """Whether the ingress has it, now for for_s; to be repeated."""
        now_s = self._clock()
        if now_s < self._begin_s:
            return False
        holder, end_s = self._leases.get(model, (ingress_id, now_s))
        if holder != ingress_id and now_s < end_s:
            return False
        self._leases[model] = ingress_id, now_s + for_s
        return True
