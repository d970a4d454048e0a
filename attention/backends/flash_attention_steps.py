"""A step's lengths and pages as FlashAttention's kernels read them, in eager steps and in graphs.

Follows the published description of SGLang's backend (metadata once per step, maxima from the host,
static buffers for graphs). Launches one kernel a step for each account of KV memory that layers
read, one for a plain model, and no attention.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping

from attention.backends.base import GraphAttentionBackend
from attention.backends.flash_attention_metadata import StepFacts
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.providers import TritonKernels
from attention.kernels.step_tables import StepTables
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool

AccountTables = Mapping[int, StepTables]
"""Of a step, by account: lengths, which are the same in all, and pages."""


class FlashAttentionSteps(GraphAttentionBackend):
    """A backend whose layers of one account share StepTables; _start_step takes those of each
    step."""

    _triton: TritonKernels

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        self._windows_by_account = _windows_by_account(config)
        self._graph_tables: AccountTables | None = None

    @abstractmethod
    def _start_step(self, tables: AccountTables, facts: StepFacts) -> None:
        """A step begins whose rows are the tables' first ones."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        self.check_visibility(forward_batch)
        bs = forward_batch.batch_size
        max_seq_len_k = int(forward_batch.seq_lens_cpu.max(initial=0))
        max_seq_len_q = int(forward_batch.extend_seq_lens_cpu.max(initial=0))
        page_size = self.token_to_kv_pool.page_size
        max_pages = max(1, -(-max_seq_len_k // page_size))
        tables = self._allocate(bs, max_pages)
        if bs:
            self._fill(tables, forward_batch, max_seq_len_k)
        self._start_step(tables, StepFacts(bs, max_seq_len_q, max_seq_len_k))

    def init_cuda_graph_state(self, max_bs: int) -> None:
        max_pages = -(-self.config.max_context_len // self.token_to_kv_pool.page_size)
        self._graph_tables = self._allocate(max_bs, max_pages)

    def _allocate(self, max_bs: int, max_pages: int) -> AccountTables:
        device = self.config.device
        return {
            account: StepTables.allocate(max_bs, max_pages, device)
            for account in self._windows_by_account
        }

    def init_forward_metadata_capture_cuda_graph(self, forward_batch: ForwardBatch) -> None:
        """Metadata over the static tables' first rows."""
        self.check_visibility(forward_batch)
        tables = self._static_tables(forward_batch)
        max_seq_len_q = int(forward_batch.extend_seq_lens_cpu.max())
        facts = StepFacts(forward_batch.batch_size, max_seq_len_q, self.config.max_context_len)
        self._start_step(tables, facts)

    def record_step_tables(self, forward_batch: ForwardBatch) -> None:
        """Launches that fill the static tables from the batch's device tensors."""
        tables = self._static_tables(forward_batch)
        self._fill(tables, forward_batch, self.config.max_context_len)

    def _static_tables(self, forward_batch: ForwardBatch) -> AccountTables:
        if self._graph_tables is None:
            raise RuntimeError("init_cuda_graph_state must run before a graph's metadata")
        for tables in self._graph_tables.values():
            if forward_batch.batch_size > tables.max_bs:
                raise ValueError(
                    f"batch of {forward_batch.batch_size} rows, but init_cuda_graph_state was told "
                    f"at most {tables.max_bs}"
                )
        return self._graph_tables

    def _fill(self, tables: AccountTables, forward_batch: ForwardBatch, max_seq_len: int) -> None:
        """The batch's lengths and pages, from device tensors to device tensors."""
        for account, own in tables.items():
            self._triton.fill_step_tables(
                self.req_to_token_pool.own_tables[account],
                forward_batch.req_pool_indices,
                forward_batch.seq_lens,
                forward_batch.extend_seq_lens,
                own,
                self.token_to_kv_pool.page_size,
                max_seq_len,
                self._windows_by_account[account],
            )


def _windows_by_account(config: AttentionConfig) -> dict[int, int]:
    """The accounts that layers read whose every query sees its row's last tokens, or all: as many
    of them as stay readable, 0 where all do."""
    windows = {}
    for layer_id, layer in enumerate(config.layers):
        if layer.chunk_size <= 0 and not layer.max_encoder_tokens:
            account = config.account_of(layer_id)
            windows[account] = layer.sliding_window_size if account else 0
    return windows
