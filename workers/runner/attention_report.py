"""What measuring attention led to, as records and as lines for people."""

import logging
from collections.abc import Sequence

from attention.timing import AttentionPhase
from attention.tuning.choice import TunedRoutes
from workers.engine.protocol import AttentionMeasurementRecord

logger = logging.getLogger(__name__)


def measurement_records(tuned: TunedRoutes) -> tuple[AttentionMeasurementRecord, ...]:
    """Every time of a candidate, of one layer, and whether it is taken for such steps."""
    return tuple(
        AttentionMeasurementRecord(
            phase=point.phase.value,
            rows=point.rows,
            new_tokens=point.new_tokens,
            prefix_tokens=point.prefix_tokens,
            is_uneven=point.is_uneven,
            backend=name,
            seconds=seconds / tuned.num_layers,
            is_chosen=tuned.choose(point).name == name,
        )
        for point, at in sorted(tuned.table.seconds.items())
        for name, seconds in at.items()
    )


def tell(tuned: TunedRoutes) -> None:
    logger.info("attention backend %s, page size %d", tuned, tuned.candidates.page_size)
    for phase, names in tuned.chosen.items():
        for line in phase_summary(tuned, phase, names):
            logger.info("  %s", line)
    for one in tuned.left_out:
        logger.info("  not %s in %s: %s", one.name, one.phase, one.reason)


def phase_summary(
    tuned: TunedRoutes, phase: AttentionPhase, names: Sequence[str]
) -> tuple[str, ...]:
    """A line for each backend that is taken: where, and what its rivals took there."""
    points = [point for point in sorted(tuned.table.seconds) if point.phase is phase]
    if not points:
        return (f"{phase}: {', '.join(names)}, the only candidate; nothing was measured",)
    lines = []
    for name in names:
        won = [point for point in points if tuned.choose(point).name == name]
        if won:
            point = won[len(won) // 2]
            reason = tuned.table.choose(point).reason(tuned.num_layers)
            of = f"{len(won)} of {len(points)} kinds of steps"
            lines.append(f"{phase}: {name} in {of}, as {point}: {reason} a layer")
    return tuple(lines)
