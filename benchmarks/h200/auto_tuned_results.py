"""What auto-tuned promises, checked against timed mixes. Times nothing."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED
from attention.tuning.points import StepPoint
from attention.tuning.table import TuningTable

MAX_RATIO = 1.02
MAX_ERROR = 0.005
"""Of a ratio: a mix with more is measured again."""
_MAX_REPEATS = 4
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
    was. predicted: what it was taken by. num_layers: of those timed. alike: the candidates that
    launch the same kernels, taken itself too."""

    mix: StepPoint
    turns: Mapping[str, Sequence[float]]
    taken: str
    predicted: str
    num_layers: int
    alike: frozenset[str]

    @cached_property
    def timed(self) -> dict[str, Timed]:
        return {name: Timed.of(own) for name, own in self.turns.items()}

    @property
    def best(self) -> str:
        fixed = (name for name in self.timed if name != AUTO_TUNED)
        return min(fixed, key=lambda name: self.timed[name].seconds)

    @property
    def is_best_taken(self) -> bool:
        return self.best in self.alike

    @cached_property
    def ratio(self) -> Timed:
        """To the best fixed choice. Where that launches the kernels that were taken, to all that
        do: each name's turns timed the same thing, and it was chance which came out first. What
        is left is what auto-tuned costs by itself."""
        if not self.is_best_taken:
            return self.timed[AUTO_TUNED] / self.timed[self.best]
        same = (own for name, own in self.turns.items() if name in self.alike)
        return self.timed[AUTO_TUNED] / Timed.of(list(itertools.chain.from_iterable(same)))

    @property
    def is_over(self) -> bool:
        return self.ratio.seconds > MAX_RATIO

    @property
    def is_exact(self) -> bool:
        return self.ratio.error_s < MAX_ERROR

    def joined(self, other: MixResult) -> MixResult:
        """With the turns of the same mix measured once more."""
        turns = {name: [*own, *other.turns[name]] for name, own in self.turns.items()}
        return replace(self, turns=turns)

    def micros(self, name: str) -> str:
        return f"{self.timed[name].seconds / self.num_layers * 1e6:.1f}"


def repeated(first: MixResult, again: Callable[[StepPoint], MixResult]) -> MixResult:
    """The result, or that of more turns where it was above what is promised or may be off by too
    much. What made a mix be repeated does not count. again: prepares all anew, and times."""
    if first.is_exact and not first.is_over:
        return first
    result = again(first.mix)
    for _ in range(_MAX_REPEATS - 1):
        if not result.is_exact:
            result = result.joined(again(first.mix))
    ratio = result.ratio
    print(
        f"{first.mix}: {first.ratio.seconds:.3f}, repeated {ratio.seconds:.3f} "
        f"± {ratio.error_s:.3f}"
    )
    return result


def alike(table: TuningTable, phase: AttentionPhase, name: str) -> frozenset[str]:
    """Candidates that launch what name launches, as measuring found, and name itself."""
    stand_ins = {one.name: one.stand_in for one in table.left_out if one.phase is phase}

    def first(one: str) -> str:
        stand_in = stand_ins.get(one, "")
        return first(stand_in) if stand_in else one

    return frozenset(one for one in {*table.names[phase], name} if first(one) == first(name))


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


Choice = tuple[dict[AttentionPhase, str], Timed]
"""Who attends in each phase, and what the mixes take together."""


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

    @cached_property
    def best_pair(self) -> Choice:
        """The fixed choice that takes the least over all mixes. ValueError where no candidate was
        timed with every mix of a phase."""
        common = self._names_by_phase()
        lacking = [str(phase) for phase, names in common.items() if not names]
        if lacking:
            raise ValueError(f"no candidate was timed with every mix of {', '.join(lacking)}")
        return self._fastest(
            [dict(zip(common, names, strict=True)) for names in itertools.product(*common.values())]
        )

    @cached_property
    def best_single(self) -> Choice | None:
        """As best_pair, of one backend for all phases; None where none was timed in all."""
        common = self._names_by_phase()
        shared = set.intersection(*map(set, common.values()))
        alone = [dict.fromkeys(common, name) for name in sorted(shared)]
        return self._fastest(alone) if alone else None

    def _fastest(self, choices: Sequence[dict[AttentionPhase, str]]) -> Choice:
        totals = [(choice, self.total(choice)) for choice in choices]
        return min(totals, key=lambda item: item[1].seconds)

    @property
    def auto_total(self) -> Timed:
        return self.total(dict.fromkeys(self._names_by_phase(), AUTO_TUNED))

    @property
    def are_kept(self) -> bool:
        """Where there is no single backend, there is none to be faster than."""
        single = self.best_single
        is_faster = single is None or self.auto_total.seconds < single[1].seconds
        return is_faster and not self.over

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
            f"{_median(ratios):.3f}, worst "
            f"{worst.ratio.seconds:.3f} ({worst.mix}), standard error at most "
            f"{max(one.error_s for one in ratios):.3f}; above {MAX_RATIO}: "
            f"{len(self.over)} of {len(ratios)}"
        ]
        lines += [*self._own_cost(), *self._sums()]
        mean = statistics.geometric_mean(one.seconds for one in ratios)
        lines.append(f"geometric mean of the ratios: {mean:.4f}")
        lines += [f"{one.mix}: took {one.taken}; predicted {one.predicted}" for one in self.over]
        return "\n".join(lines)

    def _own_cost(self) -> list[str]:
        """What there is besides choosing."""
        same = [one.ratio for one in self.results if one.is_best_taken]
        if not same:
            return []
        worst = max(same, key=lambda ratio: ratio.seconds)
        return [
            f"the fastest was taken, or what launches the same, in {len(same)} of "
            f"{len(self.results)}: there auto-tuned takes {_median(same):.4f} of it (median), "
            f"{worst.seconds:.3f} ± {worst.error_s:.3f} at worst"
        ]

    def _sums(self) -> list[str]:
        single = self.best_single
        lines = [] if single else ["no single backend attends in all phases"]
        for text, choice in (("single backend", single), ("fixed pair", self.best_pair)):
            if choice is not None:
                share = self.auto_total / choice[1]
                names = " and ".join(dict.fromkeys(choice[0].values()))
                lines.append(
                    f"sum over the mixes: auto-tuned {share.seconds:.4f} ± {share.error_s:.4f} of "
                    f"the best {text}, {names}"
                )
        return lines


def _median(ratios: Sequence[Timed]) -> float:
    return statistics.median(one.seconds for one in ratios)
