"""FlashAttention-3 alone on one H200: decode and prefill against the memory's and the cores' rate.

    python -m benchmarks.h200.attention [--only NAME ...] [--json FILE]

Times one layer of Llama-3.1-8B's attention (32 query heads, 8 KV heads, 128 elements) unless a
table says otherwise; K and V are in the pool already. Floors: K and V read once at 4.38 TB/s, the
two products at 690 TFLOP/s bf16, both measured on this kind of machine. Peers call the same
kernels, so they have no column here.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.kernels.providers import load_triton_kernels
from benchmarks.h200.attention_steps import (
    Heads,
    Work,
    build_step,
    eager_seconds_per_layer,
    graph_seconds_per_layer,
    seconds_of,
)

BYTES_PER_S = 4.38e12
FLOPS_PER_S = 690e12
REPEATS = 30
CONTEXT = 8192
PAGE_SIZES = (1, 16, 64, 128)

DECODES = tuple(
    Work(r, n, 1) for r, n in ((1, 1024), (1, 4096), (64, 1024), (64, 4096), (256, 256))
)
PREFILLS = (Work(1, 0, 8192), Work(8, 0, 1024), Work(1, 6144, 2048))


class PerLayerPlan(FlashAttentionBackend):
    """Every layer plans its splits again."""

    plans_splits_once = False


class OneSplit(PerLayerPlan):
    """Rows are never split."""

    num_splits = 1


class AtMost4Splits(FlashAttentionBackend):
    """Rows are split at most four times."""

    num_splits = 4


VARIANTS: dict[str, type[GraphAttentionBackend]] = {
    "planned once": FlashAttentionBackend,
    "planned per layer": PerLayerPlan,
    "one split": OneSplit,
    "up to 4 splits": AtMost4Splits,
}


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement. fraction: of the floor's rate that was reached."""

    table: str
    work: str
    variant: str
    microseconds: float
    rate: str
    fraction: float

    def __str__(self) -> str:
        share = f"{self.fraction:6.1%}" if self.rate else "      "
        return (
            f"{self.work:18} {self.variant:30} {self.microseconds:9.1f} us  {self.rate:12} {share}"
        )


def decode_line(
    table: str,
    variant: str,
    backend: type[GraphAttentionBackend],
    work: Work,
    *,
    heads: Heads = Heads(),  # noqa: B008
    page_size: int = 128,
    context: int = CONTEXT,
    kv_dtype: torch.dtype = torch.bfloat16,
    in_graph: bool = True,
) -> Line:
    step = build_step(backend, heads, work, page_size, context, kv_dtype)
    measure = graph_seconds_per_layer if in_graph else eager_seconds_per_layer
    seconds = measure(step, REPEATS)
    rate = step.cost_per_layer.bytes_read / seconds
    return Line(
        table, str(work), variant, seconds * 1e6, f"{rate / 1e12:.2f} TB/s", rate / BYTES_PER_S
    )


def prefill_line(
    table: str,
    variant: str,
    work: Work,
    *,
    heads: Heads = Heads(),  # noqa: B008
    page_size: int = 128,
    backend: type[GraphAttentionBackend] = FlashAttentionBackend,
    kv_dtype: torch.dtype = torch.bfloat16,
) -> Line:
    step = build_step(backend, heads, work, page_size, CONTEXT, kv_dtype)
    seconds = eager_seconds_per_layer(step, REPEATS)
    rate = step.cost_per_layer.flops / seconds
    text = f"{rate / 1e12:.0f} TFLOP/s"
    return Line(table, str(work), variant, seconds * 1e6, text, rate / FLOPS_PER_S)


def decode_variants() -> list[Line]:
    return [
        decode_line("decode_variants", name, backend, work)
        for work in DECODES
        for name, backend in VARIANTS.items()
    ]


def decode_pages() -> list[Line]:
    return [
        decode_line(
            "decode_pages", f"page size {size}", FlashAttentionBackend, work, page_size=size
        )
        for work in DECODES
        for size in PAGE_SIZES
    ]


def decode_eager() -> list[Line]:
    return [
        decode_line("decode_eager", "eager", FlashAttentionBackend, work, in_graph=False)
        for work in DECODES
    ]


def decode_context() -> list[Line]:
    """What a graph pays for a page table as wide as a long context."""
    return [
        decode_line("decode_context", f"context {n}", FlashAttentionBackend, work, context=n)
        for work in DECODES
        for n in (CONTEXT, 131072)
    ]


def decode_heads() -> list[Line]:
    heads = [Heads(8 * group, 8, dim) for dim in (64, 128, 256) for group in (1, 4, 8)]
    return [
        decode_line("decode_heads", str(h), FlashAttentionBackend, Work(64, 2048, 1), heads=h)
        for h in heads
    ]


def decode_fp8() -> list[Line]:
    e4m3 = torch.float8_e4m3fn
    return [
        decode_line("decode_fp8", "e4m3", Fp8FlashAttentionBackend, work, kv_dtype=e4m3)
        for work in DECODES
    ]


def prefill_pages() -> list[Line]:
    return [
        prefill_line("prefill_pages", f"page size {size}", work, page_size=size)
        for work in PREFILLS
        for size in (*PAGE_SIZES, 256)
    ]


def prefill_heads() -> list[Line]:
    heads = [Heads(8 * group, 8, dim) for dim in (64, 128, 256) for group in (1, 4)]
    lines = [prefill_line("prefill_heads", str(h), Work(1, 0, 8192), heads=h) for h in heads]
    fp8 = {"backend": Fp8FlashAttentionBackend, "kv_dtype": torch.float8_e4m3fn}
    lines.append(prefill_line("prefill_heads", "e4m3", Work(1, 0, 8192), **fp8))
    return lines


def around() -> list[Line]:
    """The launches beside the attention kernel: step tables, and K and V into the pool."""
    kernels = load_triton_kernels()
    lines = []
    for rows, length in ((1, 1024), (256, 8192)):
        for size in (1, 128):
            step = build_step(FlashAttentionBackend, Heads(), Work(rows, 64, 1), size, length)
            step.batch.seq_lens.fill_(length)
            step.batch.seq_lens_cpu.fill(length)
            step.backend.init_cuda_graph_state(rows)
            refill = step.backend.init_forward_metadata_replay_cuda_graph
            seconds = seconds_of(lambda b=step.batch, f=refill: f(b), REPEATS)
            work = f"{rows} x {length}"
            lines.append(Line("around", work, f"tables, page size {size}", seconds * 1e6, "", 0.0))
    for tokens in (64, 8192):
        pages = torch.zeros((tokens, 1, 8, 128), dtype=torch.bfloat16, device="cuda")
        k, places = torch.randn_like(pages).view(-1, 8, 128), torch.randperm(tokens).cuda()
        seconds = seconds_of(
            lambda k=k, p=pages, at=places: kernels.copy_kv(k, k, p, p, at), REPEATS
        )
        lines.append(Line("around", f"{tokens} tokens", "K and V to pool", seconds * 1e6, "", 0.0))
    return lines


TABLES: dict[str, Callable[[], list[Line]]] = {
    table.__name__: table
    for table in (
        decode_variants,
        decode_pages,
        decode_eager,
        decode_context,
        decode_heads,
        decode_fp8,
        prefill_pages,
        prefill_heads,
        around,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    lines: list[Line] = []
    for name in arguments.only:
        print(f"\n{name}", flush=True)
        for line in TABLES[name]():
            lines.append(line)
            print(line, flush=True)
    if arguments.json:
        rows = [{field: getattr(line, field) for field in Line.__slots__} for line in lines]
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
