"""Which rows of the residual stream a rank keeps, and how many rows go which way over peer memory.

Arithmetic alone: every rank of a group comes to the same answers. Knows no kernel and no memory.
"""

from dataclasses import dataclass

ONE_SHOT_BYTES_OF_TWO_RANKS = 64 << 20
ONE_SHOT_BYTES_OF_MORE_RANKS = 256 << 10
"""Of one sum that every rank reads whole: with two ranks no way moves less; with more, ranks that
share the rows among them do."""
TWO_SHOT_BYTES = 128 << 20
TWO_SHOT_TOKENS = 8192
"""Of one sum whose rows the ranks share; what exceeds either goes by a collective."""


@dataclass(frozen=True, slots=True)
class RowShards:
    """Consecutive rows on each rank, in the order of the ranks; the last ones may have fewer."""

    rank: int
    size: int

    def rows_a_rank(self, num_rows: int) -> int:
        """The most that any rank has. Row i is of rank i // rows_a_rank."""
        return -(-num_rows // self.size)

    def own(self, num_rows: int) -> range:
        """This rank's."""
        each = self.rows_a_rank(num_rows)
        first = min(self.rank * each, num_rows)
        return range(first, min(first + each, num_rows))


@dataclass(frozen=True, slots=True)
class StreamLimits:
    """How many tokens go one-shot at most, how many two-shot; equal where none go two-shot."""

    one_shot_tokens: int
    two_shot_tokens: int

    @classmethod
    def of_ranks(cls, size: int, row_bytes: int) -> "StreamLimits":
        """row_bytes: of a token's hidden state."""
        if size == 2:
            one_shot = max(1, ONE_SHOT_BYTES_OF_TWO_RANKS // row_bytes)
            return cls(one_shot, one_shot)
        one_shot = max(1, ONE_SHOT_BYTES_OF_MORE_RANKS // row_bytes)
        two_shot = min(TWO_SHOT_TOKENS, TWO_SHOT_BYTES // row_bytes)
        return cls(one_shot, max(one_shot, two_shot))

    @property
    def has_two_shot(self) -> bool:
        return self.two_shot_tokens > self.one_shot_tokens

    def is_sharded(self, num_tokens: int) -> bool:
        """Whether each rank keeps its own rows only of a stream of so many tokens."""
        return self.one_shot_tokens < num_tokens <= self.two_shot_tokens
