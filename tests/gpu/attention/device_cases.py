"""Attention steps on the device: the CPU tests' cases, their fp8 twins and their graphs."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from attention import ForwardBatch, ForwardMode, LayerAttentionConfig
from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.memory.cuda_kv_pool import CudaFp8MHATokenToKVPool, mha_pool_class
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.gpu.attention.vectorised_oracle import VectorisedOracleBackend
from tests.unit.attention.cases import (
    PAGE_SIZES,
    AttentionCase,
    CaseSpec,
    RowSpec,
    build_case,
    relative_error,
    rows_of,
)

BF16_TOLERANCE = 1e-2
FP8_TOLERANCE = 6e-2

DECODE = rows_of(*[(n, 1) for n in (0, 1, 15, 16, 17, 300, 511, 64, 1300)])
EXTEND = rows_of((0, 5), (7, 130), (0, 257), (128, 2), (33, 16))
MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (1000, 1), (0, 1))
FRESH = rows_of((0, 5), (0, 130), (0, 257), (0, 1), (0, 700))
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "fresh": FRESH}

LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "cap": LayerAttentionConfig(logit_cap=0.8),
    "sinks": LayerAttentionConfig(has_sinks=True),
    "everything": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
}

LAYERS_AND_PAGES = [
    pytest.param(layer, page_size, id=f"{name}-{page_size}")
    for name, layer in LAYERS.items()
    for page_size in (*PAGE_SIZES, 24)
    if name in ("plain", "everything") or page_size in (16, 128)
]
"""Every kind of layer at two page sizes and every page size for two layers: Triton compiles a
kernel for each."""

# What is stale in memory. Finite, as a kernel that loads a page's unused tail multiplies it by 0.
_POISON = 1e4


def device_spec(rows: tuple[RowSpec, ...], **changes: object) -> CaseSpec:
    """Llama-like heads in bf16 unless changes say otherwise."""
    spec = CaseSpec(
        rows,
        q_heads=8,
        kv_heads=2,
        head_dim=128,
        v_head_dim=128,
        dtype=torch.bfloat16,
        kv_dtype=torch.bfloat16,
        device=torch.device("cuda"),
    )
    return replace(spec, **changes)  # type: ignore[arg-type]


def device_case(spec: CaseSpec) -> AttentionCase:
    case = build_case(spec)
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=_POISON)
    return case


def oracle(case: AttentionCase) -> torch.Tensor:
    return case.run(VectorisedOracleBackend)


def error_of(case: AttentionCase, backend_class: type[AttentionBackend]) -> float:
    return relative_error(case.run(backend_class), oracle(case))


def fp8_twin(case: AttentionCase, k_scale: float, v_scale: float) -> AttentionCase:
    """The case over an fp8 pool that holds what the case's pool holds."""
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    pool = CudaFp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    pool.set_scales(0, k_scale, v_scale)
    everywhere = torch.arange(pool.num_pages * pool.page_size, device=config.device)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, everywhere, k, v)
    return replace(case, config=config, token_to_kv_pool=pool)


def e4m3_twin(case):
    """Over the pool that this GPU gets, whether Triton writes e4m3 here or torch does."""
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    pool = mha_pool_class(config, torch.cuda.get_device_capability())(
        config, case.token_to_kv_pool.num_pages
    )
    pool.set_scales(0, 0.02, 0.03)
    everywhere = torch.arange(pool.num_pages * pool.page_size, device=config.device)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, everywhere, k, v)
    return replace(case, config=config, token_to_kv_pool=pool)


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """A decode step of one layer in a CUDA graph, padded to graph_bs rows, with its inputs.

    case: the one it was captured for. memory: the table and the pool that the graph reads and
    writes, which are no case's own: what a replay leaves there is in no other step.
    """

    case: AttentionCase
    memory: tuple[ReqToTokenPool, MHATokenToKVPool]
    backend: GraphAttentionBackend
    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor

    def replay(self, case: AttentionCase) -> torch.Tensor:
        """The case's step: its table, pages and new tokens."""
        table, pool = self.memory
        ours, theirs = (one.get_kv_buffer(0) for one in (pool, case.token_to_kv_pool))
        for to, source in zip(ours, theirs, strict=True):
            to.copy_(source)
        table.req_to_token.copy_(case.req_to_token_pool.req_to_token)
        batch = padded(case.batch, self.batch.batch_size)
        for name in ("out_cache_loc", "req_pool_indices", "seq_lens", "extend_seq_lens"):
            getattr(self.batch, name).copy_(getattr(batch, name))
        num_tokens = case.batch.num_tokens
        for to, source in ((self.q, case.q), (self.k, case.k), (self.v, case.v)):
            to[:num_tokens].copy_(source)
        with torch.inference_mode():
            self.out.fill_(torch.nan)
        lengths = np.zeros(self.batch.batch_size, dtype=np.int32)
        lengths[:num_tokens] = case.batch.seq_lens_cpu
        self.backend.before_replay(len(lengths), lengths)
        self.graph.replay()
        return self.out[:num_tokens].clone()


def capture(
    case: AttentionCase, backend_class: type[GraphAttentionBackend], graph_bs: int
) -> CapturedStep:
    """Capture from a batch of length-one rows: nothing of the case's lengths is in the graph."""
    memory = deepcopy((case.req_to_token_pool, case.token_to_kv_pool))
    backend = backend_class(case.config, *memory)
    backend.init_cuda_graph_state(graph_bs + 3)
    device = case.config.device
    q, k, v = (
        torch.zeros((graph_bs, *tensor.shape[1:]), dtype=tensor.dtype, device=device)
        for tensor in (case.q, case.k, case.v)
    )
    batch = replace(blank_decode_batch(graph_bs, device), attn_backend=backend)
    backend.init_forward_metadata_capture_cuda_graph(batch)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), torch.inference_mode():
        backend.record_step_tables(batch)
        backend.forward(q, k, v, case.layer, batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        backend.record_step_tables(batch)
        out = backend.forward(q, k, v, case.layer, batch)
    return CapturedStep(case, memory, backend, graph, batch, q, k, v, out)


def blank_decode_batch(batch_size: int, device: torch.device) -> ForwardBatch:
    """Rows of one token each, all on the dummy page."""
    zeros = torch.zeros(batch_size, dtype=torch.int64, device=device)
    ones = torch.ones(batch_size, dtype=torch.int32, device=device)
    host_ones = np.ones(batch_size, dtype=np.int32)
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=batch_size,
        num_tokens=batch_size,
        input_ids=zeros,
        positions=zeros,
        req_pool_indices=zeros.clone(),
        seq_lens=ones,
        extend_seq_lens=ones.clone(),
        extend_prefix_lens=ones - 1,
        out_cache_loc=zeros.clone(),
        seq_lens_cpu=host_ones,
        extend_seq_lens_cpu=host_ones,
        extend_prefix_lens_cpu=host_ones - 1,
        attn_backend=None,  # type: ignore[arg-type]
    )


def padded(batch: ForwardBatch, batch_size: int) -> ForwardBatch:
    """A decode batch with rows without keys behind it."""
    blank = blank_decode_batch(batch_size - batch.batch_size, batch.seq_lens.device)
    return replace(
        batch,
        batch_size=batch_size,
        num_tokens=batch_size,
        req_pool_indices=torch.cat([batch.req_pool_indices, blank.req_pool_indices]),
        seq_lens=torch.cat([batch.seq_lens, blank.seq_lens * 0]),
        extend_seq_lens=torch.cat([batch.extend_seq_lens, blank.extend_seq_lens]),
        out_cache_loc=torch.cat([batch.out_cache_loc, blank.out_cache_loc]),
    )
