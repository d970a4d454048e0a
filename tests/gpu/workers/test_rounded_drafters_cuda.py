"""Drafters in FP8 on an NVIDIA GPU: products are those of the rounded weights, drafts those of the
rounded head, in graphs and without, and hold about as often as those of 16 bits."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.fakes.eagle_heads import ROUNDED, HeadOracle, eagle_spec, save_head
from tests.fakes.tiny_models import eager_reference, save_tiny_model
from tests.gpu.engines import BUILTIN, CUDA, GREEDY, NEAR_TIE, gaps_to_likeliest
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER
from tests.gpu.workers.test_draft_models_cuda import FIXED, REPEATING, DraftReplays, started
from tests.unit.workers.engine.test_eagle import DEEP, DRAFT_IDS
from tests.unit.workers.engine.test_rank_drafts import FEW_PAGES, recorded_run
from tests.unit.workers.engine.test_rounded_drafters import rounded_head
from workers.config import EngineConfig
from workers.layers.formats.layer import stored_by
from workers.layers.sharding import ShardContext
from workers.loading.rounded_drafter import multiply_as_kept
from workers.loading.weights import fill_with_noise
from workers.models.cuda_eagle_head import CudaEagleHead
from workers.parallel.group import SingleRank

pytestmark = [*NEEDS_GPU, NEEDS_HOPPER]

FP8 = {"draft_quantization": "fp8"}
NUM_ROWS = (1, 5, 16, 17, 64, 65, 300)
"""On both sides of where another product is taken."""
MAX_ROUNDING_ERROR = 0.05
"""Of a product's norm: activations have three bits, and are rounded by groups or by rows."""


def relative_error(got, want):
    assert got.shape == want.shape
    return float((got.double() - want).norm() / want.norm())


@pytest.fixture(scope="module")
def head():
    """Of Llama-3.1-8B's size, but for a small embedding, with weights of noise."""
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
    spec = eagle_spec(**sizes, num_q_heads=32, num_kv_heads=8, vocab_size=32000)
    spec = replace(spec, draft_vocab_size=32000)
    shard = ShardContext(SingleRank(), torch.bfloat16, CUDA, has_formats=True)
    made = CudaEagleHead(spec, 256, shard)
    stored = stored_by(ROUNDED, made, shard, made.layers_as_stored())
    fill_with_noise(stored, shard, 0, lambda done, total: None)
    multiply_as_kept(made, CUDA)
    return made.eval()


@torch.inference_mode()
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_a_heads_products_are_those_of_its_rounded_weights(head, num_rows) -> None:
    torch.manual_seed(0)
    layers = head.layers_as_stored()
    assert len(layers) == 6
    for layer in layers:
        assert layer.is_kept
        weight = layer.kept.dequantised().double()
        x = torch.randn(num_rows, weight.shape[1], dtype=torch.bfloat16, device=CUDA)
        want = x.double() @ weight.t()
        made = layer.product(x)
        assert made.dtype is torch.bfloat16
        assert relative_error(made, want) < MAX_ROUNDING_ERROR
        assert relative_error(layer.partial_products(x).double().sum(0), want) < MAX_ROUNDING_ERROR
    qkv = head.midlayer.self_attn.qkv_proj
    first, weight = qkv.split_sizes[0], qkv.kept.dequantised().double()
    x = torch.randn(num_rows, weight.shape[1], dtype=torch.bfloat16, device=CUDA)
    keys_and_values = qkv.keys_and_values(x).double().sum(0)
    assert relative_error(keys_and_values, x.double() @ weight[first:].t()) < MAX_ROUNDING_ERROR


def test_a_head_of_real_size_has_half_the_bytes(head) -> None:
    before = torch.cuda.memory_allocated(CUDA)
    matrices = [torch.empty_like(x.kept.values, dtype=torch.bfloat16) for x in layers_of(head)]
    of_matrices = torch.cuda.memory_allocated(CUDA) - before
    kept = sum(one.nbytes for x in layers_of(head) for one in x.kept.buffers())
    assert len(matrices) == 6
    assert kept < 0.51 * of_matrices


def layers_of(head):
    return [layer for layer in head.layers_as_stored() if layer.is_kept]


@pytest.mark.parametrize(
    ("draft_ids", "num_kept"), [(DRAFT_IDS, 5), (range(5, 37), 6)], ids=["few", "all_kept"]
)
@pytest.mark.parametrize(
    ("settings", "is_graphed"),
    [({}, True), ({"enable_cuda_graphs": False}, False), ({"attention_backend": "triton"}, True)],
    ids=["graphs", "eager", "triton"],
)
def test_drafts_are_those_of_the_rounded_head(
    draft_ids, num_kept, settings, is_graphed, tmp_path
) -> None:
    """Near ties may turn, as activations are rounded, too. Of three tokens, whose logits no product
    takes in FP8, many drafts hold; of others none, as the texts do not have them."""
    target = save_tiny_model(DEEP, tmp_path / "target")
    own = json.loads((target / "config.json").read_text())
    head = save_head(tmp_path / "head", own, [*draft_ids])
    oracle = HeadOracle(rounded_head(head, tmp_path / "rounded"), eager_reference(target))
    config = EngineConfig(
        model=str(target),
        speculative=f"eagle3:{head}",
        **{"dtype": "bfloat16", **FIXED, **FEW_PAGES, **FP8, **settings},
    )
    runner, engine = started(config)
    assert len(layers_of(runner._placed.head)) == num_kept
    replays = DraftReplays(runner)
    asked, stats = recorded_run(runner, engine)
    assert (replays.num > 3) == is_graphed
    pairs = [(one.drafts, oracle.drafts(one.token_ids, len(one.drafts))) for one in asked[::3]]
    assert len(pairs) > 6
    assert np.mean([found == wanted for found, wanted in pairs]) >= 0.75
    assert (stats.num_accepted_draft_tokens > 10) == (draft_ids is DRAFT_IDS)


@pytest.mark.parametrize("speculative", ["eagle3:builtin-head", "draft:builtin"])
def test_drafts_hold_about_as_often_as_those_of_16_bits(speculative) -> None:
    shares = []
    for settings in ({}, FP8):
        config = EngineConfig(**BUILTIN, **FIXED, speculative=speculative, **settings)
        runner, engine = started(config)
        replays = DraftReplays(runner)
        try:
            results = engine.generate(REPEATING, [GREEDY] * len(REPEATING))
            engine.check_integrity()
            stats = engine.stats()
        finally:
            engine.close()
        assert replays.num > 3
        texts = [one.token_ids for one in results]
        assert gaps_to_likeliest(REPEATING, texts).max() < NEAR_TIE
        shares.append(stats.num_accepted_draft_tokens / stats.num_draft_tokens)
    assert shares[1] > 0.8 * shares[0] > 0.1


@pytest.mark.parametrize("settings", [{"quantized_products": "dequantize"}, {"dtype": "float16"}])
def test_where_no_product_takes_them_rounded_weights_are_matrices(settings) -> None:
    config = EngineConfig(**BUILTIN, **FIXED, speculative="eagle3:builtin-head", **FP8, **settings)
    runner, engine = started(config, captures=False)
    try:
        assert not layers_of(runner._placed.head)
        results = engine.generate(REPEATING[:3], [GREEDY] * 3)
        assert engine.stats().num_accepted_draft_tokens > 0
    finally:
        engine.close()
    assert [len(one.token_ids) for one in results] == [GREEDY.max_tokens] * 3
