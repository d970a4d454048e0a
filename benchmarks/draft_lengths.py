"""Is speculation ever slower? The adaptive policy against plain steps and every fixed length, on a
pretended device: a table of step times, drafts that are right by chance.

    python -m benchmarks.draft_lengths [--steps 2000]

Prints tokens a second of `adaptive` by batch size and acceptance length, as a share of the better
of plain and the best fixed length, and of plain. Times of a step are those of a roofline: weights
are read once, products grow with tokens, keys with rows; a draft costs its maker something.

Three devices: drafts that are looked up, those of a head, which reads plain steps as well and whose
steps wait for the host, and those made ahead of the host, which wait behind plain steps alone. On
all of them the first step of a shape takes long. Then the same for batches whose streams end one
after the other, down to the last: each number of rows is new. On the last device streams grow
while they run, and new ones begin short.
"""

import argparse
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from workers.kv_cache.radix_node import IntArray
from workers.speculation.adaptive import AdaptiveLength
from workers.speculation.policy import DecodeShape, DraftPolicy, FixedLength

BATCH_SIZES = (1, 4, 16, 64, 128, 256)
ACCEPTANCE_LENGTHS = (1.0, 1.3, 2.0, 3.0, 4.0)
MAX_DRAFT_TOKENS = 8
_GRAPHS = (1, 2, 4, *range(8, 65, 8), *range(80, 129, 16), *range(160, 257, 32))
"""Numbers of rows that a device prepares itself for: others have the next one's graph."""


LATE = 1.3


@dataclass(frozen=True, slots=True)
class PretendedDevice:
    """Seconds of steps. The defaults are about those of 8 billion parameters on one H200.

    wait_s: what the host does between the samples of a step with drafts and the step behind it: a
    step with drafts takes that longer, a plain one behind it waits so long. behind_plain_s: what a
    step with drafts takes longer behind a plain one. key_s: of a key in the cache. first_s: what
    the first step of a shape takes more, and late_share: of the steps that take LATE times as long,
    which is what the policy is told and nothing that it could spare.
    """

    weights_s: float = 3.6e-3
    token_s: float = 2.3e-5
    row_s: float = 4.0e-5
    draft_s: float = 2.0e-4
    verify_s: float = 3.0e-4
    noise: float = 0.02
    wait_s: float = 0.0
    behind_plain_s: float = 0.0
    key_s: float = 0.0
    first_s: float = 0.3
    late_share: float = 0.0

    def mean_s(self, shape: DecodeShape) -> float:
        tokens = shape.num_rows * (1 + shape.num_drafts)
        verify_s = self.verify_s + self.wait_s if shape.num_drafts else 0.0
        seconds = max(self.weights_s, self.token_s * tokens) + self.row_s * shape.num_rows
        seconds += self.key_s * shape.num_keys
        return seconds + verify_s + self.draft_s * shape.num_drafts

    def run_s(self, shape: DecodeShape, rng: random.Random) -> float:
        late = LATE if self.late_share and rng.random() < self.late_share else 1.0
        return self.mean_s(shape) * max(rng.gauss(1.0, self.noise), 0.5) * late


LOOKED_UP = PretendedDevice()
HEAD = PretendedDevice(weights_s=3.8e-3, row_s=2.2e-5, wait_s=3.0e-3)
"""Chains of 3 and 5 of an EAGLE-3 head took 8.0 and 8.1 ms for 1 row, 11.1 and 14.9 for 64, 38 and
52 for 256, plain steps without the head 3.9, 5.2 and 9.6 (2026-11-28)."""

AHEAD = PretendedDevice(
    weights_s=4.0e-3,
    row_s=0.0,
    draft_s=1.5e-4,
    verify_s=2.0e-4,
    behind_plain_s=7e-4,
    key_s=3e-8,
    late_share=0.02,
)
"""Drafts are made ahead of the host: chains of 1, 3 and 5 took 4.6, 5.1 and 5.6 ms for 1 row, 6.4,
9.4 and 12.7 for 64, plain steps 4.1 and 5.3 (2026-11-28)."""
FIRST_KEYS, LAST_KEYS = 1024, 1600
"""Of a row: as its stream begins, and as it ends."""


def chance_of(acceptance_length: float, num_drafts: int = MAX_DRAFT_TOKENS) -> float:
    """That a draft is right where those before are, so that runs of num_drafts drafts bring
    acceptance_length tokens on average."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        is_low = expected_tokens(middle, num_drafts) < acceptance_length
        low, high = (middle, high) if is_low else (low, middle)
    return (low + high) / 2


def expected_tokens(chance: float, num_drafts: int) -> float:
    """Of a row's step."""
    return sum(chance**place for place in range(num_drafts + 1))


def steps_taken(
    policy: DraftPolicy, device: PretendedDevice, rows: Sequence[int], chance: float
) -> Iterator[tuple[DecodeShape, float]]:
    """Of as many steps as there are numbers of rows: their shapes and mean seconds, waits included.
    One step is always in flight: it is chosen before the one before it is committed. The policy
    sees drafts that are right by chance."""
    rng = random.Random(rows[0])
    seen, last_num_drafts, keys = set(), 0, FIRST_KEYS
    in_flight = policy.choose(_most(rows[0]))
    for num_rows, next_rows in zip(rows, [*rows[1:], rows[-1]], strict=True):
        num_drafts, in_flight = in_flight, policy.choose(_most(next_rows))
        shape = DecodeShape(num_rows, num_drafts, num_rows * round(keys))
        for _ in range(num_rows):
            num_accepted = 0
            while num_accepted < num_drafts and rng.random() < chance:
                num_accepted += 1
            if num_drafts:
                policy.observe_run(num_drafts, num_accepted)
        keys += expected_tokens(chance, num_drafts)
        keys = keys if keys < LAST_KEYS else FIRST_KEYS
        gap_s = device.wait_s if last_num_drafts and not num_drafts else 0.0
        behind_s = device.behind_plain_s if num_drafts and not last_num_drafts else 0.0
        graph = _GRAPHS[bisect_left(_GRAPHS, num_rows)], num_drafts
        first_s = 0.0 if graph in seen else device.first_s
        policy.observe_step(shape, first_s + behind_s + device.run_s(shape, rng), gap_s)
        seen.add(graph)
        last_num_drafts = num_drafts
        yield shape, device.mean_s(shape) + behind_s + gap_s


def _most(num_rows: int) -> IntArray:
    return np.full(num_rows, MAX_DRAFT_TOKENS, dtype=np.int32)


def shares(
    make: Callable[[int], DraftPolicy],
    rows: Sequence[int],
    acceptance_length: float,
    device: PretendedDevice = LOOKED_UP,
) -> tuple[float, float]:
    """What part of the seconds that a policy takes for its tokens the best length would have taken,
    of each number of rows its own, and plain steps. Tokens are counted by their expectation."""
    chance = chance_of(acceptance_length)
    best_s = plain_s = total_s = 0.0
    for shape, seconds in steps_taken(make(MAX_DRAFT_TOKENS), device, rows, chance):
        num_tokens = shape.num_rows * expected_tokens(chance, shape.num_drafts)
        costs = _seconds_a_token(device, shape.num_rows, shape.num_keys, chance)
        best_s += num_tokens * min(costs)
        plain_s += num_tokens * costs[0]
        total_s += seconds
    return best_s / total_s, plain_s / total_s


@cache
def _seconds_a_token(
    device: PretendedDevice, num_rows: int, num_keys: int, chance: float
) -> list[float]:
    """Of each length, none first, by expectation."""
    lengths = range(MAX_DRAFT_TOKENS + 1)
    steps_s = [device.mean_s(DecodeShape(num_rows, length, num_keys)) for length in lengths]
    return [
        step_s / num_rows / expected_tokens(chance, length)
        for length, step_s in zip(lengths, steps_s, strict=True)
    ]


def falling_rows(num_rows: int, num_steps: int, num_batches: int = 2) -> list[int]:
    """Of batches that begin with num_rows streams, which end one after the other."""
    batch = [1 + (num_rows - 1) * left // (num_steps - 1) for left in reversed(range(num_steps))]
    return batch * num_batches


def _print_shares(device: PretendedDevice, rows_of: Callable[[int], Sequence[int]]) -> None:
    print("rows  " + "".join(f"accepted {length:<11}" for length in ACCEPTANCE_LENGTHS))
    for num_rows in BATCH_SIZES:
        cells = []
        for length in ACCEPTANCE_LENGTHS:
            rows = rows_of(num_rows)
            of_best, of_plain = shares(AdaptiveLength, rows, length, device)
            _, fixed = shares(FixedLength, rows[:200], length, device)
            cells.append(f"{of_best:.3f} ({of_plain:.2f}) {fixed:.2f}  ")
        print(f"{num_rows:<6}" + "".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    num_steps = parser.parse_args().steps
    print("share of the best length (of plain); then always 8 drafts, of plain")
    for name, device in (("looked up", LOOKED_UP), ("a head's", HEAD), ("made ahead", AHEAD)):
        print(f"drafts {name}")
        _print_shares(device, lambda num_rows: [num_rows] * num_steps)
    print("drafts a head's, streams that end")
    _print_shares(HEAD, lambda num_rows: falling_rows(num_rows, num_steps // 2))


if __name__ == "__main__":
    main()
