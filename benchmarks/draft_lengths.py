"""Is speculation ever slower? The adaptive policy against plain steps and every fixed length, on a
pretended device: a table of step times, drafts that are right by chance.

    python -m benchmarks.draft_lengths [--steps 2000]

Prints tokens a second of `adaptive` by batch size and acceptance length, as a share of the better
of plain and the best fixed length, and of plain. Times of a step are those of a roofline: weights
are read once, products grow with tokens, keys with rows; a draft costs its maker something.
"""

import argparse
import random
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workers.speculation.adaptive import AdaptiveLength
from workers.speculation.policy import DecodeShape, DraftPolicy, FixedLength

BATCH_SIZES = (1, 4, 16, 64, 128, 256)
ACCEPTANCE_LENGTHS = (1.0, 1.3, 2.0, 3.0, 4.0)
MAX_DRAFT_TOKENS = 8


@dataclass(frozen=True, slots=True)
class PretendedDevice:
    """Seconds of steps. The defaults are about those of 8 billion parameters on one H200."""

    weights_s: float = 3.6e-3
    token_s: float = 2.3e-5
    row_s: float = 4.0e-5
    draft_s: float = 2.0e-4
    verify_s: float = 3.0e-4
    noise: float = 0.02

    def mean_s(self, shape: DecodeShape) -> float:
        tokens = shape.num_rows * (1 + shape.num_drafts)
        verify_s = self.verify_s if shape.num_drafts else 0.0
        seconds = max(self.weights_s, self.token_s * tokens) + self.row_s * shape.num_rows
        return seconds + verify_s + self.draft_s * shape.num_drafts

    def run_s(self, shape: DecodeShape, rng: random.Random) -> float:
        return self.mean_s(shape) * max(rng.gauss(1.0, self.noise), 0.5)


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


def tokens_per_s(
    policy: DraftPolicy, device: PretendedDevice, num_rows: int, chance: float, num_steps: int
) -> float:
    """One step is always in flight: it is chosen before the one before it is committed. The policy
    sees drafts that are right by chance; tokens and seconds are counted by their expectation."""
    rng = random.Random(num_rows)
    most = np.full(num_rows, MAX_DRAFT_TOKENS, dtype=np.int32)
    total_s, num_tokens = 0.0, 0.0
    in_flight = policy.choose(most)
    for _ in range(num_steps):
        num_drafts, in_flight = in_flight, policy.choose(most)
        shape = DecodeShape(num_rows, num_drafts)
        for _ in range(num_rows):
            num_accepted = 0
            while num_accepted < num_drafts and rng.random() < chance:
                num_accepted += 1
            if num_drafts:
                policy.observe_run(num_drafts, num_accepted)
        policy.observe_step(shape, device.run_s(shape, rng))
        total_s += device.mean_s(shape)
        num_tokens += num_rows * expected_tokens(chance, num_drafts)
    return num_tokens / total_s


def best_fixed(device: PretendedDevice, num_rows: int, chance: float) -> float:
    """Tokens a second of the best length, plain steps included, by its expectation."""
    return max(
        num_rows * expected_tokens(chance, length) / device.mean_s(DecodeShape(num_rows, length))
        for length in range(MAX_DRAFT_TOKENS + 1)
    )


def shares(
    make: Callable[[int], DraftPolicy], num_rows: int, acceptance_length: float, num_steps: int
) -> tuple[float, float]:
    """Of the best length's tokens a second, and of a plain step's."""
    device, chance = PretendedDevice(), chance_of(acceptance_length)
    found = tokens_per_s(make(MAX_DRAFT_TOKENS), device, num_rows, chance, num_steps)
    plain = num_rows / device.mean_s(DecodeShape(num_rows, 0))
    return found / best_fixed(device, num_rows, chance), found / plain


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=2000)
    num_steps = parser.parse_args().steps
    print("share of the best length (of plain); then always 8 drafts, of plain")
    print("rows  " + "".join(f"accepted {length:<11}" for length in ACCEPTANCE_LENGTHS))
    for num_rows in BATCH_SIZES:
        cells = []
        for length in ACCEPTANCE_LENGTHS:
            of_best, of_plain = shares(AdaptiveLength, num_rows, length, num_steps)
            _, fixed = shares(FixedLength, num_rows, length, min(num_steps, 200))
            cells.append(f"{of_best:.3f} ({of_plain:.2f}) {fixed:.2f}  ")
        print(f"{num_rows:<6}" + "".join(cells))


if __name__ == "__main__":
    main()
