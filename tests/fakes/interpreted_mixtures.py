"""Mixtures of experts over fused kernels by Triton's interpreter, against those of plain torch.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.fakes.interpreted_threads import run_one_kernel_at_a_time
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import LATENT, MIXTURES, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.layers.cuda import routed_experts
from workers.layers.cuda.experts import GroupedMixture
from workers.layers.cuda.routers import SoftmaxChooser
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
from workers.models.segmented import SegmentedCausalLM
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
    mixtures = [mixture_of(spec, rank, 4, ep_size=2) for rank in range(4)]
    summed = [GroupedMixture(one, is_summed=True)(x) for one in mixtures[:1]]
    into = [GroupedMixture(one, is_summed=True).into(torch.empty, x) for one in mixtures[1:]]
    assert torch.allclose(sum(summed + into)[0], want, atol=MAX_ERROR)
    check_who_finds_places(spec, mixtures[0])
    for one in mixtures:
        one.tally = torch.zeros(spec.num_experts, dtype=torch.int64)
    counting = sum(GroupedMixture(one, is_summed=True)(x) for one in mixtures)
    assert torch.allclose(counting[0], want, atol=MAX_ERROR)
    assert all(torch.equal(one.tally, mixtures[0].tally) for one in mixtures)
    assert int(mixtures[0].tally.sum()) == num_tokens * spec.routing.num_chosen
    for one in mixtures:
        one.tally = None
        one.experts.keep_copies([1] * spec.num_experts)
    check_who_finds_places(spec, mixtures[0], are_fixed=False)
    copied = sum(GroupedMixture(one, is_summed=True)(x) for one in mixtures)
    assert torch.allclose(copied[0], want, atol=MAX_ERROR)


def check_who_finds_places(spec, mixture, are_fixed=True):
    """Softmax's kernel, where they are always the same."""
    if isinstance(spec.routing, SoftmaxRouting):
        here = SoftmaxChooser(mixture, spec.routing)(torch.randn(5, HIDDEN))
        # Who counts other ranks' pairs has looked for their places behind the choice.
        assert (int(here.counts[mixture.experts.share.num_kept]) == 0) == are_fixed


def logits_of(folder, tp, steps, model_class, **settings):
    """Prompts in chunks beside each other, then tokens one by one."""
    config = EngineConfig(model=str(folder), tp_size=tp.size, **settings)
    with torch.inference_mode(mode=False):
        loaded = load_model(config, tp, CPU, torch.float32)
    assert type(loaded.model) is model_class
    rows = ModelRows(loaded, torch_native_backend(loaded))
    if isinstance(loaded.model, SegmentedCausalLM):
        kinds = [type(layer.mlp) for layer in loaded.model.model.decoder_layers]
        assert loaded.model.unlike_layers() == {kinds.index(kind) for kind in set(kinds)}
    return torch.cat([row for step in steps for row in rows.step(step).values()])


def check_model(tiny, folder, name, classes):
    """The logits of plain torch, on one rank and on two."""
    save_tiny_model(tiny, folder)
    first, second = random_prompt(5, seed=1), random_prompt(2, seed=2)
    steps = [{0: first[:4], 1: second[:1]}, {1: second[1:], 0: first[4:]}]
    plain, fused = classes
    setattr(registry, name, plain)
    want = logits_of(folder, SingleRank(), steps, plain)
    setattr(registry, name, fused)
    alone = logits_of(folder, SingleRank(), steps, fused)
    together = ThreadRanks(2).run(lambda tp: logits_of(folder, tp, steps, fused, ep_size=2))
    for got in (alone, *together):
        assert torch.allclose(got, want, rtol=0, atol=MAX_ERROR), (got - want).abs().max()


if __name__ == "__main__":
    torch.manual_seed(0)
    routed_experts.DeviceLimits = SimpleNamespace(of=lambda device: HOPPER)
    cuda_stream.GemmChooser = cuda_deepseek.GemmChooser = PlainChooser
    run_one_kernel_at_a_time()
    for spec in SPECS.values():
        check_ranks(spec, 3)
    llamas = LlamaForCausalLM, CudaLlamaForCausalLM
    latents = DeepseekForCausalLM, CudaDeepseekForCausalLM
    for tiny, name, classes in (
        (MIXTURES["gpt_oss"], "LlamaForCausalLM", llamas),
        (LATENT["deepseek_v3"], "DeepseekForCausalLM", latents),
    ):
        with tempfile.TemporaryDirectory() as folder:
            check_model(tiny, Path(folder), name, classes)
    print("all equal")
