"""Steps as FlashInfer's wrappers plan and run them, eager and in graphs, over heads and latents.

Layers that differ in window or cap are planned apart, by wrappers of their own. A plan is the
host's, from the host's lengths, which are the device's; pages are found on the device, and in
graphs lengths, too.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from attention.backends.base import GraphAttentionBackend
from attention.backends.flash_infer_workspace import FlashInferWorkspace
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.page_lists import HostRows, PageLists
from attention.memory.layout import EveryToken, LastTokens, Retention
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool


class LayerKind(NamedTuple):
    """Layers that share a plan. window: as AttentionLayer.sliding_window_size, -1 being all."""

    window: int
    logit_cap: float

    @property
    def retention(self) -> Retention:
        return LastTokens(self.window) if self.window > 0 else EveryToken()

    @property
    def window_left(self) -> int:
        """Keys before a query's own that it sees, -1 being all."""
        return self.window - 1 if self.window > 0 else -1


Wrappers = Mapping[LayerKind, Any]
"""The package's objects that plan a step and then run its layers."""


class FlashInferSteps(GraphAttentionBackend):
    """Whoever extends it sets these. _workspace: of all wrappers. _fill_page_lists:
    triton_page_lists.fill_page_lists. _decode, _extend: the wrappers of eager steps."""

    _workspace: FlashInferWorkspace
    _fill_page_lists: Callable[..., None]
    _decode: Wrappers
    _extend: Wrappers

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._accounts = accounts_by_kind(config)
        self._windows = {account: kind.window for kind, account in self._accounts.items()}
        self._step: Wrappers | None = None
        self._graph_lists: dict[int, PageLists] = {}
        self._graphed: dict[int, Wrappers] = {}

    @abstractmethod
    def _new_graphed(self, kind: LayerKind, lists: PageLists) -> Any:
        """The wrapper of a graph's decode steps, over lists of as many rows."""

    @abstractmethod
    def _plan_decode(
        self, wrapper: Any, kind: LayerKind, rows: HostRows, indices: torch.Tensor
    ) -> None:
        """Plan rows of one new token. indices: of PageLists, or empty for a graph's wrapper."""

    @abstractmethod
    def _plan_extend(
        self,
        wrapper: Any,
        kind: LayerKind,
        rows: HostRows,
        indices: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> None:
        """Plan rows of any number of new tokens."""

    @abstractmethod
    def _graph_bytes(self, max_bs: int) -> int:
        """Of workspace that graphs of so many rows need."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.check_visibility(forward_batch)
        self._step = {}
        if forward_batch.num_tokens == 0:
            return
        seq_lens, new_lens = forward_batch.seq_lens_cpu, forward_batch.extend_seq_lens_cpu
        rows = HostRows.of(seq_lens, new_lens, self.token_to_kv_pool.page_size)
        all_lists = {
            account: PageLists.allocate(rows.batch_size, rows.num_pages, self.config.device)
            for account in self._windows
        }
        self._fill(all_lists, forward_batch, int(rows.kv_lens.max()))
        is_decode = forward_batch.forward_mode.is_decode
        wrappers = self._decode if is_decode else self._extend
        for kind, wrapper in wrappers.items():
            indices = all_lists[self._accounts[kind]].indices
            if is_decode:
                self._plan_decode(wrapper, kind, rows, indices)
            else:
                self._plan_extend(wrapper, kind, rows, indices, forward_batch)
        self._step = wrappers

    def _fill(
        self, all_lists: Mapping[int, PageLists], forward_batch: ForwardBatch, max_seq_len: int
    ) -> None:
        """The batch's lengths and pages, from device tensors to device tensors."""
        for account, lists in all_lists.items():
            self._fill_page_lists(
                self.req_to_token_pool.own_tables[account],
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.extend_seq_lens,
                lists,
                self.token_to_kv_pool.page_size,
                max_seq_len,
                self._windows[account] if account else 0,
            )

    def init_cuda_graph_state(self, max_bs: int) -> None:
        max_pages = max_bs * -(-self.config.max_context_len // self.token_to_kv_pool.page_size)
        self._graph_lists = {
            account: PageLists.allocate(max_bs, max_pages, self.config.device)
            for account in self._windows
        }
        self._workspace.reserve(self._graph_bytes(max_bs))
        self._graphed = {}

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """The batch size's wrappers, planned for rows of one key: what a graph records of a plan
        depends on the batch size alone."""
        self.check_visibility(forward_batch)
        num_rows = forward_batch.batch_size
        self._check_graph_rows(num_rows)
        if num_rows not in self._graphed:
            self._graphed[num_rows] = {
                kind: self._new_graphed(kind, self._graph_lists[account].first(num_rows))
                for kind, account in self._accounts.items()
            }
        self.before_replay(num_rows, forward_batch.extend_seq_lens_cpu)
        self._step = self._graphed[num_rows]

    def _check_graph_rows(self, num_rows: int) -> None:
        if not self._graph_lists:
            raise RuntimeError("init_cuda_graph_state must run before a graph's metadata")
        max_bs = next(iter(self._graph_lists.values())).max_bs
        if num_rows > max_bs:
            raise ValueError(
                f"batch of {num_rows} rows, but init_cuda_graph_state was told at most {max_bs}"
            )

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        self._check_graph_rows(forward_batch.batch_size)
        self._fill(self._graph_lists, forward_batch, self.config.max_context_len)

    @property
    def plans_on_host(self) -> bool:
        return True

    def before_replay(self, num_rows: int, seq_lens_cpu: npt.NDArray[np.int32]) -> None:
        """Plans for the replay's lengths. Its pages the graph finds itself."""
        new_lens = np.ones(num_rows, dtype=np.int32)
        rows = HostRows.of(seq_lens_cpu[:num_rows], new_lens, self.token_to_kv_pool.page_size)
        for kind, wrapper in self._graphed[num_rows].items():
            no_indices = self._graph_lists[self._accounts[kind]].indices[:0]
            self._plan_decode(wrapper, kind, rows, no_indices)

    def _number_of(self, kind: LayerKind) -> int:
        return list(self._accounts).index(kind)

    def _wrapper_of(self, kind: LayerKind) -> Any:
        if not self._step:
            raise RuntimeError("init_forward_metadata must run before the step's first layer")
        return self._step[kind]


def accounts_by_kind(config: AttentionConfig) -> dict[LayerKind, int]:
    """Of layers without chunks: which account has their tokens."""
    return {
        LayerKind(layer.sliding_window_size, layer.logit_cap): config.account_of(layer_id)
        for layer_id, layer in enumerate(config.layers)
        if layer.chunk_size <= 0 and not layer.max_encoder_tokens
    }
