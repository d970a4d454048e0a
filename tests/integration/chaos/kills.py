"""What is killed when: a seeded plan, and the record of what each kill took along."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum


class KillKind(StrEnum):
    """STOP... are SIGSTOP, never followed by SIGCONT; the others are SIGKILL.

    STOP_START kills an engine and stops the one that Serve starts in its place. HEAD is the node
    with Ray's and Serve's control plane; only clusters that keep its state can lose it.
    """

    ENGINE = "engine replica"
    RANK = "rank"
    INGRESS = "ingress replica"
    CONTROLLER = "Serve controller"
    REGISTRY = "registry actor"
    METRICS = "metrics actor"
    RAYLET = "raylet and all on it"
    STOP = "engine stopped (hung)"
    STOP_START = "engine stopped as it starts"
    STOP_RANK = "rank stopped (hung)"
    HEAD = "head node and all on it"


# Of those that chance may choose.
WEIGHTS = {
    KillKind.ENGINE: 4,
    KillKind.RANK: 3,
    KillKind.INGRESS: 3,
    KillKind.CONTROLLER: 2,
    KillKind.REGISTRY: 2,
    KillKind.METRICS: 1,
    KillKind.RAYLET: 2,
    KillKind.STOP: 2,
    KillKind.STOP_START: 1,
    KillKind.STOP_RANK: 1,
}


@dataclass(slots=True)
class Kill:
    """at_s: time.monotonic(). Victims are counted by application name."""

    kind: KillKind
    at_s: float
    victim: str
    num_engines: dict[str, int] = field(default_factory=dict)
    num_ingresses: dict[str, int] = field(default_factory=dict)
    healed_s: float | None = None


def plan_kills(
    rng: random.Random, kinds: Sequence[KillKind], min_wait_s: float, max_wait_s: float
) -> Iterator[tuple[float, KillKind]]:
    """Seconds to wait and what to kill then, for ever. Each kind comes once before chance rules."""
    first = rng.sample(kinds, len(kinds))
    weights = [WEIGHTS[kind] for kind in kinds]
    while True:
        kind = first.pop() if first else rng.choices(kinds, weights)[0]
        yield rng.uniform(min_wait_s, max_wait_s), kind
