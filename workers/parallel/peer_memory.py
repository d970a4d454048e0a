"""Memory of every rank of a node that each rank's kernels can read and write where it lies.

torch's symmetric memory makes it: every rank allocates as much, and maps what the others have. No
multicast object is ever made. Knows no kernel, and not what the memory is for.
"""

import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist

logger = logging.getLogger(__name__)

_ALIGNMENT_BYTES = 256
_NO_MULTICAST = "TORCH_SYMM_MEM_DISABLE_MULTICAST"
_ALLOW_ONE_DEVICE_EACH = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"


@dataclass(frozen=True, slots=True)
class PeerMemory:
    """buffers: uint8 (num_bytes,) of each rank, in order of the ranks, all on this rank's device.
    addresses: int64 (size,), where they begin, on the device. Zeros at first.
    """

    rank: int
    buffers: tuple[torch.Tensor, ...]
    addresses: torch.Tensor

    @property
    def size(self) -> int:
        return len(self.buffers)

    @property
    def num_bytes(self) -> int:
        return self.buffers[0].shape[0]


class PeerArena:
    """Hands out parts of peer memory, each once. Every rank takes the same in the same order."""

    def __init__(self, memory: PeerMemory) -> None:
        self.memory = memory
        self._num_taken = 0

    def take(self, num_bytes: int) -> int:
        """Where a part of num_bytes begins: an offset in every rank's buffer.

        Raises ValueError where there is not so much left.
        """
        offset = self._num_taken
        self._num_taken += -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        if self._num_taken > self.memory.num_bytes:
            raise ValueError(f"{num_bytes} bytes at {offset} exceed {self.memory.num_bytes}")
        return offset


def share_memory(
    group: dist.ProcessGroup, num_bytes: int, device: torch.device
) -> PeerMemory | None:
    """Peer memory of a group of CUDA ranks on one node, or None, with a warning, where a rank's
    device cannot reach another's. Every rank calls it at the same point and all get the same.
    """
    memory: PeerMemory | None = None
    try:
        memory = _share(group, num_bytes, device)
    except RuntimeError as error:
        logger.warning("rank %d: no memory in common with its peers: %s", group.rank(), error)
    has_all = torch.tensor([memory is not None], dtype=torch.int32, device=device)
    dist.all_reduce(has_all, op=dist.ReduceOp.MIN, group=group)
    return memory if int(has_all.item()) else None


def _share(group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> PeerMemory:
    os.environ.setdefault(_NO_MULTICAST, "1")
    if torch.cuda.device_count() == 1:
        # Each rank sees its own device only, by the same number.
        os.environ.setdefault(_ALLOW_ONE_DEVICE_EACH, "1")
    # Not there in builds of torch without CUDA.
    from torch.distributed import _symmetric_memory as symmetric

    own = symmetric.empty(num_bytes, dtype=torch.uint8, device=device)
    own.zero_()
    torch.cuda.synchronize(device)
    handle = symmetric.rendezvous(own, group.group_name)
    rank, size = group.rank(), group.size()
    buffers = tuple(
        own if peer == rank else handle.get_buffer(peer, (num_bytes,), torch.uint8)
        for peer in range(size)
    )
    addresses = [buffer.data_ptr() for buffer in buffers]
    return PeerMemory(rank, buffers, torch.tensor(addresses, dtype=torch.int64, device=device))
