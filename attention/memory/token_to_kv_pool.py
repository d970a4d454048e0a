"""Second level of KV memory: cache index to K and V, in pages, for every layer of one rank.

A cache index is page_id * page_size + offset. Page 0 is the dummy page: padding rows write there
and nobody's tokens live there, so allocators hand out pages 1 .. num_pages - 1. Knows no request
and no free list. Other layouts (latent, sliding window) are further subclasses in their own files.
"""

from abc import ABC, abstractmethod

import numpy as np
import torch

from attention.config import AttentionConfig

NUM_RESERVED_PAGES = 1
_ALIGNMENT_BYTES = 64


class TokenToKVPool(ABC):
    """What backends, the runner and the allocator ask of any layout of KV memory."""

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        if num_pages <= NUM_RESERVED_PAGES:
            raise ValueError(
                f"num_pages must exceed the {NUM_RESERVED_PAGES} reserved page, got {num_pages}"
            )
        self.num_pages = num_pages
        self.page_size = config.page_size
        self.num_layers = config.num_layers

    @staticmethod
    @abstractmethod
    def bytes_per_page(config: AttentionConfig) -> int:
        """Bytes that one page occupies over all layers: what sizing a pool divides by."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Bytes of device memory this pool holds."""

    @abstractmethod
    def tensors(self) -> tuple[torch.Tensor, ...]:
        """What keeps tokens, whole: those bytes."""

    @abstractmethod
    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K (num_pages, page_size, heads, head_dim) and V (num_pages, page_size, heads, v_head_dim)
        of one layer, as views: no copy."""

    @abstractmethod
    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        """Write n tokens of one layer at out_cache_loc int64 (n,), converted to the pool's dtype.

        k: (n, heads, head_dim); v: (n, heads, v_head_dim); strides are free. Where several tokens
        name the same index (padding rows on the dummy page) any one of them stays.
        """

    @property
    def pages_by_account(self) -> tuple[int, ...]:
        """How many pages each account's tokens have."""
        return (self.num_pages,)

    def account_of(self, layer_id: int) -> int:
        """The account whose cache indices the layer's pages are read by."""
        return 0

    @abstractmethod
    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        """Zero what cache_indices int64 (n,) hold, in account 0, in all layers. No wait."""

    def move_tokens(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        """Write what sources hold to targets, both int64 (n,) cache indices of account 0, in all
        layers; all of a layer is read before any of it is written. Takes memory for what is read,
        of one layer where there is no more. No wait."""
        raise ValueError(f"tokens of a {type(self).__name__} stay where they are")

    def line_up(
        self,
        sources: torch.Tensor,
        targets: torch.Tensor,
        starts: torch.Tensor,
        num_kept: torch.Tensor,
    ) -> None:
        """As move_tokens, of rows of tokens: row i's begin at starts[i], int64 (rows + 1,), and of
        them the first num_kept[i] move, int64 (rows,); the others stay. A token's source is its
        target, or that of a later one of its row."""
        self.move_tokens(sources, targets)

    def clear_bounded(self, account: int, cache_indices: torch.Tensor) -> None:
        """As clear_tokens, of an account beside account 0."""
        raise ValueError(f"there is no account {account}: one keeps every token of every layer")


class MHATokenToKVPool(TokenToKVPool):
    """K and V kept as they are, for multi-head, grouped-query and multi-query attention.

    All layers share one allocation for K and one for V, zeroed: a kernel that loads the unused
    tail of a page multiplies zeros, never NaN.
    """

    def __init__(self, config: AttentionConfig, num_pages: int) -> None:
        super().__init__(config, num_pages)
        pages = (config.num_layers, num_pages, config.page_size, config.tp_k_head_num)
        self._k = zeroed_pages((*pages, config.head_dim), config.kv_dtype, config.device)
        self._v = zeroed_pages((*pages, config.v_head_dim), config.kv_dtype, config.device)

    @staticmethod
    def bytes_per_page(config: AttentionConfig) -> int:
        return config.kv_bytes_per_token * config.page_size

    @property
    def num_bytes(self) -> int:
        return (self._k.numel() + self._v.numel()) * self._k.itemsize

    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self._k, self._v

    def get_kv_buffer(self, layer_id: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._k[layer_id], self._v[layer_id]

    def set_kv_buffer(
        self, layer_id: int, out_cache_loc: torch.Tensor, k: torch.Tensor, v: torch.Tensor
    ) -> None:
        for buffer, new in ((self._k[layer_id], k), (self._v[layer_id], v)):
            tokens = buffer.view(-1, *buffer.shape[2:])
            tokens.index_copy_(0, out_cache_loc, new.to(tokens.dtype))

    def clear_tokens(self, cache_indices: torch.Tensor) -> None:
        for tokens in self.stored():
            tokens.index_fill_(1, cache_indices, 0)

    def move_tokens(self, sources: torch.Tensor, targets: torch.Tensor) -> None:
        for tokens in self.stored():
            try:
                read = tokens.index_select(1, sources)
            except torch.OutOfMemoryError:
                # Nothing of these has been written.
                for layer in tokens:
                    layer.index_copy_(0, targets, layer.index_select(0, sources))
            else:
                tokens.index_copy_(1, targets, read)

    def stored(self) -> tuple[torch.Tensor, ...]:
        """K and V, (layers, cache indices, heads, size). float8 is indexed as bytes: torch has no
        kernel for it."""
        stored = (b.view(torch.uint8) if b.itemsize == 1 else b for b in (self._k, self._v))
        return tuple(buffer.flatten(1, 2) for buffer in stored)


def zeroed_pages(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """torch.zeros; on CPU the pages stay untouched, hence unbacked, until a token lands there."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return torch.from_numpy(raw[start : start + num_bytes]).view(dtype).view(shape)
