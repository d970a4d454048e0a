"""Adapters of a layer's experts, those that all tokens share included, as a rank has the experts.

A rank has an adapter's matrices by the places of its experts; a piece of a shared expert is cut
from that one's.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from workers.adapters.expert_modules import ExpertModules, StackKind
from workers.adapters.low_rank import LowRank
from workers.adapters.peft_weights import FoundStack
from workers.layers.moe.experts import Experts


@dataclass(frozen=True, slots=True)
class ExpertsSite:
    """names: of the checkpoint. shared: path of what all tokens take, None where there is none."""

    experts: Experts
    names: ExpertModules
    shared: str | None

    @classmethod
    def of(cls, experts: Experts, path: str) -> "ExpertsSite":
        """path: of the module in the model."""
        spec, block = experts.spec, experts.checkpoint_prefix(path)
        layer = block.removesuffix(f"{spec.names.block}.")
        names = ExpertModules(
            path=f"{block}experts",
            stack_path=f"{layer}mlp.experts",
            gate=spec.names.gate,
            up=spec.names.up,
            down=spec.names.down,
            num_experts=spec.num_experts,
            hidden_size=experts.hidden_size,
            width=spec.width,
            in_turns=spec.names.is_stacked and spec.names.in_turns,
            inputs_first=spec.names.is_stacked,
        )
        return cls(experts, names, None if spec.shared is None else block + spec.shared.name)

    @property
    def modules(self) -> dict[str, tuple[int, int]]:
        """Of shared experts: names tells those of the others."""
        if self.shared is None:
            return {}
        columns, hidden = self.experts.spec.num_pieces * self.names.width, self.names.hidden_size
        up = hidden, columns
        return {
            self.key(part): shape for part, shape in zip(PARTS, (up, up, up[::-1]), strict=True)
        }

    def key(self, part: str) -> str:
        """Of what share_of gives; with shared experts that module's name."""
        return f"{self.names.path if self.shared is None else self.shared}.{part}"

    def share_of(self, whole: Mapping[str, LowRank]) -> dict[str, LowRank]:
        """By key, of all places here, zeros beyond an expert's own rank; absent where no expert of
        this rank is changed."""
        pairs = ((self.key(part), self._stack(part, whole)) for part in PARTS)
        return {key: stack for key, stack in pairs if stack is not None}

    def _stack(self, part: str, whole: Mapping[str, LowRank]) -> LowRank | None:
        pairs = dict(self._pairs_here(part, whole))
        if not pairs:
            return None
        first, rank = next(iter(pairs.values())), max(pair.rank for pair in pairs.values())
        kept = self.experts.share.num_kept
        a = first.a.new_zeros((kept, rank, first.a.shape[1]))
        b = first.b.new_zeros((kept, len(first.b), rank))
        for place, pair in pairs.items():
            a[place, : pair.rank] = pair.a
            b[place, :, : pair.rank] = pair.b
        return LowRank(a, b)

    def _pairs_here(self, part: str, whole: Mapping[str, LowRank]) -> Iterator[tuple[int, LowRank]]:
        """By place, cut to this rank's columns of an expert."""
        share, name = self.experts.share, getattr(self.names, part.removesuffix("_proj"))
        for place, expert in share.experts_here.items():
            pair = whole.get(f"{self.names.path}.{expert}.{name}")
            if pair is not None:
                yield place, _cut(pair, part, share.first_column, share.num_columns)
        pair = None if self.shared is None else whole.get(self.key(part))
        for place, piece in enumerate(share.pieces, start=share.first_piece):
            if pair is not None:
                first = piece * self.names.width + share.first_column
                yield place, _cut(pair, part, first, share.num_columns)


PARTS = "gate_proj", "up_proj", "down_proj"


def _cut(pair: LowRank, part: str, first: int, num_columns: int) -> LowRank:
    columns = slice(first, first + num_columns)
    if part == "down_proj":
        return LowRank(pair.a[:, columns], pair.b)
    return LowRank(pair.a, pair.b[columns])


def of_each_expert(found: FoundStack, stack: LowRank) -> dict[str, LowRank]:
    """Of a pair that adds to one tensor of all experts, by the modules of each. stack: a (experts *
    rank, n), b (m, rank * experts), as PEFT's ParamWrapper has them (peft.tuners.lora.layer)."""
    names, rank = found.experts, found.pair.rank
    a = stack.a.view(names.num_experts, rank, -1)
    b = stack.b.view(len(stack.b), rank, names.num_experts).permute(2, 0, 1)
    if found.fit.is_swapped:
        a, b = b.transpose(1, 2), a.transpose(1, 2)
    if found.fit.kind is StackKind.DOWN:
        return _by_expert(names, names.down, a, b)
    gate, up = (b[:, ::2], b[:, 1::2]) if names.in_turns else b.chunk(2, dim=1)
    return _by_expert(names, names.gate, a, gate) | _by_expert(names, names.up, a, up)


def _by_expert(
    names: ExpertModules, part: str, a: torch.Tensor, b: torch.Tensor
) -> dict[str, LowRank]:
    return {
        f"{names.path}.{expert}.{part}": LowRank(a[expert], b[expert])
        for expert in range(names.num_experts)
    }
