"""FlashInfer's attention beside FlashAttention-3's and our own, and what planning a step costs.

    python -m benchmarks.h200.flashinfer_steps

One layer of Llama-3.1-8B's attention, as benchmarks/h200/attention.py. A plan is the host's, once a
step and kind of layers, before a graph's replay: its time is the host's alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

import torch

from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_infer import FlashInferBackend
from attention.backends.triton_paged import TritonBackend
from benchmarks.h200.attention import OWN_DECODES, OWN_PREFILLS, UNLIKE, Line, decode, prefill
from benchmarks.h200.attention_steps import Setup, Work, build_step

BACKENDS = {"fa3": FlashAttentionBackend, "triton": TritonBackend, "flashinfer": FlashInferBackend}
NUM_ROWS = (1, 16, 64, 256)
NUM_PLANS = 30


def steps() -> Iterable[Line]:
    works: tuple[tuple[Callable[[str, Setup, Work], Line], tuple[Work, ...]], ...] = (
        (decode, (*OWN_DECODES, *UNLIKE)),
        (prefill, OWN_PREFILLS),
    )
    for measure, own in works:
        for work in own:
            for name, backend in BACKENDS.items():
                yield measure(name, Setup(backend, page_size=64), work)


def plans() -> Iterable[Line]:
    for num_rows in NUM_ROWS:
        step = build_step(Setup(FlashInferBackend, page_size=64), Work(num_rows, 1024, 1))
        step.backend.init_cuda_graph_state(num_rows)
        step.backend.init_forward_metadata_capture_cuda_graph(step.batch)
        seconds = []
        for _ in range(NUM_PLANS):
            torch.cuda.synchronize()
            started_s = time.perf_counter()
            step.backend.before_replay(num_rows, step.batch.seq_lens_cpu)
            seconds.append(time.perf_counter() - started_s)
        median_s = sorted(seconds)[NUM_PLANS // 2]
        yield Line(f"{num_rows} rows", "flashinfer, plan", median_s * 1e6)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for table in (plans, steps):
        print(f"\n{table.__name__}", flush=True)
        for line in table():
            print(line, flush=True)


if __name__ == "__main__":
    main()
