"""What auto-tuned promises, checked against timed mixes. Times nothing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED
from attention.tuning.points import StepPoint

MAX_RATIO = 1.02
_MAD_TO_DEVIATION = 1.4826
_MEDIAN_TO_MEAN_ERROR = 1.2533
"""Of normal errors: the median absolute deviation to the standard one, and a median's error to a
mean's."""


@dataclass(frozen=True, slots=True)
class Timed:
    """seconds: median over turns. error_s: its standard error, as the turns' spread tells it."""

    seconds: float
    error_s: float

    @classmethod
    def of(cls, turns: Sequence[float]) -> Timed:
        median = statistics.median(turns)
        spread = statistics.median(abs(one - median) for one in turns)
        error = _MEDIAN_TO_MEAN_ERROR * _MAD_TO_DEVIATION * spread / math.sqrt(len(turns))
        return cls(median, error)

    def __truediv__(self, other: Timed) -> Timed:
        """A ratio."""
        ratio = self.seconds / other.seconds
        shares = (self.error_s / self.seconds, other.error_s / other.seconds)
        return Timed(ratio, ratio * math.hypot(*shares))


@dataclass(frozen=True)
class MixResult:
    """turns: seconds of all layers in each turn, by candidate and of AUTO_TUNED. taken: what that
    was. predicted: what it was taken by. num_layers: of those timed."""

    mix: StepPoint
    turns: Mapping[str, Sequence[float]]
    taken: str
    predicted: str
    num_layers: int

    @cached_property
    def timed(self) -> dict[str, Timed]:
        return {name: Timed.of(own) for name, own in self.turns.items()}

    @property
    def best(self) -> str:
        fixed = (name for name in self.timed if name != AUTO_TUNED)
        return min(fixed, key=lambda name: self.timed[name].seconds)

    @property
    def ratio(self) -> Timed:
        """To the best fixed choice."""
        return self.timed[AUTO_TUNED] / self.timed[self.best]

    @property
    def is_over(self) -> bool:
        return self.ratio.seconds > MAX_RATIO

    def micros(self, name: str) -> str:
        return f"{self.timed[name].seconds / self.num_layers * 1e6:.1f}"


def mix_table(results: Sequence[MixResult]) -> str:
    lines = [
        "| mix | us a layer, by fixed choice | auto-tuned | takes | of the best |",
        "|---|---|---|---|---|",
    ]
    for one in results:
        fixed = sorted((t.seconds, name) for name, t in one.timed.items() if name != AUTO_TUNED)
        times = ", ".join(f"{name} {one.micros(name)}" for _, name in fixed)
        ratio = f"{one.ratio.seconds:.3f} ± {one.ratio.error_s:.3f}"
        lines.append(f"| {one.mix} | {times} | {one.micros(AUTO_TUNED)} | {one.taken} | {ratio} |")
    return "\n".join(lines)


@dataclass(frozen=True)
class Promises:
    """results: a mix that was above MAX_RATIO and repeated counts with its repeat."""

    results: Sequence[MixResult]

    @property
    def over(self) -> list[MixResult]:
        return [one for one in self.results if one.is_over]

    def total(self, names: Mapping[AttentionPhase, str]) -> Timed:
        """Of the mixes together, with a choice for each phase."""
        own = [one.timed[names[one.mix.phase]] for one in self.results]
        seconds = sum(timed.seconds for timed in own)
        return Timed(seconds, math.hypot(*(timed.error_s for timed in own)))

    def best_pair(self, is_single: bool) -> tuple[dict[AttentionPhase, str], Timed]:
        """The fixed choice that takes the least over all mixes; is_single: of one backend for all
        phases."""
        common = self._names_by_phase()
        pairs = [
            dict(zip(common, names, strict=True))
            for names in itertools.product(*common.values())
            if not is_single or len(set(names)) == 1
        ]
        totals = [(pair, self.total(pair)) for pair in pairs]
        return min(totals, key=lambda item: item[1].seconds)

    @property
    def auto_total(self) -> Timed:
        return self.total(dict.fromkeys(self._names_by_phase(), AUTO_TUNED))

    @property
    def are_kept(self) -> bool:
        _, single = self.best_pair(is_single=True)
        return not self.over and self.auto_total.seconds < single.seconds

    def _names_by_phase(self) -> dict[AttentionPhase, list[str]]:
        """Those that every mix of a phase was timed with."""
        names: dict[AttentionPhase, list[str]] = {}
        for one in self.results:
            known = names.get(one.mix.phase, list(one.timed))
            own = [name for name in known if name in one.timed and name != AUTO_TUNED]
            names[one.mix.phase] = own
        return names

    def __str__(self) -> str:
        ratios = [one.ratio for one in self.results]
        worst = max(self.results, key=lambda one: one.ratio.seconds)
        lines = [
            f"ratio to the best fixed choice of each mix: median "
            f"{statistics.median(one.seconds for one in ratios):.3f}, worst "
            f"{worst.ratio.seconds:.3f} ({worst.mix}), standard error at most "
            f"{max(one.error_s for one in ratios):.3f}; above {MAX_RATIO}: "
            f"{len(self.over)} of {len(ratios)}"
        ]
        for text, is_single in (("single backend", True), ("fixed pair", False)):
            pair, total = self.best_pair(is_single)
            share = self.auto_total / total
            names = " and ".join(dict.fromkeys(pair.values()))
            lines.append(
                f"sum over the mixes: auto-tuned {share.seconds:.4f} ± {share.error_s:.4f} of the "
                f"best {text}, {names}"
            )
        mean = statistics.geometric_mean(one.seconds for one in ratios)
        lines.append(f"geometric mean of the ratios: {mean:.4f}")
        lines += [f"{one.mix}: took {one.taken}; predicted {one.predicted}" for one in self.over]
        return "\n".join(lines)
