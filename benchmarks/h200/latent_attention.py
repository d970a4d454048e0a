"""Multi-head latent attention alone on one H200: decode against the memory's rate, prefill in time.

    python3 -m benchmarks.h200.latent_attention [--backends fa3 flashmla] [--heads 16 128]

One layer with DeepSeek's sizes (latents of 512 + 64 elements, heads of 128 + 64 and 128) as a model
calls it: latents written, W_UK and W_UV applied. Decode runs in a CUDA graph over as many layers as
exceed any cache; bytes a second are those of the latents alone, whatever else a layer reads.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

import torch

from attention import (
    AttentionConfig,
    ForwardBatch,
    LatentAttention,
    LatentEntry,
    LatentTokens,
    LayerAttentionConfig,
    UpProjections,
)
from attention.backends.base import AttentionBackend, GraphAttentionBackend
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.registry import create_attention_backend
from benchmarks.h200.attention_steps import Work, batch_of, graphed_seconds, seconds_of

REPEATS = 30
MIN_POOL_BYTES = 1 << 30
MAX_LAYERS = 16
MAX_CONTEXT_LEN = 8192
DECODES = tuple(
    Work(rows, keys, 1) for rows, keys in ((1, 4096), (16, 4096), (64, 4096), (128, 4096))
)
PREFILLS = (Work(1, 0, 4096), Work(8, 0, 1024), Work(1, 6144, 2048))


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a model; num_heads are one rank's."""

    num_heads: int = 16
    nope_dim: int = 128
    v_head_dim: int = 128
    entry: LatentEntry = LatentEntry(512, 64)

    @property
    def scaling(self) -> float:
        return (self.nope_dim + self.entry.rope_dim) ** -0.5


@dataclass(frozen=True, slots=True)
class LatentStep:
    """A step of several layers, ready to run."""

    backend: AttentionBackend
    batch: ForwardBatch
    layers: list[LatentAttention]
    tokens: LatentTokens
    up: UpProjections

    def run(self) -> None:
        for layer in self.layers:
            layer(self.tokens, self.up, self.batch)


def build(
    name: str, work: Work, sizes: Sizes, page_size: int, device: torch.device, dtype: torch.dtype
) -> LatentStep:
    """The step with its pool filled and its metadata derived; pages lie in random order."""
    config = _config(work, sizes, page_size, device, dtype)
    pages_per_row = -(-int(work.seq_lens.max()) // page_size)
    table = ReqToTokenPool(work.rows, config.max_context_len, device)
    pool = LatentTokenToKVPool(config, work.rows * pages_per_row + 1)
    pages = torch.randperm(work.rows * pages_per_row, device=device).view(work.rows, -1) + 1
    places = pages[:, :, None] * page_size + torch.arange(page_size, device=device)
    longest = int(work.seq_lens.max())
    table.req_to_token[:, :longest] = places.view(work.rows, -1)[:, :longest]
    for layer_id in range(config.num_layers):
        latents = pool.get_latent(layer_id)
        latents.copy_(torch.randn(latents.shape, device=device, dtype=dtype))
    backend = create_attention_backend(name, config, table, pool)
    batch = batch_of(work, table, backend)
    backend.init_forward_metadata(batch)
    layers = [
        LatentAttention(sizes.num_heads, sizes.v_head_dim, sizes.entry, sizes.scaling, layer_id)
        for layer_id in range(config.num_layers)
    ]
    tokens, up = _inputs(batch.num_tokens, sizes, device, dtype)
    return LatentStep(backend, batch, layers, tokens, up)


def _config(
    work: Work, sizes: Sizes, page_size: int, device: torch.device, dtype: torch.dtype
) -> AttentionConfig:
    layer_bytes = int(work.seq_lens.sum()) * sizes.entry.elements_per_token * dtype.itemsize
    num_layers = max(1, min(MAX_LAYERS, -(-MIN_POOL_BYTES // layer_bytes)))
    return AttentionConfig(
        num_layers=num_layers,
        tp_q_head_num=sizes.num_heads,
        tp_k_head_num=sizes.num_heads,
        head_dim=sizes.nope_dim + sizes.entry.rope_dim,
        v_head_dim=sizes.v_head_dim,
        max_context_len=max(MAX_CONTEXT_LEN, int(work.seq_lens.max())),
        page_size=page_size,
        dtype=dtype,
        kv_dtype=dtype,
        device=device,
        layers=(LayerAttentionConfig(),) * num_layers,
        latent=sizes.entry,
    )


def _inputs(
    num_tokens: int, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> tuple[LatentTokens, UpProjections]:
    heads, entry = sizes.num_heads, sizes.entry

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    tokens = LatentTokens(
        q_nope=random(num_tokens, heads, sizes.nope_dim),
        q_rope=random(num_tokens, heads, entry.rope_dim),
        latent=random(num_tokens, entry.latent_dim),
        k_rope=random(num_tokens, entry.rope_dim),
    )
    joined = random(heads, sizes.nope_dim + sizes.v_head_dim, entry.latent_dim)
    joined *= entry.latent_dim**-0.5
    return tokens, UpProjections(joined[:, : sizes.nope_dim], joined[:, sizes.nope_dim :])


@torch.inference_mode()
def decode_seconds(step: LatentStep) -> float:
    """Of a layer, in a graph that fills its tables."""
    backend = step.backend
    if not isinstance(backend, GraphAttentionBackend):
        return seconds_of(step.run, REPEATS) / len(step.layers)
    backend.init_cuda_graph_state(step.batch.batch_size)
    backend.init_forward_metadata_capture_cuda_graph(step.batch)

    def run() -> None:
        backend.record_step_tables(step.batch)
        step.run()

    return graphed_seconds(run, REPEATS) / len(step.layers)


@torch.inference_mode()
def prefill_seconds(step: LatentStep) -> float:
    """Of a layer."""
    return seconds_of(step.run, REPEATS) / len(step.layers)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backends", nargs="+", default=["fa3", "flashmla"])
    parser.add_argument("--heads", nargs="+", type=int, default=[16, 128])
    parser.add_argument("--page-size", type=int, default=64)
    arguments = parser.parse_args()
    device, dtype = torch.device("cuda"), torch.bfloat16
    print("| step | heads | backend | us a layer | TB/s of latents |\n|---|---|---|---|---|")
    for num_heads in arguments.heads:
        sizes = Sizes(num_heads)
        for work in (*DECODES, *PREFILLS):
            for name in arguments.backends:
                step = build(name, work, sizes, arguments.page_size, device, dtype)
                is_decode = work.new == 1
                seconds = decode_seconds(step) if is_decode else prefill_seconds(step)
                read = int(work.seq_lens.sum()) * sizes.entry.elements_per_token * dtype.itemsize
                rate = f"{read / seconds / 1e12:.2f}" if is_decode else ""
                print(
                    f"| {work} | {num_heads} | {name} | {seconds * 1e6:.1f} | {rate} |", flush=True
                )


if __name__ == "__main__":
    main()
