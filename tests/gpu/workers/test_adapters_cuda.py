"""Adapters on an NVIDIA GPU: kernels against plain torch, engines against merged models."""

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


@pytest.mark.parametrize(("num_tokens", "rank"), [(1, 32), (64, 32), (700, 200)])
def test_kernels_add_what_plain_torch_adds(num_tokens, rank) -> None:
    from workers.layers.cuda.adapter_groups import group_tokens
    from workers.layers.cuda.adapter_products import AdapterMatrices, output_blocks

    torch.manual_seed(0)
    num_slots, num_inputs, parts = 3, 1024, [slice(0, 512), slice(512, 640), slice(640, 768)]
    a = torch.randn(num_slots + 1, 3 * 256, num_inputs, device=CUDA).bfloat16() / 32
    b = torch.randn(num_slots + 1, 768, 256, device=CUDA).bfloat16()
    ranks = torch.full((num_slots + 1, 3), rank, dtype=torch.int32, device=CUDA)
    adapter_of_slot = torch.tensor([0, 1, 2, 3, 2], dtype=torch.int32, device=CUDA)
    token_slots = torch.randint(0, 5, (num_tokens,), device=CUDA)
    x = torch.randn(num_tokens, num_inputs, device=CUDA).bfloat16()
    out = torch.zeros(num_tokens, 768, device=CUDA)
    matrices = AdapterMatrices(a, b, ranks, output_blocks(parts, CUDA))
    matrices.add_to(out, x, group_tokens(adapter_of_slot, token_slots, num_slots))
    of_tokens = adapter_of_slot[token_slots].tolist()
    for token, slot in enumerate(of_tokens):
        for part, rows in enumerate(parts):
            shrunk = a[slot, part * 256 : part * 256 + rank].float() @ x[token].float()
            expected = (b[slot, rows, :rank].float() @ shrunk) * (slot > 0)
            error = (out[token, rows] - expected).abs().max()
            assert error <= 0.01 * expected.abs().max() + 1e-3


@pytest.mark.parametrize("is_captured", [False, True])
def test_what_is_shrunk_beside_the_product_is_what_is_shrunk_behind_it(is_captured) -> None:
    from benchmarks.h200.shrunk_beside import ShrunkBeside
    from workers.adapters.adapted_products import AddedBehind, StepGroups
    from workers.layers.cuda.adapter_groups import group_tokens
    from workers.layers.cuda.adapter_products import AdapterMatrices, output_blocks
    from workers.layers.gemm.matrix import PartialGemm

    def multiply(x, weight, new):
        out = new((1, x.shape[0], weight.shape[0]), dtype=x.dtype, device=x.device)
        torch.mm(x, weight.t(), out=out[0])
        return out

    torch.manual_seed(0)
    num_tokens, size, rank = 64, 4096, 32
    adapter_of_slot = torch.arange(num_tokens, device=CUDA, dtype=torch.int32) % 9
    step = StepGroups(group_tokens(adapter_of_slot, torch.arange(num_tokens, device=CUDA), 8))
    layers = []
    for _ in range(6):
        a = torch.randn(9, rank, size, device=CUDA).bfloat16() / 64
        b = torch.randn(9, size, rank, device=CUDA).bfloat16() / 8
        ranks = torch.full((9, 1), rank, dtype=torch.int32, device=CUDA)
        matrices = AdapterMatrices(a, b, ranks, output_blocks([slice(0, size)], CUDA))
        weight = torch.randn(size, size, device=CUDA).bfloat16() / 64
        layers.append((PartialGemm(weight, {1 << 20: multiply}), matrices, step))
    x = torch.randn(num_tokens, size, device=CUDA).bfloat16()

    def run(ways):
        hidden = x
        for way in ways:
            hidden = way(hidden)[0] * 0.5
        return hidden

    expected = run([AddedBehind(*layer) for layer in layers])
    beside = [ShrunkBeside(*layer, torch.cuda.Stream(CUDA)) for layer in layers]
    if is_captured:
        run(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run(beside)
        for _ in range(50):
            graph.replay()
            assert torch.equal(found, expected)
    for _ in range(50):
        assert torch.equal(run(beside), expected)


@pytest.mark.parametrize("is_beside", [False, True])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_tokens_are_likeliest_of_merged_models(
    has_graphs, is_beside, tmp_path, monkeypatch
) -> None:
    from benchmarks.h200.shrunk_beside import ShrunkBeside
    from workers.adapters import device_stage

    if is_beside:
        add = partial(ShrunkBeside, stream=torch.cuda.Stream(CUDA))
        dressed = partial(device_stage.DressedModel, add=add)
        monkeypatch.setattr(device_stage, "DressedModel", dressed)
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
