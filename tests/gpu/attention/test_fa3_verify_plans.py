"""Verify graphs of FlashAttention-3 that settle their splits once a step, on the device.

They are compared with graphs of the same steps in which every layer settles them anew, bit for bit,
and with float64; lengths grow and shrink from replay to replay.
"""

from copy import copy, deepcopy
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch

from attention import AttentionConfig, ForwardBatch, ForwardMode
from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.memory.cuda_kv_pool import CudaFp8MHATokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    FP8_TOLERANCE,
    LAYERS,
    device_case,
    device_spec,
    oracle,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.unit.attention.cases import AttentionCase, relative_error, rows_of

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

NUM_LAYERS = 3
LONGEST = 1300
K_SCALE, V_SCALE = 0.02, 0.03


class EveryLayerPlans(FlashAttentionBackend):
    plans_splits_once: ClassVar[bool] = False


class EveryFp8LayerPlans(Fp8FlashAttentionBackend):
    plans_splits_once: ClassVar[bool] = False


def case_of(num_rows: int, num_tokens: int, **changes: object) -> AttentionCase:
    """Rows of up to LONGEST tokens, of which each brings as many new ones."""
    rows = rows_of(*[(LONGEST - num_tokens, num_tokens)] * num_rows)
    return device_case(device_spec(rows, q_heads=32, kv_heads=8, **changes))


def lengths_of(num_rows: int, num_tokens: int) -> list[list[int]]:
    """Of three steps. Rows of length 0 pad a graph."""
    unlike = [num_tokens + 97 * row % (LONGEST - num_tokens) for row in range(num_rows)]
    padded = [0 if row % 3 == 2 else LONGEST - row for row in range(num_rows)]
    return [[LONGEST] * num_rows, unlike, padded]


@dataclass(frozen=True)
class RecordedStep:
    """NUM_LAYERS layers of one kind over the case's new tokens and pages; replays read the batch's
    device tensors. A graph has a batch, a table and a pool of its own."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    outputs: list[torch.Tensor]

    def replay(self, lengths: list[int]) -> list[torch.Tensor]:
        self.batch.seq_lens.copy_(torch.tensor(lengths, dtype=torch.int32))
        self.graph.replay()
        return [out.clone() for out in self.outputs]


def config_of(case: AttentionCase, is_fp8: bool) -> AttentionConfig:
    layers = (case.spec.layer,) * NUM_LAYERS
    config = replace(case.config, num_layers=NUM_LAYERS, layers=layers)
    return replace(config, kv_dtype=torch.float8_e4m3fn) if is_fp8 else config


def pool_of(case: AttentionCase, config: AttentionConfig) -> MHATokenToKVPool:
    """What the case's pool holds, in every layer of one for the config."""
    is_fp8 = config.kv_dtype == torch.float8_e4m3fn
    pool_class = CudaFp8MHATokenToKVPool if is_fp8 else MHATokenToKVPool
    pool = pool_class(config, case.token_to_kv_pool.num_pages)
    everywhere = torch.arange(pool.num_pages * pool.page_size, device=config.device)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    for layer_id in range(NUM_LAYERS):
        if isinstance(pool, CudaFp8MHATokenToKVPool):
            pool.set_scales(layer_id, K_SCALE, V_SCALE)
        pool.set_kv_buffer(layer_id, everywhere, k, v)
    return pool


def record(case: AttentionCase, backend_class: type[FlashAttentionBackend]) -> RecordedStep:
    config = config_of(case, issubclass(backend_class, Fp8FlashAttentionBackend))
    pool = pool_of(case, config)
    backend = backend_class(config, deepcopy(case.req_to_token_pool), pool)
    batch = replace(
        case.batch,
        forward_mode=ForwardMode.TARGET_VERIFY,
        seq_lens=case.batch.seq_lens.clone(),
        attn_backend=backend,
        is_captured=True,
    )
    layers = [copy(case.layer) for _ in range(NUM_LAYERS)]
    for layer_id, layer in enumerate(layers):
        layer.layer_id = layer_id
    backend.init_cuda_graph_state(batch.batch_size + 3)
    backend.init_forward_metadata_capture_cuda_graph(batch)

    def step() -> list[torch.Tensor]:
        backend.record_step_tables(batch)
        return [backend.forward(case.q, case.k, case.v, layer, batch) for layer in layers]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        outputs = step()
    return RecordedStep(graph, batch, outputs)


def expected_of(case: AttentionCase, lengths: list[int]) -> torch.Tensor:
    """By the oracle, of rows of these lengths; those of rows without keys mean nothing."""
    num_tokens = case.spec.rows[0].num_new
    seq_lens = torch.tensor(lengths, dtype=torch.int32).clamp(min=num_tokens)
    batch = case.batch
    batch.seq_lens.copy_(seq_lens)
    batch.extend_prefix_lens.copy_(seq_lens - num_tokens)
    batch.seq_lens_cpu[:] = seq_lens.numpy()
    batch.extend_prefix_lens_cpu[:] = (seq_lens - num_tokens).numpy()
    return oracle(case)


def check(
    case: AttentionCase,
    once: type[FlashAttentionBackend],
    every: type[FlashAttentionBackend],
    tolerance: float,
) -> None:
    """Oracle, layers that share a plan and layers that plan anew agree in three replays each."""
    num_rows, num_tokens = len(case.spec.rows), case.spec.rows[0].num_new
    steps = record(case, once), record(case, every)
    for lengths in lengths_of(num_rows, num_tokens):
        is_row = torch.tensor(lengths, device="cuda").repeat_interleave(num_tokens) > 0
        planned, anew = ([out[is_row] for out in step.replay(lengths)] for step in steps)
        assert relative_error(planned[0], expected_of(case, lengths)[is_row]) < tolerance
        for out in (*planned[1:], *anew):
            assert torch.equal(out, planned[0])


@pytest.mark.parametrize("num_tokens", range(2, 7))
@pytest.mark.parametrize("num_rows", [1, 2, 7, 16, 40, 64])
def test_chains_of_any_length_in_any_batch(num_rows, num_tokens):
    case = case_of(num_rows, num_tokens, page_size=128)
    check(case, FlashAttentionBackend, EveryLayerPlans, BF16_TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_every_kind_of_layer_and_page(layer, page_size):
    case = case_of(5, 4, layer=layer, page_size=page_size)
    check(case, FlashAttentionBackend, EveryLayerPlans, BF16_TOLERANCE)


@pytest.mark.parametrize("head_dim", [64, 256])
@pytest.mark.parametrize("num_rows", [1, 33])
def test_other_heads(num_rows, head_dim):
    case = case_of(num_rows, 4, head_dim=head_dim, v_head_dim=head_dim, page_size=128)
    check(case, FlashAttentionBackend, EveryLayerPlans, BF16_TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 64])
def test_beside_triton_decode(num_rows):
    case = case_of(num_rows, 4, page_size=128)
    check(case, TritonDecodeFlashAttentionBackend, EveryLayerPlans, BF16_TOLERANCE)


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_an_e4m3_cache(num_rows):
    case = case_of(num_rows, 4, page_size=128)
    check(case, Fp8FlashAttentionBackend, EveryFp8LayerPlans, FP8_TOLERANCE)


@pytest.mark.parametrize("backend_class", [FlashAttentionBackend, EveryLayerPlans])
def test_a_step_has_one_plan(backend_class, monkeypatch):
    case = case_of(3, 4)
    kernels = FlashAttentionBackend(
        case.config, case.req_to_token_pool, case.token_to_kv_pool
    )._kernels
    made = []

    def plan(*shape, **arguments):
        made.append(kernels.plan(*shape, **arguments))
        return made[-1]

    monkeypatch.setattr(
        "attention.backends.flash_attention.load_flash_attention_3",
        lambda: replace(kernels, plan=plan),
    )
    record(case, backend_class)
    num_steps = 2  # the trial's and the graph's
    assert len(made) == (num_steps if backend_class.plans_splits_once else 0)
