"""Products with quantised weights are no further from those with the weights that were quantised
than the format's own rounding lets them be, element by element."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.fakes.quantised_checkpoints import FP8, Quantiser, by_scale, mxfp4, quantise_folder
from tests.fakes.quantised_recipes import CASES, TINY, Case
from tests.fakes.tiny_models import MIXTURES, TinyModel, save_tiny_model
from tests.unit.workers.loading.test_quantised_experts import STACKS, WIDE, quantise_stacks
from workers.config import EngineConfig
from workers.layers.formats.layer import LinearLayer
from workers.layers.moe.experts import Experts
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
Product = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Original:
    """A matrix (rows, columns) before it was quantised, and the bound of what that does to it."""

    weight: torch.Tensor
    bound: torch.Tensor

    @classmethod
    def of(cls, weight: torch.Tensor, quantise: Quantiser | None) -> "Original":
        made = None if quantise is None else quantise(weight)
        return cls(weight, torch.zeros_like(weight) if made is None else made.bound)

    @classmethod
    def joined(cls, parts: list["Original"]) -> "Original":
        """Their rows one behind another."""
        weights, bounds = [part.weight for part in parts], [part.bound for part in parts]
        return cls(torch.cat(weights), torch.cat(bounds))

    @torch.inference_mode()
    def check(self, product: Product, name: str) -> None:
        """Of random rows and of every unit vector, whose product is a column of the weight.

        Beyond the bound there is what float32 rounds of a sum of so many terms.
        """
        columns = self.weight.shape[1]
        x = torch.cat([torch.randn(8, columns), torch.eye(columns)])
        error = (product(x).double() - x.double() @ self.weight.double().T).abs()
        sizes = x.abs().double()
        rounded = sizes @ (self.weight.abs() + self.bound).double().T * columns * 2.0**-23
        assert (error <= sizes @ self.bound.double().T + rounded).all(), name
        assert not self.bound.any() or (error > rounded).any(), f"{name} is not quantised"


def load(folder: Path, quantization: Literal["fp8"] | None = None) -> nn.Module:
    config = EngineConfig(model=str(folder), model_impl="native", quantization=quantization)
    return load_model(config, SingleRank(), CPU, torch.float32).model


def check_linear_layers(
    model: nn.Module,
    plain: Mapping[str, torch.Tensor],
    quantiser_of: Callable[[str], Quantiser | None],
) -> None:
    """Of all layers that have a weight of a checkpoint's modules."""
    layers = {path: one for path, one in model.named_modules() if isinstance(one, LinearLayer)}
    assert any(path.endswith("down_proj") for path in layers)
    for path, layer in layers.items():
        prefix = layer.checkpoint_prefix(path)
        modules = [(prefix + module).rstrip(".") for module in layer.weight_cuts()]
        parts = [Original.of(plain[f"{one}.weight"], quantiser_of(one)) for one in modules]
        Original.joined(parts).check(layer, path)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_every_linear_layer_is_within_the_bound(tmp_path: Path, case: Case) -> None:
    folder = save_tiny_model(case.tiny, tmp_path)
    plain = load_file(folder / "model.safetensors")
    quantise_folder(folder, case.config, case.quantiser_of)
    check_linear_layers(load(folder), plain, case.quantiser_of)


def test_weights_rounded_while_loading_are_within_the_bound(tmp_path: Path) -> None:
    folder = save_tiny_model(TINY, tmp_path)
    plain = load_file(folder / "model.safetensors")
    check_linear_layers(load(folder, "fp8"), plain, lambda module: by_scale(FP8, (1, 0)))


def of_matrix(matrix: torch.Tensor) -> Product:
    return lambda x: x @ matrix.T


def experts_of(model: nn.Module) -> tuple[str, Experts]:
    """The last layer's, behind its prefix in the checkpoint."""
    found = [(path, one) for path, one in model.named_modules() if isinstance(one, Experts)]
    path, experts = found[-1]
    return experts.checkpoint_prefix(path), experts


EXPERT_CASES = ("fp8 blocks (DeepSeek)", "int8 channel", "gptq act-order", "packed 8 bits", "mxfp4")


@pytest.mark.parametrize("name", EXPERT_CASES)
def test_stacks_of_separate_experts_are_within_the_bound(tmp_path: Path, name: str) -> None:
    case, changes = CASES[name], {**MIXTURES["qwen3_moe"].changes, **WIDE}
    changes |= {"num_experts": 2, "num_hidden_layers": 2}
    folder = save_tiny_model(TinyModel("qwen3_moe", changes), tmp_path)
    plain = load_file(folder / "model.safetensors")
    quantise_folder(folder, case.config, case.quantiser_of)
    prefix, experts = experts_of(load(folder))
    for expert in range(2):
        gate, up, down = (
            Original.of(plain[f"{module}.weight"], case.quantiser_of(module))
            for part in ("gate_proj", "up_proj", "down_proj")
            for module in [f"{prefix}experts.{expert}.{part}"]
        )
        Original.joined([gate, up]).check(of_matrix(experts.gate_up[expert]), f"{expert} gate, up")
        down.check(of_matrix(experts.down[expert]), f"{expert} down")


def test_stacks_of_mxfp4_are_within_the_bound(tmp_path: Path) -> None:
    """gpt-oss's own, gate and up of which are rows by turns."""
    tiny = MIXTURES["gpt_oss"]
    folder = save_tiny_model(TinyModel("gpt_oss", {**tiny.changes, **WIDE}), tmp_path)
    plain = load_file(folder / "model.safetensors")
    quantise_stacks(folder)
    quantise_folder(folder, STACKS, lambda module: None)
    prefix, experts = experts_of(load(folder))
    for expert, gate_up in enumerate(plain[f"{prefix}experts.gate_up_proj"]):
        turns = gate_up.T.contiguous()
        Original.joined([Original.of(turns[0::2], mxfp4), Original.of(turns[1::2], mxfp4)]).check(
            of_matrix(experts.gate_up[expert]), f"{expert} gate, up"
        )
    for expert, down in enumerate(plain[f"{prefix}experts.down_proj"]):
        Original.of(down.T.contiguous(), mxfp4).check(
            of_matrix(experts.down[expert]), f"{expert} down"
        )
