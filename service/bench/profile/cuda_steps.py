"""Profiling steps on a CUDA device: its kernels, replayed graphs' too, from torch's profiler."""

from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile

from service.bench.profile.breakdown import Breakdown, KernelEvent, device_breakdown


def profile_cuda_steps(step: Callable[[], object], num_steps: int) -> Breakdown:
    """The mean of num_steps calls of step, from the first kernel's start to the last one's end."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step()
        torch.cuda.synchronize()
    events = [
        KernelEvent(event.name, event.time_range.start, event.time_range.elapsed_us())
        for event in profiler.events() or ()
        if event.device_type.name == "CUDA"
    ]
    return device_breakdown(events, num_steps)
