"""Where the ranks of one engine meet: a private directory with a socket and a rendezvous file.

All ranks share a node (STRICT_PACK), so no port is opened for it.
"""

import os
from pathlib import Path

import torch

from workers.config import EngineConfig
from workers.parallel.group import TorchDistributedGroup, connect_tp_group

COLLECTIVE_TIMEOUT_S = 300.0
GLOO_INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"


def connect_rank(
    config: EngineConfig, directory: Path, rank: int, device: torch.device
) -> TorchDistributedGroup:
    """Join the engine's group: gloo over loopback for CPU, NCCL for CUDA. Blocks for the others."""
    os.environ.setdefault(GLOO_INTERFACE_VARIABLE, "lo")
    return connect_tp_group(
        "nccl" if device.type == "cuda" else "gloo",
        f"file://{directory / 'rendezvous'}",
        rank,
        config.tp_size,
        device,
        COLLECTIVE_TIMEOUT_S,
        config.enable_peer_memory,
    )


def plan_socket_path(directory: Path) -> Path:
    return directory / "plans.sock"
