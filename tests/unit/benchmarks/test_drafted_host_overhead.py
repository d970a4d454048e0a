"""The benchmark of drafted steps measures what it says: a wait for the device is no host time."""

from statistics import median

from benchmarks.drafted_host_overhead import (
    PARTS,
    PretendedRank,
    PretendedTrees,
    line_of,
    measure,
)

DEVICE_S = 0.02


def test_every_part_of_every_step_is_measured_and_no_wait_counts() -> None:
    for num_requests, device_s, is_alone, rank_class in (
        (1, 0.0, True, PretendedRank),
        (5, DEVICE_S, True, PretendedRank),
        (2, 0.0, False, PretendedRank),
        (2, DEVICE_S, True, PretendedTrees),
    ):
        parts = measure(num_requests, 6, device_s, is_alone, rank_class)
        assert {part: len(seconds) for part, seconds in parts.items()} == dict.fromkeys(PARTS, 6)
        for *pieces, all_of_it in zip(*parts.values(), strict=True):
            assert min(pieces) > 0.0
            assert sum(pieces) < all_of_it
        # A busy machine may hold up single ones.
        *_, whole_s = parts.values()
        assert median(whole_s) < DEVICE_S
        cells = line_of(num_requests, parts).split()
        assert cells[0] == str(num_requests)
        assert len(cells) == 1 + 3 * len(PARTS)
