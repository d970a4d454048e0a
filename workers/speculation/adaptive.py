"""The default policy: the length that brings the most tokens a second, measured, none included.

What a length brings is known from how often drafts of each place were right, what it costs from the
seconds of steps by rows and length. The length in use changes only for one that is better by some
margin. Others are tried now and then, so that figures do not age: what that may cost is a small
share of the time (a budget of regret), and what a trial did cost is paid before the next one.

Behind a plain step drafts wait for the host, behind drafts they may be made ahead of it: of a
length that is tried among plain steps two are taken, one behind the other, since the first says too
much of what it costs where all steps have drafts. So are two of a length that is not known yet.
"""

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from workers.kv_cache.radix_node import IntArray
from workers.speculation.policy import DecodeShape
from workers.speculation.step_seconds import StepSeconds

_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
"""Few, so that a device has few shapes of steps to be prepared for."""
_MARGIN = 1.01
_TRIAL_SHARE, _SETTLED_SHARE = 0.005, 0.0035
"""Of the time, what trials may cost, and what they may where the length in use has not changed for
_SETTLED_STEPS: what is wrong is found soon, and what has held is asked less often."""
_SETTLED_STEPS = 400
_MIN_AGE, _MAX_AGE = 10, 200
"""Steps after which what was measured is measured again: as many as pay for that."""
_MAX_AWAITED_STEPS = 3
"""How many have been chosen at most before it is told what the first of them took."""
_MAX_SAVED_STEPS = 4.0
"""Trials that were not made are not made up for: so many steps' time is saved for them at most, and
as much is owed at most, since a trial that cost more is known by then and not made again."""
_MAX_CHARGED_RISE = 2.0
_MAX_TRIAL_STEPS = 2
_FULL = 0.9
"""Of what may be saved at most, what pays for any trial."""
_MEMORY = 0.98
"""What counts of earlier runs after each step that verifies some."""
_PRIOR_RUNS, _PRIOR_RIGHT = 2.0, 0.7
_PLACE_RUNS = 6.0
"""Runs as that many of which a place is thought to be as good as the one before it."""

Rates = npt.NDArray[np.float64]


def lengths_up_to(max_draft_tokens: int) -> list[int]:
    """What there is to choose from, ascending from 0 on."""
    return [one for one in _LENGTHS if one < max_draft_tokens] + [max_draft_tokens]


class Acceptance:
    """How often a draft was right where those before it were, by its place."""

    def __init__(self, max_draft_tokens: int) -> None:
        self._num_tried = np.full(max_draft_tokens, 0.0)
        self._num_right = np.full(max_draft_tokens, 0.0)
        # As found last; None where something has been observed since.
        self._chances: Rates | None = None

    def add(self, num_drafts: int, num_accepted: int) -> None:
        """One that was asked for and not made counts as wrong."""
        self._chances = None
        self._num_tried[: min(num_accepted + 1, num_drafts)] += 1.0
        self._num_right[:num_accepted] += 1.0

    def fade(self) -> None:
        """Earlier runs count for less from here on."""
        self._chances = None
        self._num_tried *= _MEMORY
        self._num_right *= _MEMORY

    def chances(self) -> Rates:
        """That the first j + 1 drafts are all right, float64 (max_draft_tokens,). Of places that
        were hardly tried the place before says what to expect."""
        if self._chances is None:
            self._chances = self._found_chances()
        return self._chances

    def _found_chances(self) -> Rates:
        chance, known, all_right = _PRIOR_RIGHT, _PRIOR_RUNS, 1.0
        chances = np.empty(len(self._num_tried))
        for place, (tried, right) in enumerate(
            zip(self._num_tried.tolist(), self._num_right.tolist(), strict=True)
        ):
            chance = (right + known * chance) / (tried + known)
            known = _PLACE_RUNS
            all_right *= chance
            chances[place] = all_right
        return chances


class AdaptiveLength:
    """See DraftPolicy and the head of this file. Knows no clock: seconds are told."""

    def __init__(self, max_draft_tokens: int, has_trees: bool = False) -> None:
        """has_trees: of which none or all are verified, as fewer drafts are another tree."""
        self._lengths = [0, max_draft_tokens] if has_trees else lengths_up_to(max_draft_tokens)
        self._columns = np.array(self._lengths)
        self._acceptance = Acceptance(max_draft_tokens)
        self._seconds = StepSeconds(self._lengths)
        self._chosen = 0
        self._saved_s = 0.0
        # Of each length, its steps on trial that were not paid for yet. Steps that have another
        # length than the chosen one for want of room, or since their rows may have no drafts, owe
        # nothing.
        self._num_on_trial = np.zeros(len(self._lengths), dtype=np.int64)
        # Of the step chosen last; whether its length is to be tried once more.
        self._last_index, self._is_repeated = 0, False
        # What rows might have in the step chosen last: about what they may in those before it.
        self._most: IntArray = np.empty(0, dtype=np.int32)
        # When each length was last taken, in steps.
        self._taken_at = np.zeros(len(self._lengths), dtype=np.int64)
        self._num_steps = self._changed_at = 0
        # Of the step observed last.
        self._last_shape, self._was_trial = DecodeShape(1, 0), False

    def choose(self, most: IntArray) -> int:
        """See DraftPolicy."""
        self._num_steps += 1
        self._most = most
        costs = self._seconds.predict(len(most), self._keys_of(len(most)))
        if costs is None:
            return 0
        # Where no row may have more, longer ones are the same step: they would never be measured.
        num_lengths = bisect_left(self._lengths, int(most.max())) + 1
        costs = costs[:num_lengths]
        rates = self._tokens(most)[:num_lengths] / costs
        chosen, best = min(self._chosen, len(rates) - 1), int(rates.argmax())
        if rates[best] > rates[chosen] * _MARGIN:
            self._chosen = chosen = best
            self._changed_at = self._num_steps
        index = self._taken_up_again(num_lengths)
        if index is None:
            index = self._trial(chosen, len(most), rates, costs)
            is_known = self._seconds.are_known(len(most))[index]
            self._is_repeated = index != chosen and (self._is_first(index) or not is_known)
        self._taken_at[index] = self._num_steps
        if index != chosen:
            self._num_on_trial[index] = min(self._num_on_trial[index] + 1, _MAX_TRIAL_STEPS)
        self._last_index = index
        return self._lengths[index]

    def observe_run(self, num_drafts: int, num_accepted: int) -> None:
        """See DraftPolicy."""
        self._acceptance.add(num_drafts, num_accepted)

    def observe_step(self, shape: DecodeShape, seconds: float, gap_s: float = 0.0) -> None:
        """See DraftPolicy. A plain step is launched while the one before it runs, but behind drafts
        it waits for their samples, as no other plain step does."""
        is_behind_drafts = not shape.num_drafts and self._last_shape.num_drafts > 0
        is_first = shape.num_drafts > 0 and not self._last_shape.num_drafts
        if is_behind_drafts and self._was_trial:
            self._saved_s -= gap_s
        if not is_behind_drafts:
            seconds += gap_s
        index = min(bisect_left(self._lengths, shape.num_drafts), len(self._lengths) - 1)
        self._seconds.add(shape.num_rows, index, seconds, shape.num_keys, is_at_most=is_first)
        self._last_shape = shape
        if shape.num_drafts:
            self._acceptance.fade()
        most_s = _MAX_SAVED_STEPS * seconds
        self._saved_s = min(self._saved_s + self._trial_share * seconds, most_s)
        self._was_trial = bool(self._num_on_trial[index])
        if self._was_trial:
            self._num_on_trial[index] -= 1
            self._pay(shape, index, seconds + (gap_s if is_behind_drafts else 0.0))
        self._saved_s = max(self._saved_s, -most_s)

    @property
    def _trial_share(self) -> float:
        is_settled = self._num_steps - self._changed_at > _SETTLED_STEPS
        return _SETTLED_SHARE if is_settled else _TRIAL_SHARE

    def _pay(self, shape: DecodeShape, index: int, seconds: float) -> None:
        """For a trial: the time that the chosen length would have saved."""
        costs = self._seconds.predict(shape.num_rows, shape.num_keys)
        if costs is None:
            return
        # A shape's first step may have prepared the device: that is paid for once, by nobody.
        seconds = min(seconds, _MAX_CHARGED_RISE * float(costs[index]))
        tokens = self._tokens(self._most)
        chosen_s = tokens[index] * costs[self._chosen] / tokens[self._chosen]
        self._saved_s -= max(seconds - float(chosen_s), 0.0)

    def _tokens(self, most: IntArray) -> Rates:
        """Tokens that a step is expected to bring at each length, float64 (num lengths,)."""
        longest = self._lengths[-1]
        counts = np.bincount(np.minimum(most, longest), minlength=longest + 1)
        num_rows_with = counts[::-1].cumsum()[::-1]
        gained = np.concatenate([[0.0], (num_rows_with[1:] * self._acceptance.chances()).cumsum()])
        tokens: Rates = len(most) + gained[self._columns]
        return tokens

    def _keys_of(self, num_rows: int) -> int:
        """That so many rows are about to read, as long as those of the last step."""
        return self._last_shape.num_keys * num_rows // self._last_shape.num_rows

    def _is_first(self, index: int) -> bool:
        """Whether a step of this length would have drafts behind one without."""
        return index > 0 and not self._last_index

    def _taken_up_again(self, num_lengths: int) -> int | None:
        """The length of a trial's second step."""
        is_repeated, self._is_repeated = self._is_repeated, False
        return self._last_index if is_repeated and self._last_index < num_lengths else None

    def _trial(self, chosen: int, num_rows: int, rates: Rates, costs: Rates) -> int:
        """The chosen length, or one whose turn it is: not taken for long, or not measured with
        about so many rows, for little loss. rates, costs: of all that may be tried."""
        losses_s = costs * np.maximum(1.0 - rates / rates[chosen], 0.0)
        if self._is_first(len(rates) - 1):
            losses_s[1:] *= _MAX_TRIAL_STEPS
        # What seems to cost more than may be saved may have been measured wrong.
        losses_s = np.minimum(losses_s, _FULL * _MAX_SAVED_STEPS * costs[chosen])
        ages = self._num_steps - self._taken_at[: len(rates)]
        is_awaited = ages <= _MAX_AWAITED_STEPS
        ages[~self._seconds.are_known(num_rows)[: len(rates)] & ~is_awaited] += _MAX_AGE
        ages[chosen] = 0
        gain = ages / (losses_s + self._trial_share * costs)
        index = int(gain.argmax())
        age = float(losses_s[index] / (self._trial_share * costs[chosen]))
        age = min(max(age, _MIN_AGE), _MAX_AGE)
        if ages[index] > age and losses_s[index] <= self._saved_s:
            return index
        return chosen
