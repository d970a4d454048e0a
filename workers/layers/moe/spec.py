"""What a mixture of experts computes, and what its checkpoint calls it. Knows no tensor and no
config."""

from dataclasses import dataclass, field

from workers.errors import ModelLoadError
from workers.layers.moe.routing import Routing
from workers.layers.routed_experts import SILU, Gating


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """In the checkpoint. block: what a layer calls its mixture; router: within the block; gate, up,
    down: within an expert. is_stacked: one tensor holds all experts, inputs before outputs, else
    every expert has three of its own. in_turns: of a stack, its columns are of gate and up by turns
    (gpt-oss), else all of gate come first (Llama 4)."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_stacked: bool = False
    in_turns: bool = True


@dataclass(frozen=True, slots=True)
class SharedExperts:
    """That all tokens take. num_pieces: in widths of a routed expert. name: within the block.
    gate_name: of what weighs them, by the sigmoid of one product; None where their weight is 1."""

    num_pieces: int
    name: str = "shared_experts"
    gate_name: str | None = None


@dataclass(frozen=True, slots=True)
class MixtureSpec:
    """num_experts routed experts of width columns each. has_bias: of the experts' products.
    weighs_inputs: a choice's weight multiplies what its expert is given, not what it makes.

    Raises ModelLoadError where they cannot be chosen as routing says.
    """

    num_experts: int
    width: int
    routing: Routing
    names: ExpertNames = field(default_factory=ExpertNames)
    shared: SharedExperts | None = None
    gating: Gating = SILU
    has_bias: bool = False
    has_router_bias: bool = False
    weighs_inputs: bool = False

    def __post_init__(self) -> None:
        _check_width(self.width)
        self.routing.check(self.num_experts)
        if self.has_bias and self.shared is not None:
            raise ValueError("pieces of a shared expert would each add its bias")

    @property
    def num_pieces(self) -> int:
        """Of shared experts."""
        return 0 if self.shared is None else self.shared.num_pieces

    @property
    def num_choices(self) -> int:
        """Experts and pieces that a token takes."""
        return self.routing.num_chosen + self.num_pieces


def num_pieces_of(shared_width: int, width: int) -> int:
    """Shared experts as pieces of a routed one's width: the gate goes column by column, and so does
    the sum over the inner dimension. Raises ModelLoadError where they are no whole number."""
    _check_width(width)
    if shared_width % width:
        raise ModelLoadError(
            f"shared experts of width {shared_width} are no multiple of a routed one's, {width}"
        )
    return shared_width // width


def _check_width(width: int) -> None:
    if width < 1:
        raise ModelLoadError(f"experts of width {width} compute nothing")
