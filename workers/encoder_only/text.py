"""One text, or one pair of texts, on its way through an engine."""

from dataclasses import dataclass

from workers.kv_cache.radix_node import IntArray
from workers.pooling.params import PoolingParams


@dataclass(slots=True, eq=False)
class Text:
    """token_ids: int32 (n,). second_start: where the second text of a pair begins, 0 where there is
    one. submitted_s: on the engine's clock."""

    request_id: str
    token_ids: IntArray
    second_start: int
    pooling: PoolingParams
    priority: int
    arrival: int
    submitted_s: float

    @property
    def sort_key(self) -> tuple[int, int]:
        """The smaller runs first; total, because no two arrivals are equal."""
        return self.priority, self.arrival
