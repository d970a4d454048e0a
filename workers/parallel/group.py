"""The tensor-parallel group as a value: who this rank is and how ranks add and join tensors.

Layers receive a TPGroup; nothing below asks a process-wide registry who it is. Knows no model, no
request and no Ray.
"""

from datetime import timedelta
from typing import Literal, Protocol

import torch
import torch.distributed as dist

from workers.parallel.peer_memory import PeerMemory, share_memory


class TPGroup(Protocol):
    """The collectives that sharded layers and the runner need. Every rank calls them in one order.

    None of them waits on the host for the device, except barrier and all_reduce_min, so that a
    forward pass over NCCL can be captured in a CUDA graph.
    """

    @property
    def rank(self) -> int:
        """This rank, 0 <= rank < size."""

    @property
    def size(self) -> int: ...

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, any shape. May reduce in place: the caller gives the argument up."""

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        """(..., d) on each rank -> (..., size * d), contiguous, rank 0's elements first."""

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        """Overwrite tensor with source_rank's, which has the same shape and dtype."""

    def all_reduce_min(self, value: int) -> int:
        """The smallest value any rank brought, on the host."""

    def share_memory(self, num_bytes: int) -> PeerMemory | None:
        """num_bytes of each rank that all ranks' kernels can address; None where they cannot."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:
        """Leave the group. Nothing may be called afterwards."""


class SingleRank:
    """The group of one: every collective is the identity."""

    rank = 0
    size = 1

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        """Nothing to copy: the only rank is the source."""

    def all_reduce_min(self, value: int) -> int:
        return value

    def share_memory(self, num_bytes: int) -> None:
        """Nobody to share it with."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def close(self) -> None:
        """Nothing to leave."""


class TorchDistributedGroup:
    """A torch.distributed process group: gloo for CPU tensors, nccl for CUDA tensors.

    device: where this rank's tensors live; all_reduce_min carries its integer there.
    can_share_memory: False leaves everything to the group's collectives.
    """

    def __init__(
        self, process_group: dist.ProcessGroup, device: torch.device, can_share_memory: bool = True
    ) -> None:
        self._process_group = process_group
        self._device = device
        self._can_share_memory = can_share_memory
        self._rank = process_group.rank()
        self._size = process_group.size()

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self._process_group)
        return tensor

    def all_gather_last_dim(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.contiguous()
        stacked = tensor.new_empty((self._size * tensor.shape[0], *tensor.shape[1:]))
        dist.all_gather_into_tensor(stacked, tensor, group=self._process_group)
        by_rank = stacked.view(self._size, *tensor.shape).movedim(0, -2)
        # Where d is 1 the reshape would be a view across rows.
        return by_rank.contiguous().view(*tensor.shape[:-1], self._size * tensor.shape[-1])

    def broadcast(self, tensor: torch.Tensor, source_rank: int) -> None:
        dist.broadcast(tensor, group=self._process_group, group_src=source_rank)

    def all_reduce_min(self, value: int) -> int:
        carrier = torch.tensor([value], dtype=torch.int64, device=self._device)
        dist.all_reduce(carrier, op=dist.ReduceOp.MIN, group=self._process_group)
        return int(carrier.item())

    def share_memory(self, num_bytes: int) -> PeerMemory | None:
        if self._device.type != "cuda" or not self._can_share_memory:
            return None
        return share_memory(self._process_group, num_bytes, self._device)

    def barrier(self) -> None:
        self.all_reduce_min(0)

    def close(self) -> None:
        dist.destroy_process_group(self._process_group)


def connect_tp_group(
    backend: Literal["gloo", "nccl"],
    init_method: str,
    rank: int,
    size: int,
    device: torch.device,
    timeout_s: float,
    can_share_memory: bool = True,
) -> TorchDistributedGroup:
    """Join the group of `size` ranks that meet at init_method (tcp://host:port or file://path).

    Blocks until every rank has come, at most timeout_s; the same limit holds for each collective.
    Makes the group torch's default one: a process belongs to one tensor-parallel group.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=init_method,
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=timeout_s),
        device_id=device if device.type == "cuda" else None,
    )
    default_group = dist.group.WORLD
    if default_group is None:
        raise RuntimeError(f"torch.distributed joined no {backend} group at {init_method}")
    return TorchDistributedGroup(default_group, device, can_share_memory)
