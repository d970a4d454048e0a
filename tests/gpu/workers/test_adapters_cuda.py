"""Adapters on an NVIDIA GPU: kernels against plain torch, engines against merged models."""

from contextlib import nullcontext
from functools import partial

import pytest
import torch

from tests.fakes.adapters import ATTENTION, EVERY, merged_reference, save_adapter
from tests.fakes.tiny_models import TinyModel, eager_reference, random_prompt, save_tiny_model
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU
from tests.gpu.workers.test_deepseek_cuda import (
    MAX_SHARE,
    NEAR_TIE,
    below_the_likeliest,
    logits_of,
)
from workers.adapters.folder import adapter_at
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

NUM_TOKENS = 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
# Wide enough for the fused kernels; in wider rows than the tiny ones numbers as large as theirs
# would let a rounding of bfloat16 change any token.
MODEL = TinyModel(
    "llama",
    {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "num_attention_heads": 4,
        "initializer_range": 0.06,
    },
)
PROMPTS = [random_prompt(length, length) for length in (3, 17, 40, 64, 90)]


@pytest.mark.parametrize(("num_tokens", "rank"), [(1, 32), (64, 32), (64, 5), (700, 200)])
def test_kernels_add_what_plain_torch_adds(num_tokens, rank) -> None:
    from workers.layers.cuda.adapter_groups import group_tokens
    from workers.layers.cuda.adapter_products import AdapterMatrices, OutputBlocks

    torch.manual_seed(0)
    num_slots, num_inputs, parts = 3, 1024, [slice(0, 512), slice(512, 640), slice(640, 768)]
    a = torch.randn(num_slots + 1, 3 * 256, num_inputs, device=CUDA).bfloat16() / 32
    b = torch.randn(num_slots + 1, 768, 256, device=CUDA).bfloat16()
    for part in range(3):
        a[:, part * 256 + rank : (part + 1) * 256] = 0
    b[:, :, rank:] = 0
    ranks = torch.full((num_slots + 1, 3), rank, dtype=torch.int32, device=CUDA)
    ranks[0] = 0
    adapter_of_slot = torch.tensor([0, 1, 2, 3, 2], dtype=torch.int32, device=CUDA)
    token_slots = torch.randint(0, 5, (num_tokens,), device=CUDA)
    x = torch.randn(num_tokens, num_inputs, device=CUDA).bfloat16()
    out = torch.zeros(num_tokens, 768, device=CUDA)
    matrices = AdapterMatrices(a, b, ranks, OutputBlocks.of(parts, CUDA))
    groups = group_tokens(adapter_of_slot, token_slots, num_slots)
    matrices.add_to(out, x, groups)
    shrunk, alone = matrices.new_shrunk(x), torch.full_like(out, torch.nan)
    matrices.shrink(shrunk, x, groups, follows_own_stream=False)
    matrices.expand_alone(alone, shrunk, groups)
    assert torch.equal(alone, out)
    of_tokens = adapter_of_slot[token_slots].tolist()
    for token, slot in enumerate(of_tokens):
        for part, rows in enumerate(parts):
            shrunk = a[slot, part * 256 : part * 256 + rank].float() @ x[token].float()
            expected = (b[slot, rows, :rank].float() @ shrunk) * (slot > 0)
            error = (out[token, rows] - expected).abs().max()
            assert error <= 0.01 * expected.abs().max() + 1e-3


class InOrder:
    """A SideStream that is none: everything in the order of its launch."""

    def forked(self):
        return nullcontext()

    def join(self):
        pass


class Layers:
    """Six blocks of a product to twice as many features, gate-and-multiply, a product back and a
    join, whose products have adapters; all kernels that may start before their predecessor ends."""

    NUM_TOKENS, SIZE, RANK, NUM_SLOTS = 64, 2048, 32, 8

    def __init__(self, num_parts) -> None:
        torch.manual_seed(0)
        self.num_parts = num_parts
        self.x = torch.randn(self.NUM_TOKENS, self.SIZE, device=CUDA).bfloat16()
        self.scale = torch.ones(self.SIZE, device=CUDA).bfloat16()
        self.adapter_of_slot = torch.zeros(self.NUM_TOKENS, dtype=torch.int32, device=CUDA)
        self.token_slots = torch.arange(self.NUM_TOKENS, device=CUDA)
        self.layers = [(self._layer(2), self._layer(1)) for _ in range(6)]

    def _layer(self, num_parts):
        """parts: of the adapter's outputs."""
        from workers.layers.cuda.adapter_products import AdapterMatrices, OutputBlocks
        from workers.layers.gemm.matrix import PartialGemm

        size = self.SIZE
        shape = (self.NUM_SLOTS + 1, num_parts)
        a = torch.zeros(shape[0], num_parts * self.RANK, size, device=CUDA).bfloat16()
        b = torch.zeros(shape[0], num_parts * size, self.RANK, device=CUDA).bfloat16()
        ranks = torch.zeros(shape, dtype=torch.int32, device=CUDA)
        rows = [slice(part * size, (part + 1) * size) for part in range(num_parts)]
        weight = torch.randn(num_parts * size, size, device=CUDA).bfloat16() / size**0.5
        gemm = PartialGemm(weight, {1 << 20: self._multiply})
        return gemm, AdapterMatrices(a, b, ranks, OutputBlocks.of(rows, CUDA))

    def _multiply(self, x, weight, new):
        from workers.layers.gemm.configs import GemmConfig
        from workers.layers.gemm.skinny import triton_gemm

        return triton_gemm(x, weight, GemmConfig("skinny", 64, 128, self.num_parts, 3, 4), new)

    def load(self, seed) -> None:
        """Other adapters into all slots, of a rank that depends on seed, and others for tokens."""
        generator = torch.Generator(CUDA).manual_seed(seed)
        rank = 8 if seed % 3 == 1 else self.RANK
        for _, matrices in (one for layer in self.layers for one in layer):
            matrices.a[1:].normal_(0, 1 / 64, generator=generator)
            matrices.b[1:].normal_(0, 1 / 8, generator=generator)
            for rows in matrices.a.split(self.RANK, dim=1):
                rows[:, rank:] = 0
            matrices.b[:, :, rank:] = 0
            matrices.ranks[1:] = rank
        self.deal(torch.randint(0, 9, (self.NUM_TOKENS,), generator=generator, device=CUDA))

    def deal(self, adapters) -> None:
        self.adapter_of_slot.copy_(adapters)

    def run(self, add):
        """add: (products, matrices, step) -> products, or None for no adapters."""
        from workers.adapters.adapted_products import StepGroups
        from workers.layers.cuda.activation import gate_and_mul
        from workers.layers.cuda.adapter_groups import group_tokens
        from workers.layers.cuda.norm import add_rms_norm_

        step = StepGroups(group_tokens(self.adapter_of_slot, self.token_slots, self.NUM_SLOTS))
        residual, hidden = self.x.clone(), self.x
        for layer in self.layers:
            up, down = (one[0] if add is None else add(*one, step) for one in layer)
            inner = gate_and_mul(up(hidden), hidden.dtype, "silu")
            hidden = add_rms_norm_(down(inner), residual, self.scale, 1e-5)
        return hidden


def graph_of(run):
    """torch's way, with one call before it that compiles."""
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    return graph, found


@pytest.mark.parametrize("num_parts", [1, 2])
def test_adapters_beside_are_the_same_bits_as_one_after_the_other(num_parts) -> None:
    from workers.adapters.adapted_products import AddedBehind
    from workers.adapters.added_beside import AddedBeside, ways_beside

    layers, in_order = Layers(num_parts), partial(AddedBeside, side=InOrder())
    beside = ways_beside(CUDA, 1).own
    layers.load(0)
    graph, replayed = graph_of(lambda: layers.run(beside))
    for seed in range(1, 6):
        layers.load(seed)
        expected = layers.run(in_order)
        behind = layers.run(AddedBehind)
        assert (expected - behind).abs().mean() < 0.03 * behind.abs().mean()
        assert (expected - layers.run(None)).abs().mean() > 0.1 * behind.abs().mean()
        for _ in range(30):
            graph.replay()
            assert torch.equal(replayed, expected)
            assert torch.equal(layers.run(beside), expected)


@pytest.mark.parametrize("num_parts", [1, 2])
def test_a_graph_without_adapters_in_its_rows_adds_nothing(num_parts) -> None:
    from workers.adapters.added_beside import ways_beside

    layers = Layers(num_parts)
    layers.load(0)
    beside = ways_beside(CUDA, 1).own
    graph, replayed = graph_of(lambda: layers.run(beside))
    layers.deal(torch.zeros(layers.NUM_TOKENS, device=CUDA))
    graph.replay()
    assert torch.equal(replayed, layers.run(None))


def test_a_place_of_its_own_gets_the_sum_of_one_part() -> None:
    """What ranks leave for each other (into)."""
    from workers.adapters.adapted_products import AddedBehind, StepGroups
    from workers.adapters.added_beside import ways_beside
    from workers.layers.cuda.adapter_groups import group_tokens

    layers = Layers(1)
    layers.load(0)
    step = StepGroups(group_tokens(layers.adapter_of_slot, layers.token_slots, layers.NUM_SLOTS))
    gemm, matrices = layers.layers[0][0]
    place = torch.empty(1, layers.NUM_TOKENS, 2 * layers.SIZE, device=CUDA).bfloat16()
    expected = AddedBehind(gemm, matrices, step)(layers.x)
    beside = ways_beside(CUDA, 2).over_ranks(gemm, matrices, step)
    for _ in range(50):
        found = beside.into(lambda *size, **kinds: place, layers.x)
        assert found is place
        assert torch.equal(found, expected)
        place.fill_(torch.nan)


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_tokens_are_likeliest_of_merged_models(
    has_graphs, is_beside, tmp_path, monkeypatch
) -> None:
    from workers.adapters import device_stage
    from workers.adapters.adapted_products import AdapterWays, AddedBehind

    if not is_beside:
        behind = AdapterWays(AddedBehind, AddedBehind)
        monkeypatch.setattr(device_stage, "ways_beside", lambda *_: behind)
    folder = save_tiny_model(MODEL, tmp_path / "model")
    base = eager_reference(folder).eval()
    adapters = [
        save_adapter(tmp_path / "0", base, 0, rank=8, targets=EVERY, lora_alpha=8),
        save_adapter(tmp_path / "1", base, 1, rank=32, targets=ATTENTION, lora_alpha=16),
    ]
    references = [base, *(merged_reference(folder, adapter) for adapter in adapters)]
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        max_loras=2,
        max_running_requests=16,
        enable_cuda_graphs=has_graphs,
    )
    engine = Engine.from_config(config)
    try:
        while engine.prepare_while_idle():
            pass
        info = engine.info.adapters
        refs = [None, *(adapter_at(str(n), one, info) for n, one in enumerate(adapters))]
        worn = [ref for ref in refs for _ in PROMPTS]
        for _ in range(2):
            results = engine.generate(PROMPTS * len(refs), GREEDY, adapters=worn)
        engine.check_integrity()
    finally:
        engine.close()
    for index, reference in enumerate(references):
        own = results[index * len(PROMPTS) : (index + 1) * len(PROMPTS)]
        found = gaps(reference.to(CUDA), [result.token_ids for result in own])
        assert (found > NEAR_TIE).float().mean() < MAX_SHARE, (index, found)


def gaps(reference, outputs):
    """How far below its likeliest token's logit a model in float32 puts each token."""
    logits = logits_of(reference, PROMPTS, outputs)
    return below_the_likeliest(logits, torch.tensor(sum(outputs, []), device=CUDA))


def test_a_step_without_adapters_is_the_models_own(tmp_path) -> None:
    folder = save_tiny_model(MODEL, tmp_path / "model")
    texts = []
    for max_loras in (0, 2):
        config = EngineConfig(
            model=str(folder), dtype="bfloat16", max_loras=max_loras, num_pages=400, page_size=16
        )
        engine = Engine.from_config(config)
        try:
            texts.append([one.token_ids for one in engine.generate(PROMPTS, GREEDY)])
        finally:
            engine.close()
    assert texts[0] == texts[1]
