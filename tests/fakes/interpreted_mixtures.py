"""Mixtures of experts over fused kernels by Triton's interpreter, against those of plain torch.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import LATENT, MIXTURES, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.layers.cuda import routed_experts
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.gemm.table import Tables
from workers.layers.moe.mixture import MixtureOfExperts
from workers.layers.moe.routing import GroupedSigmoidRouting, SoftmaxRouting
from workers.layers.moe.spec import ExpertNames, MixtureSpec, SharedExperts
from workers.layers.routed_experts import Gating
from workers.layers.sharding import ShardContext, weight_slots
from workers.loading.loader import load_model
from workers.models import cuda_deepseek, cuda_stream, registry
from workers.models.cuda_deepseek import CudaDeepseekForCausalLM
from workers.models.cuda_llama import CudaLlamaForCausalLM
from workers.models.deepseek import DeepseekForCausalLM
from workers.models.llama import LlamaForCausalLM
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
HIDDEN = 48
MAX_ERROR = 1e-4
SPECS = {
    "normed softmax, a gate on shared experts": MixtureSpec(
        8, 32, SoftmaxRouting(3, True), shared=SharedExperts(3, "shared_expert", "shared_gate")
    ),
    "by groups, shared experts": MixtureSpec(
        8, 32, GroupedSigmoidRouting(3, 4, 2, True, 1.3), shared=SharedExperts(1)
    ),
    "biases and a limit": MixtureSpec(
        4,
        32,
        SoftmaxRouting(2, True),
        names=ExpertNames(router="router", is_stacked=True),
        gating=Gating(1.702, 1.5),
        has_bias=True,
        has_router_bias=True,
    ),
}


class OneOf(SingleRank):
    """A rank whose sums over ranks are its own part."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size


class PlainChooser:
    """As GemmChooser, of no device: what is not of 16 bits goes to torch's own product."""

    @staticmethod
    def for_device(device):
        return GemmChooser(Tables({}, {}), Path("/nonexistent"), HOPPER)


def mixture_of(spec, rank, size, ep_size):
    """This rank's share of one and the same random weights."""
    shard = ShardContext(OneOf(rank, size), torch.float32, CPU, ep_size=ep_size)
    block = torch.nn.Module()
    block.mlp = MixtureOfExperts(spec, HIDDEN, shard)
    for name, slot in weight_slots(block).items():
        random = torch.Generator().manual_seed(sum(name.encode()))
        slot.load(torch.randn(slot.shape, generator=random) * 0.3)
    return block.mlp


def check_ranks(spec, num_tokens):
    """What ranks compute adds up to what one does."""
    x = torch.randn(num_tokens, HIDDEN)
    want = mixture_of(spec, 0, 1, 1)(x)
    parts = GroupedMixture(mixture_of(spec, 0, 1, 1), is_summed=False)(x)
    assert parts.shape[0] == spec.num_choices
    assert torch.allclose(parts.sum(0), want, atol=MAX_ERROR)
    for size, ep_size in ((2, 1), (4, 2)):
        mixtures = [mixture_of(spec, rank, size, ep_size) for rank in range(size)]
        summed = [GroupedMixture(one, is_summed=True)(x) for one in mixtures[:1]]
        into = [GroupedMixture(one, is_summed=True).into(torch.empty, x) for one in mixtures[1:]]
        assert torch.allclose(sum(summed + into)[0], want, atol=MAX_ERROR), (size, ep_size)


def check_model(tiny, folder, name, classes):
    """Prompts in chunks beside each other, then tokens one by one: the logits of plain torch."""
    save_tiny_model(tiny, folder)
    first, second = random_prompt(12, seed=1), random_prompt(3, seed=2)
    steps = [{0: first[:11], 1: second[:2]}, {1: second[2:], 0: first[11:]}]
    outputs = []
    for model_class in classes:
        setattr(registry, name, model_class)
        loaded = load_model(EngineConfig(model=str(folder)), SingleRank(), CPU, torch.float32)
        assert type(loaded.model) is model_class
        rows = ModelRows(loaded, torch_native_backend(loaded))
        logits = [row for step in steps for row in rows.step(step).values()]
        outputs.append(torch.cat(logits))
    plain, fused = outputs
    assert torch.allclose(plain, fused, rtol=0, atol=MAX_ERROR), (plain - fused).abs().max()


if __name__ == "__main__":
    torch.manual_seed(0)
    routed_experts.DeviceLimits = SimpleNamespace(of=lambda device: HOPPER)
    cuda_stream.GemmChooser = cuda_deepseek.GemmChooser = PlainChooser
    for spec in SPECS.values():
        check_ranks(spec, 5)
    llamas = LlamaForCausalLM, CudaLlamaForCausalLM
    latents = DeepseekForCausalLM, CudaDeepseekForCausalLM
    for tiny, name, classes in (
        (MIXTURES["qwen2_moe"], "LlamaForCausalLM", llamas),
        (MIXTURES["gpt_oss"], "LlamaForCausalLM", llamas),
        (LATENT["deepseek_v3"], "DeepseekForCausalLM", latents),
    ):
        with tempfile.TemporaryDirectory() as folder:
            check_model(tiny, Path(folder), name, classes)
    print("all equal")
