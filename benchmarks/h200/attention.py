"""Attention alone on one H200: decode and prefill against the memory's and the cores' rate.

    python -m benchmarks.h200.attention [--only NAME ...] [--json FILE]

Times one layer of Llama-3.1-8B's attention (32 query heads, 8 KV heads, 128 elements) unless a
table says otherwise; K and V are in the pool already. Decode runs in a CUDA graph unless it says
eager. Floors: K and V read once at 4.38 TB/s, the two products at 690 TFLOP/s bf16, both measured
on this kind of machine. Peers call FlashAttention-3 too: its lines are theirs.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.flash_attention import (
    DeterministicFlashAttentionBackend,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.backends.triton_fp8 import Fp8TritonBackend
from attention.backends.triton_paged import TritonBackend
from attention.hardware import H200
from attention.kernels.providers import load_triton_kernels
from benchmarks.h200.attention_steps import (
    Front,
    Heads,
    Setup,
    Work,
    build_step,
    eager_seconds_per_layer,
    graph_seconds_per_layer,
    projected_seconds_per_layer,
    seconds_of,
)

REPEATS = 30
LONG_CONTEXT = 131072
PAGE_SIZES = (1, 16, 64, 128)

UNIFORM = ((1, 1024), (1, 4096), (16, 1024), (64, 1024), (64, 4096), (256, 256))
DECODES = tuple(Work(rows, keys, 1) for rows, keys in UNIFORM)
UNLIKE = (Work(64, 128, 1, longest=8192), Work(16, 64, 1, longest=16384))
PREFILLS = (Work(1, 0, 8192), Work(8, 0, 1024), Work(1, 6144, 2048))


class PerLayerPlan(FlashAttentionBackend):
    """Every layer plans its splits again."""

    plans_splits_once = False


FA3, TRITON = FlashAttentionBackend, TritonDecodeFlashAttentionBackend
BACKENDS: dict[str, type[GraphAttentionBackend]] = {
    "fa3": FA3,
    "fa3, every layer plans": PerLayerPlan,
    "fa3_deterministic": DeterministicFlashAttentionBackend,
    "fa3_triton": TRITON,
}
PAIR = {"fa3": FA3, "fa3_triton": TRITON}
OWN = {"fa3": FA3, "triton": TritonBackend}
OWN_DECODES = (Work(1, 4096, 1), Work(64, 4096, 1))
OWN_PREFILLS = (
    Work(64, 0, 1024),
    Work(1, 0, 8192),
    Work(1, 32768, 1024),
    Work(8, 4096, 256),
    Work(1, 4096, 8),
    Work(64, 4096, 8),
)


@dataclass(frozen=True, slots=True)
class Line:
    """One measurement. fraction: of the floor's rate that was reached."""

    work: str
    variant: str
    microseconds: float
    rate: str = ""
    fraction: float = 0.0

    def __str__(self) -> str:
        share = f"{self.fraction:6.1%}" if self.rate else ""
        return (
            f"{self.work:18} {self.variant:36} {self.microseconds:8.1f} us  {self.rate:12} {share}"
        )


def decode(variant: str, setup: Setup, work: Work, in_graph: bool = True) -> Line:
    step = build_step(setup, work)
    seconds = (graph_seconds_per_layer if in_graph else eager_seconds_per_layer)(step, REPEATS)
    rate = step.cost_per_layer.bytes_read / seconds
    text = f"{rate / 1e12:.2f} TB/s"
    return Line(str(work), variant, seconds * 1e6, text, rate / H200.bytes_per_s)


def prefill(variant: str, setup: Setup, work: Work) -> Line:
    step = build_step(setup, work)
    seconds = eager_seconds_per_layer(step, REPEATS)
    rate = step.cost_per_layer.flops / seconds
    text = f"{rate / 1e12:.0f} TFLOP/s"
    return Line(str(work), variant, seconds * 1e6, text, rate / H200.flops_per_s)


def decode_backends() -> Iterable[Line]:
    for work in (*DECODES, *UNLIKE):
        for name, backend in BACKENDS.items():
            yield decode(name, Setup(backend), work)


def decode_projected() -> Iterable[Line]:
    """From the QKV projection on: its K splits, the rotation and the write of K and V included."""
    for work in (*DECODES, *UNLIKE):
        step = build_step(Setup(TRITON), work)
        for front in (Front(1), Front(4)):
            seconds = projected_seconds_per_layer(step, REPEATS, front)
            rate = step.cost_per_layer.bytes_read / seconds
            text = f"{rate / 1e12:.2f} TB/s"
            variant = f"fa3_triton, {front}"
            yield Line(str(work), variant, seconds * 1e6, text, rate / H200.bytes_per_s)


def decode_pages() -> Iterable[Line]:
    for work in DECODES:
        for name, backend in PAIR.items():
            for size in PAGE_SIZES:
                yield decode(f"{name}, page size {size}", Setup(backend, page_size=size), work)


def decode_eager() -> Iterable[Line]:
    for work in DECODES:
        for name, backend in PAIR.items():
            yield decode(f"{name}, eager", Setup(backend), work, in_graph=False)


def decode_context() -> Iterable[Line]:
    """What a graph pays for a page table as wide as a long context."""
    for work in DECODES:
        for name, backend in PAIR.items():
            setup = Setup(backend, max_context_len=LONG_CONTEXT)
            yield decode(f"{name}, context {LONG_CONTEXT}", setup, work)


def decode_heads() -> Iterable[Line]:
    for heads in (Heads(8 * group, 8, dim) for dim in (64, 128, 256) for group in (1, 4, 8)):
        for name, backend in PAIR.items():
            yield decode(f"{name}, {heads}", Setup(backend, heads), Work(64, 2048, 1))


def decode_tensor_parallel() -> Iterable[Line]:
    """One rank of eight: one KV head."""
    for work in DECODES:
        for name, backend in PAIR.items():
            heads = Heads(4, 1, 128)
            yield decode(f"{name}, {heads}", Setup(backend, heads), work)


def decode_fp8() -> Iterable[Line]:
    for work in DECODES:
        yield decode("fa3_fp8", Setup(Fp8FlashAttentionBackend, kv_dtype=torch.float8_e4m3fn), work)


def prefill_pages() -> Iterable[Line]:
    for work in PREFILLS:
        for size in (*PAGE_SIZES, 256):
            yield prefill(f"page size {size}", Setup(FA3, page_size=size), work)


def own_kernels() -> Iterable[Line]:
    """`triton` beside fa3, each pair in one run: decode, prompts, prompts and drafts on prefixes.
    What fraction of fa3's rate it reaches stands behind its line."""
    for measure, works in ((decode, OWN_DECODES), (prefill, OWN_PREFILLS)):
        for work in works:
            yield from beside(*(measure(name, Setup(one), work) for name, one in OWN.items()))


def beside(theirs: Line, ours: Line) -> Iterable[Line]:
    """Both, with the share of their rate that ours reaches."""
    reached = theirs.microseconds / ours.microseconds
    return theirs, replace(ours, variant=f"{ours.variant}, {reached:.2f} of {theirs.variant}")


def own_kernels_fp8() -> Iterable[Line]:
    fp8 = {"fa3_fp8": Fp8FlashAttentionBackend, "triton_fp8": Fp8TritonBackend}
    setups = {name: Setup(one, kv_dtype=torch.float8_e4m3fn) for name, one in fp8.items()}
    for measure, works in ((decode, OWN_DECODES), (prefill, OWN_PREFILLS)):
        for work in works:
            yield from beside(*(measure(name, setup, work) for name, setup in setups.items()))


def own_kernels_heads() -> Iterable[Line]:
    for heads in (Heads(8 * group, 8, dim) for dim in (64, 128, 256) for group in (1, 4, 8)):
        work = Work(64, 0, 1024)
        setups = {f"{name}, {heads}": Setup(one, heads) for name, one in OWN.items()}
        yield from beside(*(prefill(name, setup, work) for name, setup in setups.items()))


def prefill_heads() -> Iterable[Line]:
    work = Work(1, 0, 8192)
    for heads in (Heads(8 * group, 8, dim) for dim in (64, 128, 256) for group in (1, 4)):
        yield prefill(str(heads), Setup(FA3, heads), work)
    fp8 = Setup(Fp8FlashAttentionBackend, kv_dtype=torch.float8_e4m3fn)
    yield prefill("e4m3", fp8, work)


def around() -> Iterable[Line]:
    """The launches beside attention: step tables, K and V into the pool. Launched from the host one
    at a time, so that small ones show the host's time."""
    kernels = load_triton_kernels()
    for rows, length in ((1, 1024), (256, 8192)):
        for size in (1, 128):
            step = build_step(Setup(FA3, page_size=size), Work(rows, 64, 1))
            step.batch.seq_lens.fill_(length)
            step.batch.seq_lens_cpu.fill(length)
            step.backend.init_cuda_graph_state(rows)
            step.backend.init_forward_metadata_capture_cuda_graph(step.batch)
            seconds = seconds_of(lambda: step.backend.record_step_tables(step.batch), REPEATS)  # noqa: B023
            yield Line(f"{rows} x {length}", f"step tables, page size {size}", seconds * 1e6)
    for tokens in (64, 8192):
        pages = torch.zeros((tokens, 1, 8, 128), dtype=torch.bfloat16, device="cuda")
        k, places = torch.randn_like(pages).view(-1, 8, 128), torch.randperm(tokens).cuda()
        seconds = seconds_of(lambda: kernels.copy_kv(k, k, pages, pages, places), REPEATS)  # noqa: B023
        yield Line(f"{tokens} tokens", "K and V to the pool", seconds * 1e6)


TABLES: dict[str, Callable[[], Iterable[Line]]] = {
    table.__name__: table
    for table in (
        decode_backends,
        decode_projected,
        decode_pages,
        decode_eager,
        decode_context,
        decode_heads,
        decode_tensor_parallel,
        decode_fp8,
        own_kernels,
        own_kernels_fp8,
        own_kernels_heads,
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
    rows = []
    for name in arguments.only:
        print(f"\n{name}", flush=True)
        for line in TABLES[name]():
            print(line, flush=True)
            rows.append(
                {"table": name, **{field: getattr(line, field) for field in Line.__slots__}}
            )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
