"""Attention steps of a chosen shape over real pools, and how long the device takes for them.

The pools of all layers together are several times the L2 cache, as in serving: no layer finds its
keys there. Pages are in random order, values random.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch

from attention import AttentionConfig, ForwardBatch, ForwardMode, LayerAttentionConfig
from attention.backends.base import GraphAttentionBackend
from attention.layer import RadixAttention
from attention.memory.cuda_kv_pool import create_mha_pool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.qkv_projection import HeadNorm, QKVProjection, Rotation
from attention.roofline import AttentionCost, attention_step_cost

_MIN_POOL_BYTES = 1 << 30
_MAX_LAYERS = 32
_WARMUPS = 5


@dataclass(frozen=True, slots=True)
class Heads:
    """One rank's heads."""

    q: int = 32
    kv: int = 8
    dim: int = 128

    def __str__(self) -> str:
        return f"{self.q}/{self.kv} heads of {self.dim}"


@dataclass(frozen=True, slots=True)
class Work:
    """rows that bring `new` tokens each. A decode row has `keys` keys in all, a prefill row that
    many before the new ones; where longest is given, lengths grow evenly by ratio from one to the
    other."""

    rows: int
    keys: int
    new: int
    longest: int = 0

    def __str__(self) -> str:
        if self.longest:
            return f"{self.rows} x {self.keys}..{self.longest}"
        return (
            f"{self.rows} x {self.keys}"
            if self.new == 1
            else f"{self.rows} x {self.new} on {self.keys}"
        )

    @property
    def seq_lens(self) -> npt.NDArray[np.int32]:
        total = self.keys + (self.new if self.new > 1 else 0)
        return np.geomspace(total, self.longest or total, self.rows).round().astype(np.int32)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the work runs on. max_context_len: how wide a graph's page table is, in tokens."""

    backend: type[GraphAttentionBackend]
    heads: Heads = Heads()
    page_size: int = 128
    max_context_len: int = 8192
    kv_dtype: torch.dtype = torch.bfloat16


@dataclass(frozen=True, slots=True)
class Front:
    """What comes with a decode step's projection: K splits to sum, and a head norm or none."""

    num_splits: int = 1
    has_norm: bool = False

    def __str__(self) -> str:
        return f"projection of {self.num_splits}" + (" with norm" if self.has_norm else "")


@dataclass(frozen=True, slots=True)
class Step:
    """A step of several layers, ready to run."""

    backend: GraphAttentionBackend
    batch: ForwardBatch
    layers: list[RadixAttention]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def cost_per_layer(self) -> AttentionCost:
        config = self.backend.config
        one = replace(config, num_layers=1, layers=config.layers[:1])
        return attention_step_cost(one, self.batch.seq_lens_cpu, self.batch.extend_seq_lens_cpu)

    def run_layers(self) -> None:
        for layer in self.layers:
            self.backend.forward(self.q, self.k, self.v, layer, self.batch, save_kv_cache=False)

    def run_projected_layers(self, projection: QKVProjection) -> None:
        """From the projection on, by a backend that fuses the way to it."""
        # Ends the step's tables before the first layer, as the embedding lookup does in a model.
        projection.partials.mul_(1.0)
        for layer in self.layers:
            self.backend.forward_projected(projection, layer, self.batch)


def build_step(setup: Setup, work: Work) -> Step:
    """The step with its pools filled and its metadata derived."""
    config = _config(setup, work)
    heads, device = setup.heads, config.device
    num_layers, longest = config.num_layers, int(work.seq_lens.max())
    pages_per_row = -(-longest // setup.page_size)
    table = ReqToTokenPool(work.rows, config.max_context_len, device)
    pool = create_mha_pool(config, work.rows * pages_per_row + 1)
    pages = torch.randperm(work.rows * pages_per_row, device=device).view(work.rows, -1) + 1
    tokens = pages[:, :, None] * setup.page_size + torch.arange(setup.page_size, device=device)
    table.req_to_token[:, :longest] = tokens.view(work.rows, -1)[:, :longest]
    for layer_id in range(num_layers):
        for buffer in pool.get_kv_buffer(layer_id):
            buffer.copy_(torch.randn(buffer.shape, device=device, dtype=torch.bfloat16))
    backend = setup.backend(config, table, pool)
    batch = batch_of(work, table, backend)
    shapes = ((heads.q, heads.dim), (heads.kv, heads.dim), (heads.kv, heads.dim))
    q, k, v = (
        torch.randn((batch.num_tokens, *shape), device=device, dtype=torch.bfloat16)
        for shape in shapes
    )
    layers = [
        RadixAttention(heads.q, heads.dim, heads.dim**-0.5, heads.kv, layer_id)
        for layer_id in range(num_layers)
    ]
    backend.init_forward_metadata(batch)
    return Step(backend, batch, layers, q, k, v)


def _config(setup: Setup, work: Work) -> AttentionConfig:
    heads = setup.heads
    token_bytes = heads.kv * heads.dim * 2 * setup.kv_dtype.itemsize
    layer_bytes = int(work.seq_lens.sum()) * token_bytes
    num_layers = max(1, min(_MAX_LAYERS, -(-_MIN_POOL_BYTES // layer_bytes)))
    return AttentionConfig(
        num_layers=num_layers,
        tp_q_head_num=heads.q,
        tp_k_head_num=heads.kv,
        head_dim=heads.dim,
        v_head_dim=heads.dim,
        max_context_len=max(setup.max_context_len, int(work.seq_lens.max())),
        page_size=setup.page_size,
        dtype=torch.bfloat16,
        kv_dtype=setup.kv_dtype,
        device=torch.device("cuda"),
        layers=(LayerAttentionConfig(),) * num_layers,
    )


def batch_of(work: Work, table: ReqToTokenPool, backend: GraphAttentionBackend) -> ForwardBatch:
    device = table.req_to_token.device
    num_tokens = work.rows * work.new
    seq_lens = work.seq_lens
    new = np.full(work.rows, work.new, dtype=np.int32)
    host_positions = [np.arange(length - work.new, length) for length in seq_lens]
    positions = torch.from_numpy(np.concatenate(host_positions)).to(device)
    slots = torch.arange(work.rows, device=device)
    places = table.req_to_token[slots.repeat_interleave(work.new), positions].long()
    return ForwardBatch(
        forward_mode=ForwardMode.DECODE if work.new == 1 else ForwardMode.EXTEND,
        batch_size=work.rows,
        num_tokens=num_tokens,
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions,
        req_pool_indices=slots,
        seq_lens=torch.from_numpy(seq_lens).to(device),
        extend_seq_lens=torch.from_numpy(new).to(device),
        extend_prefix_lens=torch.from_numpy(seq_lens - new).to(device),
        out_cache_loc=places,
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=seq_lens - new,
        attn_backend=backend,
    )


@torch.inference_mode()
def eager_seconds_per_layer(step: Step, repeats: int) -> float:
    """Median over repeats of all layers launched singly; the host may be what takes the time."""
    return _median_seconds(step.run_layers, repeats) / len(step.layers)


@torch.inference_mode()
def seconds_a_layer(step: Step, repeats: int) -> float:
    """Median over replays of one graph of all layers alone, metadata as build_step derived it."""
    return graphed_seconds(step.run_layers, repeats) / len(step.layers)


@torch.inference_mode()
def graph_seconds_per_layer(step: Step, repeats: int) -> float:
    """Median over replays of one graph of all layers, step tables included; the graph's page table
    is as wide as max_context_len."""
    step.backend.init_cuda_graph_state(step.batch.batch_size)
    step.backend.init_forward_metadata_capture_cuda_graph(step.batch)
    step.backend.before_replay(step.batch.batch_size, step.batch.seq_lens_cpu)
    return graphed_seconds(lambda: _run_decode(step), repeats) / len(step.layers)


def _run_decode(step: Step) -> None:
    step.backend.record_step_tables(step.batch)
    step.run_layers()


@torch.inference_mode()
def projected_seconds_per_layer(step: Step, repeats: int, front: Front) -> float:
    """As graph_seconds_per_layer, with the projection's end, the rotation and the write of K and V
    in every layer."""
    step.backend.init_cuda_graph_state(step.batch.batch_size)
    step.backend.init_forward_metadata_capture_cuda_graph(step.batch)
    projection = _projection(step, front)

    def run() -> None:
        step.backend.record_step_tables(step.batch)
        step.run_projected_layers(projection)

    return graphed_seconds(run, repeats) / len(step.layers)


def _projection(step: Step, front: Front) -> QKVProjection:
    config = step.backend.config
    heads = config.tp_q_head_num + 2 * config.tp_k_head_num
    dim, device = config.head_dim, config.device
    dtype = torch.float32 if front.num_splits > 1 else config.dtype
    shape = (front.num_splits, step.batch.batch_size, heads * dim)
    weights = torch.ones((2, dim), dtype=config.dtype, device=device)
    rotation = Rotation(
        cos_sin=torch.randn((config.max_context_len, dim), device=device),
        bias=None,
        head_norm=HeadNorm(weights[0], weights[1], 1e-6) if front.has_norm else None,
    )
    return QKVProjection(torch.randn(shape, device=device).to(dtype), rotation, config.dtype)


@torch.inference_mode()
def graphed_seconds(run: Callable[[], object], repeats: int) -> float:
    """Median over replays of a graph of run."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return _median_seconds(graph.replay, repeats)


def seconds_of(run: Callable[[], object], repeats: int) -> float:
    """Median of one call, by events, after warming up."""
    return _median_seconds(run, repeats)


def _median_seconds(run: Callable[[], object], repeats: int) -> float:
    for _ in range(_WARMUPS):
        run()
    events = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, stop in events:
        start.record()
        run()
        stop.record()
    torch.cuda.synchronize()
    return statistics.median(start.elapsed_time(stop) for start, stop in events) / 1e3
