"""Kernels of adapters by Triton's interpreter, against plain torch, token by token, and a fused
model with adapters against the plain one.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import tempfile
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from tests.fakes.interpreted_gemma import PlainChooser
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.side_streams import EagerSide
from tests.fakes.tiny_models import GEMMA, MIXTURES, NATIVE, random_prompt, save_tiny_model
from workers.adapters import device_stage
from workers.adapters.adapted_products import AdapterWays, AddedBehind, StepGroups
from workers.adapters.added_beside import AddedBeside, ShrunkBeside
from workers.adapters.banks import Banks
from workers.adapters.device_stage import DeviceStage
from workers.adapters.dressed import DressedModel
from workers.adapters.expert_site import ExpertsSite
from workers.adapters.host import HostAdapter
from workers.adapters.low_rank import LowRank
from workers.adapters.ref import AdapterRef
from workers.adapters.sites import PROJECTIONS, AdapterTargets, adapter_info, sites_of
from workers.adapters.worn import WornAdapters
from workers.config import EngineConfig
from workers.layers.cuda import expert_adapters, routed_experts
from workers.layers.cuda.adapter_groups import group_tokens
from workers.layers.cuda.adapter_products import AdapterMatrices, AdapterTiles, OutputBlocks
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.gemm.matrix import BiasedProducts, PartialGemm
from workers.loading.loader import load_model
from workers.models import cuda_stream, registry
from workers.models.cuda_gemma import CudaGemmaForCausalLM
from workers.models.cuda_llama import CudaLlamaForCausalLM
from workers.parallel.group import SingleRank
from workers.scheduler.adapter_plan import NO_ADAPTERS, AdapterPlan, WornAdapter

ADAPTER_OF_ROW = torch.tensor([2, 0, 1], dtype=torch.int32)
MAX_RANK = 8


class Dressed:
    """As ModelRows asks for a model."""

    def __init__(self, model, dressed):
        self.compute_logits, self._dressed = model.compute_logits, dressed

    def __call__(self, tokens, batch):
        return self._dressed(tokens, batch)


class Hooked:
    """The plain model, told which tokens have which adapter."""

    def __init__(self, model, worn):
        self.compute_logits, self._model, self._worn = model.compute_logits, model, worn

    def __call__(self, tokens, batch):
        rows = batch.req_pool_indices.repeat_interleave(batch.extend_seq_lens)
        of_tokens = ADAPTER_OF_ROW[rows]
        self._worn.groups = [(slot, torch.nonzero(of_tokens == slot).flatten()) for slot in (1, 2)]
        return self._model(tokens, batch)


def filled_banks(model, architecture, targets=PROJECTIONS):
    """Two adapters of unlike ranks, the second of which leaves some modules as they are."""
    generator = torch.Generator().manual_seed(0)
    sites = sites_of(model, architecture, targets)
    banks = Banks.of(sites, 2, MAX_RANK, torch.float32, torch.device("cpu"))
    for slot, rank in ((1, 8), (2, 3)):
        whole = {}
        for module, (in_features, out_features) in shapes_of(sites).items():
            if slot == 2 and module.endswith(("k_proj", "1.up_proj", "2.down_proj")):
                continue
            a = torch.randn(rank, in_features, generator=generator) * 0.1
            b = torch.randn(out_features, rank, generator=generator) * 0.1
            whole[module] = LowRank(a, b)
        pairs = {key: one for site in sites for key, one in site.share_of(whole).items()}
        for bank in banks.all():
            bank.fill(slot, HostAdapter(AdapterRef("", "", ""), pairs))
    return banks


def shapes_of(sites):
    """Of all modules that adapters may change, those of single experts among them."""
    shapes = {module: shape for site in sites for module, shape in site.modules.items()}
    for names in (site.names for site in sites if isinstance(site, ExpertsSite)):
        parts = names.gate, names.up, names.down
        modules = [f"{names.path}.{x}.{part}" for x in range(names.num_experts) for part in parts]
        shapes |= {module: names.shape_of(module) for module in modules}
    return shapes


def check_model(tiny, folder, name, fused_class, add, over_ranks, targets=PROJECTIONS):
    """Prompts in chunks beside each other, then tokens one by one."""
    save_tiny_model(tiny, folder)
    prompts = [random_prompt(9, seed=seed) for seed in range(3)]
    steps = [{0: prompts[0][:5], 1: prompts[1]}, {2: prompts[2], 0: prompts[0][5:]}]
    steps.append({0: [5], 1: [6], 2: [7]})
    plain_class = getattr(registry, name)
    outputs = []
    for model_class in (plain_class, fused_class):
        setattr(registry, name, model_class)
        loaded = load_model(
            EngineConfig(model=str(folder)), SingleRank(), torch.device("cpu"), torch.float32
        )
        assert type(loaded.model) is model_class
        banks = filled_banks(loaded.model, loaded.facts.architecture, targets)
        if model_class is plain_class:
            worn = WornAdapters()
            for bank in banks.all():
                bank.hook(worn, SingleRank())
            model = Hooked(loaded.model, worn)
        else:
            dressed = DressedModel(
                loaded.model, banks, ADAPTER_OF_ROW, AdapterWays(add, over_ranks)
            )
            model = Dressed(loaded.model, dressed)
        rows = ModelRows(loaded, torch_native_backend(loaded))
        rows.model = model
        outputs.append(torch.cat([row for step in steps for row in rows.step(step).values()]))
    setattr(registry, name, plain_class)
    plain, fused = outputs
    assert torch.allclose(plain, fused, rtol=0, atol=1e-4), (plain - fused).abs().max()


def check_ways_of_a_stage():
    """Beside the products, as many ranks as there are, unless bits must not depend on a step."""
    asked, kept = [], device_stage.ways_beside
    ways = AdapterWays(AddedBehind, AddedBehind)
    device_stage.ways_beside = lambda device, num_ranks: asked.append(num_ranks) or ways
    plain_class = registry.LlamaForCausalLM
    registry.LlamaForCausalLM = CudaLlamaForCausalLM
    with tempfile.TemporaryDirectory() as folder:
        save_tiny_model(NATIVE["llama3"], Path(folder))
        config = EngineConfig(model=folder)
        loaded = load_model(config, SingleRank(), torch.device("cpu"), torch.float32)
    registry.LlamaForCausalLM = plain_class
    banks = filled_banks(loaded.model, loaded.facts.architecture)
    info = adapter_info([bank.site for bank in banks.projections], MAX_RANK, 2)
    for is_deterministic, expected in ((True, []), (False, [1])):
        stage = DeviceStage.of(loaded.model, SingleRank(), info, None, banks, 4, is_deterministic)
        assert asked == expected
    device_stage.ways_beside = kept
    check_upload_after_no_memory(stage)


def check_upload_after_no_memory(stage):
    """Who wears what is on the device before the next step, where there was no memory for it."""
    stage.apply(AdapterPlan(worn=(WornAdapter(0, 1),)))
    assert stage._on_device.tolist() == [1, 0, 0, 0]
    kept, device_stage.upload = device_stage.upload, without_memory
    try:
        stage.apply(AdapterPlan(bare=(0,), worn=(WornAdapter(2, 2),)))
    except torch.OutOfMemoryError:
        device_stage.upload = kept
    stage.apply(NO_ADAPTERS)
    assert stage._on_device.tolist() == [0, 0, 2, 0]


def without_memory(arrays, device):
    raise torch.OutOfMemoryError


def check(num_tokens, num_slots, max_rank, num_inputs, parts, dtype, tolerance):
    """parts: outputs of each."""
    num_outputs, num_parts = sum(parts), len(parts)
    starts = [sum(parts[:index]) for index in range(num_parts)]
    slices = [slice(start, start + size) for start, size in zip(starts, parts, strict=True)]
    a = torch.randn(num_slots + 1, num_parts * max_rank, num_inputs).to(dtype)
    b = torch.randn(num_slots + 1, num_outputs, max_rank).to(dtype) / max_rank
    ranks = torch.randint(0, max_rank + 1, (num_slots + 1, num_parts), dtype=torch.int32)
    ranks[0] = 0
    # Beyond a slot's ranks lie zeros, and beyond a block of them what nobody may read.
    block = AdapterTiles().rank_block(max_rank)
    for slot, part in torch.cartesian_prod(torch.arange(num_slots + 1), torch.arange(num_parts)):
        rank, end = int(ranks[slot, part]), (part + 1) * max_rank
        unread = -(-rank // block) * block
        a[slot, part * max_rank + rank : end] = 0
        b[slot, slices[part], rank:] = 0
        a[slot, min(part * max_rank + unread, end) : end] = torch.nan
        b[slot, slices[part], unread:] = torch.nan
    adapter_of_slot = torch.randint(0, num_slots + 1, (20,), dtype=torch.int32)
    token_slots = torch.randint(0, 20, (num_tokens,))
    groups = group_tokens(adapter_of_slot, token_slots, num_slots)
    x = torch.randn(num_tokens, num_inputs + 8).to(dtype)[:, :num_inputs]
    out = torch.randn(num_tokens, num_outputs).to(dtype)
    expected = out.float().clone()
    for token in range(num_tokens):
        slot = int(adapter_of_slot[token_slots[token]])
        for part in range(num_parts if slot else 0):
            rank, rows = int(ranks[slot, part]), slices[part]
            first = part * max_rank
            shrunk = a[slot, first : first + rank].float() @ x[token].float()
            expected[token, rows] += b[slot, rows, :rank].float() @ shrunk.to(dtype).float()
    before = out.clone()
    matrices = AdapterMatrices(a, b, ranks, OutputBlocks.of(slices, out.device))
    matrices.add_to(out, x, groups)
    close = partial(torch.testing.assert_close, atol=tolerance, rtol=tolerance)
    close(out.float(), expected)
    bare = adapter_of_slot[token_slots] == 0
    assert torch.equal(out[bare], before[bare])
    shrunk = matrices.new_shrunk(x)
    matrices.shrink(shrunk, x, groups)
    alone = torch.full_like(out, torch.nan)
    matrices.expand_alone(alone, shrunk, groups)
    close(alone.float(), expected - before.float())
    assert not alone[bare].any()
    check_beside(x.contiguous(), matrices, groups, close)


def check_beside(x, matrices, groups, close):
    """Products of one part and of two, one with a bias, beside adapters and before them."""
    num_outputs, num_inputs = matrices.b.shape[1], x.shape[1]
    weight = torch.randn(num_outputs, num_inputs).to(x.dtype) / num_inputs**0.5
    step, side = StepGroups(groups), EagerSide()

    def multiply(x, weight, new, num_parts):
        side.events.append("product")
        dtype = x.dtype if num_parts == 1 else torch.float32
        out = new((num_parts, *x.shape[:1], num_outputs), dtype=dtype, device=x.device)
        for part, (own_x, own_weight) in enumerate(
            zip(x.chunk(num_parts, 1), weight.chunk(num_parts, 1), strict=True)
        ):
            out[part] = own_x.to(dtype) @ own_weight.to(dtype).T
        return out

    for num_parts in (1, 2):
        gemm = PartialGemm(weight, {1 << 20: partial(multiply, num_parts=num_parts)})
        products = BiasedProducts(gemm, torch.randn(num_outputs).to(x.dtype))
        expected = AddedBehind(products, matrices, step)(x).float().sum(0)
        side.events.clear()
        beside = AddedBeside(products, matrices, step, side)
        parts = beside(x)
        assert parts.shape == (num_parts + 1, len(x), num_outputs)
        assert parts.is_contiguous()
        close(parts.float().sum(0), expected)
        assert side.events == ["product", "fork", "join"]
        side.events.clear()
        into = beside.into(torch.empty, x)
        assert len(into) == num_parts
        close(into.float().sum(0), expected)
        assert side.events == ["fork", "product", "join"]
        side.events.clear()
        many = AddedBeside(products, matrices, step, side, max_tokens=len(x) - 1)
        close(many(x).float().sum(0), expected)
        close(many.into(torch.empty, x).float().sum(0), expected)
        assert side.events == ["product"] * 2


def check_ranks():
    """What two ranks with half of the inputs each leave for a sum is what one rank has."""
    num_slots, max_rank, size = 3, 24, 96
    a = torch.randn(num_slots + 1, max_rank, size) / size**0.5
    b = torch.randn(num_slots + 1, size, max_rank)
    ranks = torch.tensor([[0], [24], [0], [24]], dtype=torch.int32)
    x, weight = torch.randn(11, size), torch.randn(size, size)
    step = StepGroups(group_tokens(torch.arange(4).int(), torch.arange(11) % 4, num_slots))
    blocks = OutputBlocks.of([slice(0, size)], x.device)

    def result(columns, add):
        def multiply(x, weight, new):
            out = new((1, len(x), size), dtype=x.dtype, device=x.device)
            return out.copy_(x @ weight.T)

        gemm = PartialGemm(weight[:, columns].contiguous(), {1 << 20: multiply})
        matrices = AdapterMatrices(a[:, :, columns].contiguous(), b, ranks, blocks)
        own = x[:, columns].contiguous()
        return add(gemm, matrices, step)(own)

    whole = result(slice(0, size), AddedBehind)
    halves = slice(0, size // 2), slice(size // 2, size)
    for add in (AddedBehind, partial(ShrunkBeside, side=EagerSide())):
        parts = [result(columns, add) for columns in halves]
        assert [len(one) for one in parts] == [1, 1]
        torch.testing.assert_close(sum(parts), whole, atol=1e-4, rtol=1e-4)


def check_groups(num_tokens, num_slots):
    adapter_of_slot = torch.randint(0, num_slots + 1, (9,), dtype=torch.int32)
    token_slots = torch.randint(0, 9, (num_tokens,))
    groups = group_tokens(adapter_of_slot, token_slots, num_slots)
    of_tokens = adapter_of_slot[token_slots]
    for slot in range(num_slots + 1):
        own = torch.nonzero(of_tokens == slot).flatten().int()
        assert int(groups.counts[slot]) == len(own)
        assert torch.equal(groups.order[slot, : len(own)], own)


if __name__ == "__main__":
    torch.manual_seed(0)
    check_groups(5, 3)
    check_groups(2500, 2)
    check(5, 3, 8, 40, (24, 16, 16), torch.float32, 1e-4)
    check(37, 2, 20, 150, (70,), torch.float32, 1e-4)
    check(19, 2, 16, 64, (40, 40), torch.float16, 2e-2)
    check(9, 3, 40, 300, (70, 26), torch.float32, 1e-3)
    # Ranks of 1 and of as many as there may be; inputs that twice as many programs share.
    check(3, 1, 1, 24, (16,), torch.float32, 1e-4)
    check(7, 2, 256, 130, (48,), torch.float32, 1e-3)
    check(5, 2, 8, 8320, (16, 8), torch.float32, 2e-3)
    check_ranks()
    check_ways_of_a_stage()
    cuda_stream.GemmChooser = PlainChooser
    for module in (routed_experts, expert_adapters):
        module.DeviceLimits = SimpleNamespace(of=lambda device: HOPPER)
    # Of the steps the first has 14 tokens, one more than its limit.
    side = EagerSide()
    beside = partial(AddedBeside, side=side, max_tokens=13)
    shrunk = partial(ShrunkBeside, side=side, max_tokens=13)
    for tiny, name, fused_class, add, over_ranks in (
        (NATIVE["llama3"], "LlamaForCausalLM", CudaLlamaForCausalLM, AddedBehind, AddedBehind),
        (NATIVE["llama3"], "LlamaForCausalLM", CudaLlamaForCausalLM, beside, beside),
        (GEMMA["gemma2"], "GemmaForCausalLM", CudaGemmaForCausalLM, beside, shrunk),
        (MIXTURES["qwen2_moe"], "LlamaForCausalLM", CudaLlamaForCausalLM, beside, beside),
    ):
        targets = AdapterTargets(embeddings=True, experts="moe" in tiny.model_type)
        with tempfile.TemporaryDirectory() as folder:
            check_model(tiny, Path(folder), name, fused_class, add, over_ranks, targets)
    assert side.events
    assert side.events == ["fork", "join"] * (len(side.events) // 2)
    print("all equal")
