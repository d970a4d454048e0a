"""What is lost when: the head alone, an engine after its return, and others while it is away."""

from collections.abc import Iterator, Sequence

from tests.integration.chaos.kills import KillKind

_FIRST_S = 3.0
_STEP_S = 2.0
_WHILE_AWAY = (
    KillKind.ENGINE,
    KillKind.REGISTRY,
    KillKind.METRICS,
    KillKind.INGRESS,
    KillKind.STOP,
    KillKind.RANK,
)
LOSSES = {
    "HEAD": (KillKind.HEAD,),
    "ENGINE": (KillKind.ENGINE,),
    "HEAD_AND_OTHERS": (KillKind.HEAD, *_WHILE_AWAY),
}


def plan_losses(names: Sequence[str], between_s: float) -> Iterator[tuple[float, KillKind]]:
    """Seconds to wait and what to kill then. names: of LOSSES, between_s apart."""
    for number, name in enumerate(names):
        first, *others = LOSSES[name]
        yield (between_s if number else _FIRST_S), first
        for kind in others:
            yield _STEP_S, kind
