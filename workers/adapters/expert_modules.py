"""The experts of one layer as adapters name them: modules of each expert, or parameters of all.

PEFT adds to modules (`experts.3.gate_proj`) or, since transformers has the experts of a layer in
two tensors, to these (`target_parameters`). Knows no torch.
"""

from enum import Enum

import msgspec

Shape = tuple[int, int]


class StackKind(Enum):
    """Which of the two tensors a pair of matrices adds to."""

    GATE_UP = "gate_up_proj"
    DOWN = "down_proj"


class StackFit(msgspec.Struct, frozen=True):
    """is_swapped: the product is A.T B.T, (outputs, rank) by (rank, inputs): PEFT before 0.19.1
    took a tensor (experts, outputs, inputs) for (experts, inputs, outputs)."""

    kind: StackKind
    is_swapped: bool


class ExpertModules(msgspec.Struct, frozen=True):
    """path: of the experts in the checkpoint; stack_path: in transformers' model. gate, up, down:
    within an expert. in_turns: the rows of gate and up are by turns where one tensor has both.
    inputs_first: transformers' tensors are (experts, inputs, outputs), as checkpoints of stacked
    experts have them."""

    path: str
    stack_path: str
    gate: str
    up: str
    down: str
    num_experts: int
    hidden_size: int
    width: int
    in_turns: bool
    inputs_first: bool

    def shape_of(self, module: str) -> Shape | None:
        """(in_features, out_features) of one expert's module; None for what is none of these."""
        path, expert, name = _within(module)
        is_number = expert.isdecimal() and len(expert) <= len(str(self.num_experts))
        if path != self.path or not is_number or str(int(expert)) != expert:
            return None
        if int(expert) >= self.num_experts:
            return None
        hidden, width = self.hidden_size, self.width
        return {
            self.gate: (hidden, width),
            self.up: (hidden, width),
            self.down: (width, hidden),
        }.get(name)

    def kind_of(self, module: str) -> StackKind:
        """Of which tensor of all experts an expert's module is a part."""
        return StackKind.DOWN if _within(module)[2] == self.down else StackKind.GATE_UP

    def fit_of(
        self, a_shape: tuple[int, ...], b_shape: tuple[int, ...], is_never_swapped: bool
    ) -> StackFit | None:
        """Of A (experts * rank, inputs) and B (outputs, rank * experts); None if they fit neither
        tensor, or both of PEFT's ways fit. is_never_swapped: by the version of PEFT."""
        inputs, outputs = a_shape[1], b_shape[0]
        hidden, width = self.hidden_size, self.width
        kinds = {StackKind.GATE_UP: (hidden, 2 * width), StackKind.DOWN: (width, hidden)}
        fits = [
            StackFit(kind, is_swapped)
            for kind, shape in kinds.items()
            for is_swapped in ((False,) if is_never_swapped or self.inputs_first else (False, True))
            if shape == ((outputs, inputs) if is_swapped else (inputs, outputs))
        ]
        return fits[0] if len(fits) == 1 else None


def _within(module: str) -> tuple[str, str, str]:
    """Path of the experts, which one, and what of it; empty where there is less."""
    rest, _, name = module.rpartition(".")
    path, _, expert = rest.rpartition(".")
    return path, expert, name
