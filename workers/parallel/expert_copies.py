"""Which parts of the ranks keep copies of other parts' experts, so that busy experts are shared.

Every rank works out the same, from the same loads. Knows no tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExpertHolders:
    """by_expert: the parts that have an expert, its owner first."""

    by_expert: tuple[tuple[int, ...], ...]

    @classmethod
    def of_owners(cls, num_experts: int, num_parts: int) -> ExpertHolders:
        """Without copies: each part owns equally many, in order."""
        own = num_experts // num_parts
        return cls(tuple((expert // own,) for expert in range(num_experts)))

    @classmethod
    def of_loads(cls, loads: Sequence[int], num_parts: int, num_copies: int) -> ExpertHolders:
        """loads: tokens of each expert. num_copies: of all parts, each of which has room for
        equally many. A copy is of the expert whose holders get the most each, and goes to the part
        that gets the least of those that have room and not the expert; where nothing is to be
        shared, room is left."""
        holders = [list(one) for one in cls.of_owners(len(loads), num_parts).by_expert]
        room = [num_copies // num_parts] * num_parts
        for _ in range(num_copies):
            gets = _loads_of_parts(loads, holders, num_parts)
            best = max(
                (expert for expert in range(len(loads)) if _parts_for(holders[expert], room)),
                key=lambda expert: loads[expert] / len(holders[expert]),
                default=None,
            )
            if best is None or loads[best] == 0:
                break
            part = min(_parts_for(holders[best], room), key=lambda part: gets[part])
            holders[best].append(part)
            room[part] -= 1
        return cls(tuple(map(tuple, holders)))

    def copies_of(self, part: int) -> tuple[int, ...]:
        """Experts of others that the part has too."""
        return tuple(expert for expert, parts in enumerate(self.by_expert) if part in parts[1:])


def _parts_for(holders: Sequence[int], room: Sequence[int]) -> list[int]:
    return [part for part, free in enumerate(room) if free and part not in holders]


def _loads_of_parts(
    loads: Sequence[int], holders: Sequence[Sequence[int]], num_parts: int
) -> list[float]:
    gets = [0.0] * num_parts
    for load, parts in zip(loads, holders, strict=True):
        for part in parts:
            gets[part] += load / len(parts)
    return gets
