"""The Triton decode kernel's constants, swept over work: what measured_tuning is read off.

    python -m benchmarks.h200.decode_sweep [--heads 32,8] [--rows 1 ...] [--seconds 60]

For each work: fa3, then the kernel compiled in several ways with the constants it ships with, then
the fastest of those with other cuts of the rows, then with the fused front, begun in several ways.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from typing import ClassVar

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning, measured_tuning
from benchmarks.h200.attention import DECODES, UNLIKE
from benchmarks.h200.attention_steps import (
    Front,
    Heads,
    Setup,
    Step,
    build_step,
    graph_seconds_per_layer,
    projected_seconds_per_layer,
)

REPEATS = 9
COMPILED = tuple(
    {"block_keys": keys, "num_warps": warps, "num_stages": stages}
    for keys, warps, stages in (
        (64, 4, 2),
        (64, 4, 3),
        (64, 4, 4),
        (32, 4, 4),
        (32, 4, 6),
        (128, 4, 2),
        (64, 8, 3),
        (64, 2, 3),
    )
)
CUTS = tuple(
    {"chunks_per_multiprocessor": chunks, "min_chunk_tokens": tokens, "slack_eighths": slack}
    for chunks, tokens, slack in product((2, 3, 4, 5, 6, 8, 12), (64, 128, 256), (1, 4))
)
FRONTS: tuple[dict[str, int], ...] = (
    {"prefetch_keys": 0},
    {"prefetch_keys": 128},
    {"prefetch_keys": 128, "loads_early": True},
    {"prefetch_keys": 256},
)


class SweptBackend(TritonDecodeFlashAttentionBackend):
    """The backend with constants that are set between two captures."""

    current: ClassVar[DecodeTuning] = DecodeTuning()

    @staticmethod
    def tuning_of(geometry: DecodeGeometry, num_rows: int) -> DecodeTuning:
        return SweptBackend.current


def measure(step: Step, tuning: DecodeTuning, front: Front | None) -> float:
    """Microseconds a layer."""
    SweptBackend.current = tuning
    if front is None:
        return graph_seconds_per_layer(step, REPEATS) * 1e6
    return projected_seconds_per_layer(step, REPEATS, front) * 1e6


def sweep(
    step: Step, base: DecodeTuning, changes: Iterable[dict[str, int]], front: Front | None
) -> list[tuple[float, DecodeTuning]]:
    """Fastest first; what does not run on this device is left out and said."""
    results = []
    for change in changes:
        tuning = replace(base, **change)
        try:
            results.append((measure(step, tuning, front), tuning))
        except (RuntimeError, torch.cuda.OutOfMemoryError) as error:
            print(f"  {tuning}: {str(error)[:100]}", flush=True)
    return sorted(results, key=lambda result: result[0])


def text(result: tuple[float, DecodeTuning]) -> str:
    us, t = result
    return (
        f"{us:.1f} k{t.block_keys}w{t.num_warps}s{t.num_stages}"
        f"/c{t.chunks_per_multiprocessor}m{t.min_chunk_tokens}e{t.slack_eighths}"
        f"p{t.prefetch_keys}{'E' if t.loads_early else ''}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", default="32,8", help="query heads,KV heads")
    parser.add_argument("--rows", type=int, nargs="*", help="only work of these numbers of rows")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no work after this")
    parser.add_argument("--norm", action="store_true", help="a head norm in the fused front")
    arguments = parser.parse_args()
    q, kv = map(int, arguments.heads.split(","))
    geometry = DecodeGeometry(kv, q // kv, 128, 128)
    begin = time.monotonic()
    for work in (*DECODES, *UNLIKE):
        if arguments.rows and work.rows not in arguments.rows:
            continue
        if time.monotonic() - begin > arguments.seconds:
            print("out of time", flush=True)
            break
        fa3 = build_step(Setup(FlashAttentionBackend, Heads(q, kv, 128)), work)
        fa3_us = graph_seconds_per_layer(fa3, REPEATS) * 1e6
        floor_us = fa3.cost_per_layer.bytes_read / 4.38e6
        del fa3
        torch.cuda.empty_cache()
        step = build_step(Setup(SweptBackend, Heads(q, kv, 128)), work)
        base = measured_tuning(geometry, work.rows)
        shipped = measure(step, base, None)
        compiled = sweep(step, base, COMPILED, None)
        cuts = sweep(step, compiled[0][1], CUTS, None)
        best = cuts[0][1]
        print(f"{work}: floor {floor_us:.1f} fa3 {fa3_us:.1f} shipped {shipped:.1f}", flush=True)
        print("  kernels ", " | ".join(map(text, compiled)), flush=True)
        print("  cuts    ", " | ".join(map(text, cuts[:6])), flush=True)
        fused = sweep(step, best, FRONTS, Front(4, arguments.norm))
        fused += sweep(step, fused[0][1], ({},), Front(1, arguments.norm))
        print("  projected (4 splits, last 1)", " | ".join(map(text, fused)), flush=True)
        del step
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
