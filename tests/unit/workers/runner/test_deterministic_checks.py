"""What deterministic mode refuses, and why."""

from types import SimpleNamespace

import pytest
import torch

from attention.routes import AttentionRoutes
from workers.errors import ConfigError
from workers.runner.deterministic import check_deterministic, check_routes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
FA3 = ("fa3_deterministic",)


def loaded(device=CUDA, implementation="native", states=(), is_invariant=True):
    model = SimpleNamespace(state_entries=states, has_invariant_products=is_invariant)
    facts = SimpleNamespace(architecture="SomeForCausalLM")
    return SimpleNamespace(model=model, facts=facts, implementation=implementation, device=device)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"implementation": "transformers"}, "transformers' own code"),
        ({"states": ("state",)}, "keeps states"),
        ({"is_invariant": False}, "products on GPUs"),
    ],
)
def test_models_whose_bits_depend_on_the_batch_are_refused(changes, why):
    with pytest.raises(ConfigError, match=f"SomeForCausalLM .*{why}.*leave deterministic out"):
        check_deterministic(loaded(**changes))


def test_other_models_are_not():
    check_deterministic(loaded())
    check_deterministic(loaded(device=CPU, is_invariant=False))


def test_one_backend_attends_in_both_phases_and_not_torch_on_a_gpu():
    check_routes(AttentionRoutes(FA3 * 2, FA3 * 2), CUDA)
    check_routes(AttentionRoutes(("torch_native",), ("torch_native",)), CPU)
    with pytest.raises(ConfigError, match="two backends"):
        check_routes(AttentionRoutes(FA3, ("triton_deterministic",)), CUDA)
    with pytest.raises(ConfigError, match="torch_native .* on a GPU; take"):
        check_routes(AttentionRoutes(("torch_native",), ("torch_native",)), CUDA)
