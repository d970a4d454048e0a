"""Attention of mixed steps on one H200: everything in one call against decode rows by themselves.

    python3 -m benchmarks.h200.mixed_steps

One layer of Llama-3.1-8B's attention, K and V in the pool already: microseconds a layer on the
device when layers are launched one after the other, and the host's time to launch a layer.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch

from attention import ForwardMode
from attention.backends.flash_attention import FlashAttentionBackend
from benchmarks.h200.attention_steps import (
    Setup,
    Step,
    Work,
    build_step,
    eager_seconds_per_layer,
)

REPEATS = 20
DECODE_KEYS = 1100
PROMPT_TOKENS = 1000


class OneCall(FlashAttentionBackend):
    """Decode rows go through the prefill kernel."""

    min_decode_rows: ClassVar[int] = 1 << 30


class TwoCalls(FlashAttentionBackend):
    """Decode rows are attended by a call of their own, however few they are."""

    min_decode_rows: ClassVar[int] = 1
    max_prompt_tokens_per_decode_row: ClassVar[int] = 1 << 30


@dataclass(frozen=True, slots=True)
class Mix:
    """Decode rows of DECODE_KEYS keys before prompts of prompt_tokens without a prefix."""

    num_decode: int
    num_prompts: int
    prompt_tokens: int = PROMPT_TOKENS

    def __str__(self) -> str:
        return f"{self.num_decode} + {self.num_prompts} x {self.prompt_tokens}"


MIXES = (
    *(Mix(num_decode, 8) for num_decode in (4, 16, 32, 64, 128, 248)),
    # What an inter-token target of 50 ms leaves for prompts.
    *(Mix(num_decode, 2, 960) for num_decode in (32, 64, 128, 192, 248)),
    *(Mix(num_decode, 4) for num_decode in (64, 128, 248)),
    Mix(248, 1, 300),
    Mix(248, 0),
    Mix(0, 8),
)


def build_mix(backend: type[FlashAttentionBackend], mix: Mix) -> Step:
    """A step of that mix over pools that hold DECODE_KEYS keys of every row."""
    num_rows = mix.num_decode + mix.num_prompts
    step = build_step(Setup(backend), Work(num_rows, DECODE_KEYS, 1))
    new = np.repeat([1, mix.prompt_tokens], [mix.num_decode, mix.num_prompts]).astype(np.int32)
    lengths = (DECODE_KEYS, mix.prompt_tokens)
    seq_lens = np.repeat(lengths, [mix.num_decode, mix.num_prompts]).astype(np.int32)
    device, num_tokens = step.q.device, int(new.sum())
    batch = replace(
        step.batch,
        forward_mode=ForwardMode.EXTEND if mix.num_prompts else ForwardMode.DECODE,
        num_tokens=num_tokens,
        seq_lens=torch.from_numpy(seq_lens).to(device),
        extend_seq_lens=torch.from_numpy(new).to(device),
        extend_prefix_lens=torch.from_numpy(seq_lens - new).to(device),
        seq_lens_cpu=seq_lens,
        extend_seq_lens_cpu=new,
        extend_prefix_lens_cpu=seq_lens - new,
    )
    q = torch.randn((num_tokens, *step.q.shape[1:]), dtype=step.q.dtype, device=device)
    step.backend.init_forward_metadata(batch)
    return replace(step, batch=batch, q=q)


@torch.inference_mode()
def host_seconds_per_layer(step: Step) -> float:
    """Median host time to launch a layer; the device never makes the host wait."""
    times = []
    for _ in range(REPEATS):
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        step.run_layers()
        times.append((time.perf_counter() - start_s) / len(step.layers))
    return statistics.median(times)


def main() -> None:
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    print("| decode rows + prompts | one call, us | two calls, us | host, us: one | two |")
    print("|---|---|---|---|---|")
    for mix in MIXES:
        steps = [build_mix(backend, mix) for backend in (OneCall, TwoCalls)]
        device_us = [eager_seconds_per_layer(step, REPEATS) * 1e6 for step in steps]
        host_us = [host_seconds_per_layer(step) * 1e6 for step in steps]
        cells = (f"{value:.1f}" for value in (*device_us, *host_us))
        print(f"| {mix} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
