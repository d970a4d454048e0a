"""How many threads torch may use in a process that computes on the CPU."""

import os

import torch

from workers.config import EngineConfig


def num_cpu_threads(config: EngineConfig, num_cores: int) -> int:
    """Threads of one rank: its share of the cores, less one for the service beside it.

    OpenMP threads spin while they wait: with as many of them as cores, any other busy process
    makes every kernel wait for its slowest thread (measured: 20 to 40 times slower decode).
    """
    if config.num_cpu_threads is not None:
        return config.num_cpu_threads
    return max(1, (num_cores - 1) // config.tp_size)


def limit_cpu_threads(config: EngineConfig, device: torch.device) -> None:
    """Apply num_cpu_threads to this process if it computes on the CPU."""
    if device.type == "cpu":
        torch.set_num_threads(num_cpu_threads(config, len(os.sched_getaffinity(0))))
