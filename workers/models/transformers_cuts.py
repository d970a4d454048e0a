"""How a rank's share of transformers' modules is cut, and what its modules do beside their forward.

The styles are those of transformers' tensor-parallel plans, in the sense of its
distributed/tensor_parallel.py; the scheme is Megatron-LM's (Shoeybi et al., 2019, section 3). Knows
no plan and no checkpoint.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn
from torch.nn import functional

from workers.parallel.group import TPGroup


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter's dimension dim is num_parts tensors in a row, each of which is cut over ranks.

    may_be_uneven: the last ranks may have less, as torch.chunk gives it.
    """

    dim: int
    num_parts: int = 1
    may_be_uneven: bool = False


class Style(Protocol):
    """What a plan says of a module and its own parameters."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        """Of the module's parameter of that name; None where every rank has all of it."""

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        """Let the module take and give what it does on one rank. Its parameters are this rank's."""


class Replicated:
    """All of it on every rank."""

    def cut(self, name: str, parameter: torch.Tensor) -> None:
        return None

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        """It does what it does on one rank."""


class Columnwise:
    """Output features are cut, and stay so. Of experts in one tensor, (experts, out, in)."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut:
        return Cut(max(0, parameter.dim() - 2))

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        """Its parameters alone make it give its share."""


class GatheredColumnwise:
    """Output features are cut and joined again: a vocabulary, or heads that cannot be cut."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut:
        return Cut(0, may_be_uneven=True)

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        def gather(module: nn.Linear, inputs: object, output: torch.Tensor) -> torch.Tensor:
            widest = -(-module.out_features // tp.size)
            output = functional.pad(output, (0, widest - output.shape[-1]))
            return tp.all_gather_last_dim(output)[..., : module.out_features]

        module.register_forward_hook(gather)


class PackedColumnwise(Columnwise):
    """As Columnwise, of two matrices one after the other: gate and up."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut:
        return Cut(max(0, parameter.dim() - 2), num_parts=2)


class Rowwise:
    """Input features are cut, outputs summed. The bias is rank 0's: so it is added once."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut | None:
        return None if name == "bias" else Cut(parameter.dim() - 1)

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        bias = dict(module.named_parameters(recurse=False)).get("bias")
        if bias is not None and tp.rank > 0:
            bias.data.zero_()
        SummedOutput().install(module, tp)


class SplitInputRowwise(Rowwise):
    """As Rowwise, of an input that every rank has whole."""

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        def split(module: nn.Linear, inputs: tuple[torch.Tensor]) -> torch.Tensor:
            width = module.in_features // tp.size
            return inputs[0].narrow(-1, tp.rank * width, width)

        module.register_forward_pre_hook(split)
        super().install(module, tp)


class SummedOutput(Replicated):
    """Nothing of its own is cut; what it gives is this rank's part of a sum. Experts."""

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        def add_up(module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
            return tp.all_reduce(output)

        module.register_forward_hook(add_up)


class VocabularyRows:
    """An embedding whose rows are cut: a rank gives zeros for the tokens of others."""

    def cut(self, name: str, parameter: torch.Tensor) -> Cut:
        return Cut(0, may_be_uneven=True)

    def install(self, module: nn.Module, tp: TPGroup) -> None:
        rows = _OwnRows(module, tp)
        module.register_forward_pre_hook(rows.before)
        module.register_forward_hook(rows.after)


class _OwnRows:
    """Around an embedding's forward, which may do more than look up: a factor is kept."""

    def __init__(self, module: nn.Module, tp: TPGroup) -> None:
        assert isinstance(module, nn.Embedding)
        self._tp = tp
        self._num_rows = module.weight.shape[0]
        self._first_row = tp.rank * -(-module.num_embeddings // tp.size)
        self._is_elsewhere = torch.zeros(0, dtype=torch.bool)

    def before(self, module: nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        local = inputs[0] - self._first_row
        self._is_elsewhere = (local < 0) | (local >= self._num_rows)
        return local.masked_fill(self._is_elsewhere, 0)

    def after(self, module: nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
        return self._tp.all_reduce(output.masked_fill(self._is_elsewhere.unsqueeze(-1), 0))


_GATHERED, _SPLIT_INPUT, _REPLICATED = GatheredColumnwise(), SplitInputRowwise(), Replicated()

STYLES: Mapping[str, Style] = {
    "colwise": Columnwise(),
    "colwise_gather_output": _GATHERED,
    "colwise_rep": _GATHERED,
    "packed_colwise": PackedColumnwise(),
    "rowwise": Rowwise(),
    "rowwise_split_input": _SPLIT_INPUT,
    "rowwise_rep": _SPLIT_INPUT,
    "embedding_rowwise": VocabularyRows(),
    "moe_tp_experts": SummedOutput(),
    "all_reduce": SummedOutput(),
    # These differ in gradients and in how transformers runs them only.
    "replicate": _REPLICATED,
    "replicated_with_grad_allreduce": _REPLICATED,
    "mla_kv_a_proj": _REPLICATED,
    "local_params": _REPLICATED,
}
"""By transformers' names. What is not here is refused."""

JOINING_STYLES = (GatheredColumnwise, Rowwise, SummedOutput)
"""Of whose output all ranks have the same bits."""
