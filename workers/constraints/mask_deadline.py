"""When masks that are still being made are given up for a step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MaskDeadline:
    """free_until_s: until when waiting costs nothing, on time.perf_counter's axis as a rule.
    seconds_a_row: how much longer the step may wait for each row that would else run again.

    A row that is late loses a step; a step that waits is late for all of its rows. Waiting for as
    long as those that are late would lose together costs, whenever the masks do come, at most twice
    what the best choice would have cost (ski rental; Karlin et al., "Competitive Snoopy Caching").
    """

    free_until_s: float
    seconds_a_row: float = 0.0

    def until_s(self, num_late_rows: int) -> float:
        """When so many rows that wait for one batch of masks are given up."""
        return self.free_until_s + num_late_rows * self.seconds_a_row


NEVER = MaskDeadline(float("inf"))
