"""Modules with a state over rows of a flat batch, and what is found out about them at the start."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn

from attention.memory.slot_states import SlotStates, SnapshotOfRow
from tests.fakes.dense_attention import DenseAttention
from tests.fakes.model_rows import make_batch
from tests.fakes.tiny_state_models import save_state_model
from workers.config import EngineConfig
from workers.errors import ModelLoadError
from workers.loading.loader import load_model
from workers.models.transformers_row_groups import row_groups
from workers.models.transformers_state_probe import StateProbe
from workers.models.transformers_states import (
    RowsCache,
    SlotCache,
    StateModule,
    StepStates,
    joined,
)
from workers.parallel.group import SingleRank

WIDTH = 3


class Sums(nn.Module):
    """Gives each token the sum of its row's tokens so far."""

    ignores_state_of_several = False
    ignores_state = False

    def forward(self, hidden: torch.Tensor, cache_params: Any = None) -> tuple[torch.Tensor, str]:
        before = cache_params.get_linear_cache(0)
        several = hidden.shape[1] > 1
        if before is None or self.ignores_state or (several and self.ignores_state_of_several):
            before = torch.zeros(len(hidden), WIDTH)
        out = before[:, None] + hidden.cumsum(1)
        cache_params.set_linear_cache(0, out[:, -1])
        return out, "not of tokens"


class Forgets(Sums):
    ignores_state_of_several = True


class Broken(Sums):
    ignores_state = True


def probed(module: nn.Module) -> tuple[StateModule, StateProbe]:
    state_module, probe = StateModule(module, 0, 0, 1), StateProbe()
    token = torch.rand(1, 1, WIDTH).expand(1, 2, WIDTH)
    probe.run(state_module, (token,), {"cache_params": SlotCache.__new__(SlotCache)})
    return state_module, probe


def run_step(
    module: StateModule,
    states: SlotStates,
    new: dict[int, int],
    prefix: dict[int, int],
    wanted: Sequence[SnapshotOfRow] = (),
) -> torch.Tensor:
    """Ones for every new token of every slot: each sum is the token's position and one."""
    tokens = {slot: [0] * length for slot, length in new.items()}
    batch = make_batch(tokens, prefix, DenseAttention())
    hidden = torch.ones(1, batch.num_tokens, WIDTH)
    cache = SlotCache.__new__(SlotCache)
    states.begin_step(wanted)
    out, nothing = StepStates(states, batch).run(module, (hidden,), {"cache_params": cache})
    states.commit()
    assert nothing is None
    return out[0, :, 0]


@pytest.mark.parametrize(("kind", "continues_many"), [(Sums, True), (Forgets, False)])
def test_rows_of_all_kinds_go_on_from_their_slots(kind, continues_many) -> None:
    module, probe = probed(kind())
    assert module.continues_many is continues_many
    (tensor,) = probe.entries[0].tensors
    assert (tensor.shape, tensor.dtype) == ((WIDTH,), torch.float32)
    states = SlotStates([probe.entries[0]], 5, torch.device("cpu"))
    assert run_step(module, states, {3: 2, 0: 1, 1: 2}, {3: 0, 0: 0, 1: 0}).tolist() == [
        *(1, 2),
        1,
        *(1, 2),
    ]
    # Two decode, one goes on with several tokens, and slot 0 has a new owner.
    out = run_step(module, states, {1: 1, 0: 3, 3: 1, 2: 4}, {1: 2, 0: 0, 3: 2, 2: 0})
    assert out.tolist() == [3, *(1, 2, 3), 3, *(1, 2, 3, 4)]
    out = run_step(module, states, {2: 3, 0: 3, 1: 1}, {2: 4, 0: 3, 1: 3})
    assert out.tolist() == [*(5, 6, 7), *(4, 5, 6), 4]


def test_rows_of_one_length_share_a_call() -> None:
    batch = make_batch(
        {5: [0], 2: [0, 0], 0: [0], 1: [0, 0], 3: [0]},
        {5: 4, 2: 0, 0: 9, 1: 7, 3: 0},
        DenseAttention(),
    )
    groups = {
        (tuple(map(tuple, g.tokens.tolist())), tuple(g.slots.tolist()), g.kind)
        for g in row_groups(batch, (batch.extend_prefix_lens_cpu == 0).tolist())
    }
    assert groups == {
        (((0,), (3,)), (5, 0), False),
        (((1, 2),), (2,), True),
        (((4, 5),), (1,), False),
        (((6,),), (3,), True),
    }


@pytest.mark.parametrize("kind", [Sums, Forgets])
def test_states_after_some_tokens_of_a_row_become_snapshots(kind) -> None:
    module, probe = probed(kind())
    states = SlotStates([probe.entries[0]], 4, torch.device("cpu"), num_snapshots=5)
    out = run_step(module, states, {2: 6, 0: 2, 1: 6}, {2: 0, 0: 0, 1: 0}, [(0, 4, 3), (1, 2, 0)])
    assert out.tolist() == [*range(1, 7), 1, 2, *range(1, 7)], "no token sees a cut"
    # Row 0 is cut twice, row 1 as row 0 but keeps one state only, row 2 keeps its last.
    run_step(
        module,
        states,
        {2: 5, 1: 5, 0: 1},
        {2: 6, 1: 6, 0: 2},
        [(0, 2, 1), (0, 4, 2), (1, 2, 4), (1, 4, 4), (2, 1, 0)],
    )
    snapshots, slots = states.read(0, torch.arange(4, 9))[0], states.read(0, torch.arange(4))[0]
    assert snapshots[:, 0].tolist() == [3, 8, 10, 4, 10]
    assert slots[:3, 0].tolist() == [3, 11, 11]


def test_a_module_that_does_not_continue_is_refused() -> None:
    with pytest.raises(ModelLoadError, match="Broken does not continue from the state"):
        probed(Broken())


def test_a_module_without_a_cache_is_refused() -> None:
    module = Sums()
    StateModule(module, 0, 0, 1).install()
    with pytest.raises(ModelLoadError, match="Sums does not get its model's cache"):
        module(torch.ones(1, 2, WIDTH))


def test_outputs_are_put_where_their_tokens_are() -> None:
    parts = [
        (torch.tensor([[2], [0]]), (torch.tensor([[[2.0]], [[0.0]]]), None)),
        (torch.tensor([[1, 3]]), (torch.tensor([[[1.0], [3.0]]]), None)),
    ]
    whole, nothing = joined(parts, 4)
    assert whole.tolist() == [[[0.0], [1.0], [2.0], [3.0]]]
    assert nothing is None


def test_a_cache_is_filled_as_transformers_fills_it() -> None:
    module = StateModule(Sums(), 0, 7, 2)
    module.places = (("conv", 1), ("recurrent", 1))
    cache = RowsCache(module, (torch.ones(1, 2, 4), torch.ones(1, 5)))
    assert cache.get_conv_state(7, 0) is None
    assert cache.has_previous_state(7, 1)
    assert not cache.has_previous_state(7, 0)
    longer = cache.update_conv_state(torch.zeros(1, 2, 3), 7, state_idx=1, conv_kernel_size=4)
    assert longer.shape == (1, 2, 7)
    assert cache.kept()["conv", 1].tolist() == [[[1.0, 0.0, 0.0, 0.0]] * 2]


@pytest.mark.parametrize(
    ("model_type", "are_slow"), [("jamba", {True}), ("lfm2", {False}), ("qwen3_next", {False})]
)
def test_how_modules_continue_is_found_out(tmp_path, caplog, model_type, are_slow) -> None:
    save_state_model(model_type, tmp_path)
    config = EngineConfig(model=str(tmp_path), max_context_len=64, model_impl="transformers")
    loaded = load_model(config, SingleRank(), torch.device("cpu"), torch.float32)
    assert len(loaded.model.state_entries) == 2
    assert {"computed token by token" in caplog.text} == are_slow
