"""How the ranks of a tensor-parallel group share the experts of a layer.

The group is cut into ep_size parts of neighbouring ranks. A part owns some of the experts, its
ranks cut the width of each. What all ranks make of a token is summed over the whole group, so that
no further communicator is needed. Knows no tensor.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ExpertGroup:
    """One rank's place: ep_rank of ep_size parts, width_rank of width_size ranks in its part."""

    ep_rank: int
    ep_size: int
    width_rank: int
    width_size: int

    @classmethod
    def of_rank(cls, rank: int, size: int, ep_size: int) -> ExpertGroup:
        """Raises ConfigError where size ranks make no ep_size equal parts."""
        if size % ep_size:
            raise ConfigError(f"tp_size={size} ranks make no ep_size={ep_size} equal parts")
        width_size = size // ep_size
        return cls(rank // width_size, ep_size, rank % width_size, width_size)


@dataclass(frozen=True, slots=True)
class ExpertShare:
    """What a rank keeps of a layer: num_own of num_experts experts from first_expert on, room for
    num_copies of others' and which those are, the pieces of shared experts that are its own, and of
    each num_columns columns from first_column on."""

    num_experts: int
    first_expert: int
    num_own: int
    pieces: tuple[int, ...]
    first_column: int
    num_columns: int
    num_copies: int = 0
    copies: tuple[int, ...] = ()

    @classmethod
    def of_rank(
        cls,
        group: ExpertGroup,
        num_experts: int,
        num_pieces: int,
        width: int,
        num_redundant: int = 0,
    ) -> ExpertShare:
        """Pieces go round the parts of the group. num_redundant: room for copies of all parts.
        Raises ConfigError for unequal parts."""
        if num_experts % group.ep_size:
            raise ConfigError(
                f"{num_experts} experts cannot be divided over ep_size={group.ep_size} parts"
            )
        if width % group.width_size:
            raise ConfigError(
                f"experts of width {width} cannot be cut over {group.width_size} ranks: tp_size / "
                "ep_size has to divide it"
            )
        own, columns = num_experts // group.ep_size, width // group.width_size
        return cls(
            num_experts=num_experts,
            first_expert=group.ep_rank * own,
            num_own=own,
            pieces=tuple(range(group.ep_rank, num_pieces, group.ep_size)),
            first_column=group.width_rank * columns,
            num_columns=columns,
            num_copies=num_redundant // group.ep_size,
        )

    @property
    def num_kept(self) -> int:
        """Experts, room for copies and pieces that lie on this rank; pieces come last."""
        return self.first_piece + len(self.pieces)

    @property
    def first_piece(self) -> int:
        return self.num_own + self.num_copies

    @property
    def experts_here(self) -> dict[int, int]:
        """Place -> expert, own ones and copies."""
        own = {place: self.first_expert + place for place in range(self.num_own)}
        return own | dict(enumerate(self.copies, start=self.num_own))

    def place_of(self, expert: int) -> int | None:
        """Where an expert lies here. Pieces are counted from num_experts on."""
        if expert >= self.num_experts:
            piece = expert - self.num_experts
            return self.first_piece + self.pieces.index(piece) if piece in self.pieces else None
        if expert in self.copies:
            return self.num_own + self.copies.index(expert)
        place = expert - self.first_expert
        return place if 0 <= place < self.num_own else None
