"""A few decode tunings of the triton backend beside FlashAttention-3, to check measured_tuning by.

    python -m benchmarks.h200.decode_variants [--rows 1 4]

decode_sweep.py searches; this compares, in half a minute.
"""

from __future__ import annotations

import argparse

import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.triton_paged import TritonBackend
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning, fitting_tuning
from benchmarks.h200.attention import FA3
from benchmarks.h200.attention_steps import Setup, Work, build_step, graph_seconds_per_layer

REPEATS = 15
PAGE_SIZE = 64
WORKS = (
    Work(1, 4096, 1),
    Work(1, 32768, 1),
    Work(4, 4096, 1),
    Work(16, 4096, 1),
    Work(64, 4096, 1),
)


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


def microseconds(backend: type[GraphAttentionBackend], work: Work) -> float:
    step = build_step(Setup(backend, page_size=PAGE_SIZE), work)
    seconds = graph_seconds_per_layer(step, REPEATS)
    torch.cuda.empty_cache()
    return seconds * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="*", help="only work of these numbers of rows")
    rows = parser.parse_args().rows
    for work in WORKS:
        if rows and work.rows not in rows:
            continue
        torch.manual_seed(0)
        fa3_us = microseconds(FA3, work)
        print(f"{work}: fa3 {fa3_us:.1f} us", flush=True)
        for name, tuning in VARIANTS.items():
            us = microseconds(backend_of(tuning), work)
            print(f"  {name:13} {us:8.1f} us, {fa3_us / us:.3f} of it", flush=True)


if __name__ == "__main__":
    main()
