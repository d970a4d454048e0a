"""FlashAttention-3 on one H200 over batch, length, page size, heads and cache type, as Markdown.

    python3 -m benchmarks.h200.attention_grid [--full] [--backend fa3|fa3_triton|triton] > grid.md

Without --full each axis is walked alone from one base point (Llama-3.1-8B's heads, page size
128, bf16), in about a minute; with it every page size meets every head shape and cache type.
Decode is one CUDA graph of all layers, prefill is launched layer by layer. Floors: K and V read
once at 4.38 TB/s, the two products at 690 TFLOP/s, which is the bf16 rate, for e4m3 too.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.backends.triton_paged import TritonBackend
from attention.hardware import H200
from benchmarks.h200.attention_steps import (
    Heads,
    Setup,
    Work,
    build_step,
    eager_seconds_per_layer,
    graph_seconds_per_layer,
)

REPEATS = 15

PAGE_SIZES = (1, 16, 64, 128)
HEADS = tuple(Heads(8 * group, 8, dim) for dim in (64, 128, 256) for group in (1, 4, 8))
BASE_PAGE_SIZE = 128
BASE_HEADS = Heads(32, 8, 128)
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
BF16_BACKENDS: dict[str, type[GraphAttentionBackend]] = {
    "fa3": FlashAttentionBackend,
    "fa3_triton": TritonDecodeFlashAttentionBackend,
    "triton": TritonBackend,
}

DECODES = tuple(
    Work(rows, keys, 1)
    for rows, keys in (
        (1, 1024),
        (1, 8192),
        (16, 1024),
        (16, 8192),
        (64, 1024),
        (64, 4096),
        (256, 256),
        (256, 1024),
    )
)
PREFILLS = (Work(1, 0, 1024), Work(8, 0, 1024), Work(1, 0, 8192), Work(1, 6144, 2048))
# Where page size, heads and cache type are walked alone.
DECODE_PAGES, DECODE_HEADS = Work(64, 1024, 1), Work(64, 2048, 1)
PREFILL_BASE = Work(1, 0, 8192)


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: what is attended over which memory."""

    work: Work
    page_size: int = BASE_PAGE_SIZE
    heads: Heads = BASE_HEADS
    kv_dtype: torch.dtype = BF16

    @property
    def is_decode(self) -> bool:
        return self.work.new == 1


def compact_grid() -> list[Cell]:
    """Each axis alone; a cell that lies on several axes comes once."""
    bases = ((DECODE_PAGES, DECODE_HEADS), (PREFILL_BASE, PREFILL_BASE))
    cells = [Cell(work, kv_dtype=dtype) for work in DECODES for dtype in (BF16, E4M3)]
    cells += [Cell(work, kv_dtype=dtype) for work in PREFILLS for dtype in (BF16, E4M3)]
    for pages_work, heads_work in bases:
        cells += [Cell(pages_work, page_size=size) for size in PAGE_SIZES]
        cells += [Cell(heads_work, heads=heads) for heads in HEADS]
    return list(dict.fromkeys(cells))


def full_grid() -> list[Cell]:
    axes = (DECODES + PREFILLS, PAGE_SIZES, HEADS, (BF16, E4M3))
    return list(itertools.starmap(Cell, itertools.product(*axes)))


def measure(cell: Cell, bf16_backend: type[GraphAttentionBackend]) -> str:
    """The cell's line of its table."""
    backend = bf16_backend if cell.kv_dtype is BF16 else Fp8FlashAttentionBackend
    setup = Setup(backend, cell.heads, cell.page_size, kv_dtype=cell.kv_dtype)
    step = build_step(setup, cell.work)
    cost = step.cost_per_layer
    if cell.is_decode:
        seconds = graph_seconds_per_layer(step, REPEATS)
        rate, text = (
            cost.bytes_read / seconds / H200.bytes_per_s,
            f"{cost.bytes_read / seconds / 1e12:.2f} TB/s",
        )
    else:
        seconds = eager_seconds_per_layer(step, REPEATS)
        rate, text = (
            cost.flops / seconds / H200.flops_per_s,
            f"{cost.flops / seconds / 1e12:.0f} TFLOP/s",
        )
    cache = "bf16" if cell.kv_dtype is BF16 else "e4m3"
    heads = f"{cell.heads.q}/{cell.heads.kv} x {cell.heads.dim}"
    columns = (cell.work, cell.page_size, heads, cache, f"{seconds * 1e6:.1f}", text, f"{rate:.0%}")
    return f"| {' | '.join(map(str, columns))} |"


def tables(cells: list[Cell], bf16_backend: type[GraphAttentionBackend]) -> Iterator[str]:
    """Lines of Markdown, as they are measured."""
    for title, is_decode in (("Decode", True), ("Prefill", False)):
        yield f"\n{title}\n"
        yield "| work | page size | heads, q/kv x dim | cache | us a layer | rate | of floor |"
        yield "|---|---|---|---|---|---|---|"
        for cell in cells:
            if cell.is_decode == is_decode:
                yield measure(cell, bf16_backend)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--full", action="store_true", help="every combination; about 10 minutes")
    parser.add_argument("--backend", choices=BF16_BACKENDS, default="fa3", help="for bf16 caches")
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {arguments.backend}")
    cells = full_grid() if arguments.full else compact_grid()
    for line in tables(cells, BF16_BACKENDS[arguments.backend]):
        print(line, flush=True)


if __name__ == "__main__":
    main()
