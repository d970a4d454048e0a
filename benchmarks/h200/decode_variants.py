"""A few decode tunings of the triton backend beside FlashAttention-3, to check measured_tuning by.

    python -m benchmarks.h200.decode_variants [--heads 32 8] [--works 1x4096 16x7000]

--heads: query and KV heads, of 128 elements. --works: rows and the context of each.

decode_sweep.py searches; this compares, in half a minute.
"""

from __future__ import annotations

import argparse

import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.triton_paged import TritonBackend
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning, fitting_tuning
from benchmarks.h200.attention import FA3
from benchmarks.h200.attention_steps import Heads, Setup, Work, build_step, graph_seconds_per_layer

REPEATS = 15
PAGE_SIZE = 64
WORKS = ("1x4096", "1x32768", "4x4096", "12x1500", "16x4096", "32x7000", "48x3500", "64x4096")


def few(num_warps: int, chunks: int, tokens: int, joined: int) -> DecodeTuning:
    return DecodeTuning(
        num_warps=num_warps,
        chunks_per_multiprocessor=chunks,
        min_chunk_tokens=tokens,
        joined_elements=joined,
        loads_early=True,
        fuses_projection=True,
    )


VARIANTS: dict[str, DecodeTuning | None] = {
    "served": None,
    "w2c3m128j8": few(2, 3, 128, 4096),
    "w2c3m128j32": few(2, 3, 128, 16384),
    "w4c2m128j32": few(4, 2, 128, 16384),
    "w4c3m128j32": few(4, 3, 128, 16384),
    "w4c4m128j32": few(4, 4, 128, 16384),
    "w4c3m128j16": few(4, 3, 128, 8192),
    "w4c4m128j8s4": DecodeTuning(num_stages=4),
}
"""Warps, chunks a multiprocessor, smallest chunk, chunks joined at once."""


def backend_of(tuning: DecodeTuning | None) -> type[TritonBackend]:
    class VariantBackend(TritonBackend):
        def _tuning_of(self, geometry: DecodeGeometry, num_rows: int) -> DecodeTuning:
            return tuning or fitting_tuning(geometry, num_rows, self._limits.shared_bytes)

    return VariantBackend


def microseconds(backend: type[GraphAttentionBackend], heads: Heads, work: Work) -> float:
    step = build_step(Setup(backend, heads, page_size=PAGE_SIZE), work)
    seconds = graph_seconds_per_layer(step, REPEATS)
    torch.cuda.empty_cache()
    return seconds * 1e6


def work_of(text: str) -> Work:
    rows, context = text.split("x")
    return Work(int(rows), int(context), 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, nargs=2, default=(32, 8), metavar=("QUERY", "KV"))
    parser.add_argument("--works", type=work_of, nargs="*", default=list(map(work_of, WORKS)))
    arguments = parser.parse_args()
    heads = Heads(*arguments.heads)
    for work in arguments.works:
        torch.manual_seed(0)
        fa3_us = microseconds(FA3, heads, work)
        print(f"{work}: fa3 {fa3_us:.1f} us", flush=True)
        for name, tuning in VARIANTS.items():
            us = microseconds(backend_of(tuning), heads, work)
            print(f"  {name:13} {us:8.1f} us, {fa3_us / us:.3f} of it", flush=True)


if __name__ == "__main__":
    main()
