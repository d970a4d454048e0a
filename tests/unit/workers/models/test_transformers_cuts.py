"""What a style of a tensor-parallel plan makes of a module: ranks together give what one does."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.fakes.thread_ranks import ThreadRanks
from workers.models.transformers_cuts import STYLES, Cut

SIZE = 2
INPUT = torch.randn(5, 12, generator=torch.Generator().manual_seed(0))


def share(tensor, cut, rank):
    """As torch.chunk cuts it; of each of the parts that lie one after the other."""
    if cut is None:
        return tensor
    parts = tensor.chunk(cut.num_parts, cut.dim)
    return torch.cat([part.chunk(SIZE, cut.dim)[rank] for part in parts], cut.dim)


def on_ranks(module, styles, tensor):
    """What every rank gives of it. styles: by the names of parts of the module."""

    def compute(tp):
        own = copy.deepcopy(module)
        for path, name in styles.items():
            part, style = own.get_submodule(path), STYLES[name]
            for key, parameter in list(part.named_parameters(recurse=False)):
                cut = style.cut(key, parameter)
                setattr(part, key, nn.Parameter(share(parameter, cut, tp.rank), False))
            style.install(part, tp)
        return own(tensor)

    return ThreadRanks(SIZE).run(compute)


def check(module, styles, tensor=INPUT):
    for given in on_ranks(module, styles, tensor):
        torch.testing.assert_close(given, module(tensor), rtol=1e-5, atol=1e-5)


class GateUp(nn.Module):
    """Gate and up in one matrix."""

    def __init__(self):
        super().__init__()
        self.gate_up = nn.Linear(12, 32)
        self.down = nn.Linear(16, 12)

    def forward(self, x):
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(functional.silu(gate) * up)


def test_features_that_are_cut_are_summed_and_a_bias_is_added_once() -> None:
    module = nn.Sequential(nn.Linear(12, 16), nn.GELU(), nn.Linear(16, 12))
    check(module, {"0": "colwise", "2": "rowwise"})


def test_two_matrices_in_one_are_cut_each() -> None:
    check(GateUp(), {"gate_up": "packed_colwise", "down": "rowwise"})


@pytest.mark.parametrize("width", [16, 15])
def test_features_are_joined_in_order_where_ranks_have_unequal_shares_too(width: int) -> None:
    check(nn.Linear(12, width), {"": "colwise_gather_output"})


def test_an_input_that_all_have_is_split() -> None:
    check(nn.Linear(12, 7), {"": "rowwise_split_input"})


class Scaled(nn.Embedding):
    """As Gemma's."""

    def forward(self, ids):
        return super().forward(ids) * 3.0


@pytest.mark.parametrize("num_rows", [8, 7])
def test_tokens_are_looked_up_where_they_are(num_rows: int) -> None:
    check(Scaled(num_rows, 4), {"": "embedding_rowwise"}, torch.tensor([[0, 6, 3, 4, 6, 1]]))


class Experts(nn.Module):
    """(experts, out, in) in one tensor each, all experts for every token."""

    def __init__(self):
        super().__init__()
        self.gate_up_proj = nn.Parameter(torch.randn(3, 16, 12) * 0.3)
        self.down_proj = nn.Parameter(torch.randn(3, 12, 8) * 0.3)

    def forward(self, x):
        gate, up = torch.einsum("eoi,ni->eno", self.gate_up_proj, x).chunk(2, dim=-1)
        return torch.einsum("eoi,eni->no", self.down_proj, functional.silu(gate) * up)


def test_experts_are_cut_within() -> None:
    experts = Experts()
    gate_up = STYLES["packed_colwise"].cut("gate_up_proj", experts.gate_up_proj)
    down = STYLES["rowwise"].cut("down_proj", experts.down_proj)
    assert (gate_up, down) == (Cut(1, num_parts=2), Cut(2))

    def compute(tp):
        own = copy.deepcopy(experts)
        own.gate_up_proj = nn.Parameter(share(own.gate_up_proj, gate_up, tp.rank), False)
        own.down_proj = nn.Parameter(share(own.down_proj, down, tp.rank), False)
        STYLES["moe_tp_experts"].install(own, tp)
        return own(INPUT)

    for given in ThreadRanks(SIZE).run(compute):
        torch.testing.assert_close(given, experts(INPUT), rtol=1e-4, atol=1e-4)
