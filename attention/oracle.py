"""The reference every backend is measured against: float64, one row and one head at a time.

Same inputs and same calls as a backend, slow and obvious. It is not registered: nothing serves
with it. Knows no kernel package and no device trick.
"""

from __future__ import annotations

import torch

from attention.backends.base import AttentionBackend
from attention.capability import BackendCapability, BackendProbe
from attention.config import MAX_PAGE_SIZE, MIN_PAGE_SIZE
from attention.forward_batch import AttentionLayer, ForwardBatch
from attention.oracle_visibility import OracleRow, rows_of_batch, seen_keys
from attention.visibility import Causal, Visibility, VisibilityKind

_ANY_FLOAT = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def attend_one_head(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    *,
    logit_cap: float = 0.0,
    window: int = -1,
    chunk: int = -1,
    sink: float | None = None,
) -> torch.Tensor:
    """softmax(cap(q k^T * scaling)) v in float64 for one head of one row.

    q (n, head_dim), k (m, head_dim), v (m, v_head_dim) -> (n, v_head_dim). Query i stands at key
    position m - n + i and sees that key and the ones before it: the last `window` of them if
    window is not -1, those since the last multiple of `chunk` if chunk is not -1.
    sink: a logit that takes its share of the softmax and brings no value.
    """
    num_queries, num_keys = q.shape[0], k.shape[0]
    q, k, v = q.double(), k.double(), v.double()
    out = torch.zeros((num_queries, v.shape[1]), dtype=torch.float64, device=v.device)
    for i in range(num_queries):
        last = num_keys - num_queries + i
        first = 0 if window < 0 else max(0, last - window + 1)
        if chunk > 0:
            first = max(first, last // chunk * chunk)
        out[i] = _attend_all(
            q[i], k[first : last + 1], v[first : last + 1], scaling, logit_cap, sink
        )
    return out


def attend_seen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    seen: torch.Tensor,
    *,
    logit_cap: float = 0.0,
    sink: float | None = None,
) -> torch.Tensor:
    """As attend_one_head; query i sees the keys that seen, bool (n, m), says: at least one."""
    q, k, v = q.double(), k.double(), v.double()
    outs = [
        _attend_all(one, k[keys], v[keys], scaling, logit_cap, sink)
        for one, keys in zip(q, seen, strict=True)
    ]
    return torch.stack(outs) if outs else v.new_zeros((0, v.shape[1]))


def _attend_all(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scaling: float,
    logit_cap: float,
    sink: float | None,
) -> torch.Tensor:
    """Of one query over keys that it sees."""
    logits = k @ q * scaling
    if logit_cap > 0.0:
        logits = logit_cap * torch.tanh(logits / logit_cap)
    if sink is not None:
        logits = torch.cat([logits, logits.new_tensor([sink])])
    return torch.softmax(logits, dim=0)[: len(k)] @ v


class OracleBackend(AttentionBackend):
    """A backend in float64. Its output is float64 too, whatever q's dtype; padding rows give 0."""

    capability: BackendCapability = BackendCapability(
        name="oracle",
        device_types=("cpu", "cuda"),
        min_compute_capability=None,
        max_compute_capability=None,
        dtypes=_ANY_FLOAT,
        kv_dtypes=_ANY_FLOAT,
        page_sizes=range(MIN_PAGE_SIZE, MAX_PAGE_SIZE + 1),
        default_page_size=1,
        has_sliding_window=True,
        has_logit_cap=True,
        has_sinks=True,
        has_unequal_head_dims=True,
        has_mixed_batches=True,
        has_mla=False,
        has_chunked_attention=True,
        has_unlike_layers=True,
        has_shared_kv=True,
        has_cross_attention=True,
        visibilities=frozenset(VisibilityKind),
        install_hint="part of this repository",
    )

    @classmethod
    def probe(cls) -> BackendProbe:
        return BackendProbe(is_available=True)

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Nothing is planned: every call reads the tables anew."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        if save_kv_cache:
            self.token_to_kv_pool.set_kv_buffer(layer.layer_id, forward_batch.out_cache_loc, k, v)
        out = torch.zeros((*q.shape[:2], layer.v_head_dim), dtype=torch.float64, device=q.device)
        visibility = forward_batch.visibility
        for number, row in enumerate(rows_of_batch(forward_batch)):
            seq_len = int(forward_batch.seq_lens[number])
            if seq_len == 0:
                continue
            tokens = slice(row.first_token, row.first_token + seq_len - row.prefix_len)
            slot = int(forward_batch.req_pool_indices[number])
            indices = self.req_to_token_pool.req_to_token[slot, :seq_len]
            is_causal = isinstance(visibility, Causal)
            seen = None if is_causal else self._seen(visibility, row, layer).to(q.device)
            self._attend_row(q[tokens], *self._kv_at(indices, layer), layer, out[tokens], seen)
        return out

    @staticmethod
    def _seen(visibility: Visibility, row: OracleRow, layer: AttentionLayer) -> torch.Tensor:
        return seen_keys(visibility, row, layer)

    def forward_cross(
        self, q: torch.Tensor, layer: AttentionLayer, forward_batch: ForwardBatch
    ) -> torch.Tensor:
        """Query by query, as if each stood at the last of its keys."""
        out = torch.zeros((*q.shape[:2], layer.v_head_dim), dtype=torch.float64, device=q.device)
        table = self.req_to_token_pool.tables[self.config.encoder_account]
        rows = torch.repeat_interleave(forward_batch.extend_seq_lens).tolist()
        for token, row in enumerate(rows):
            slot = int(forward_batch.req_pool_indices[row])
            indices = table[slot, : int(forward_batch.encoder_lens_cpu[row])]
            own = slice(token, token + 1)
            self._attend_row(q[own], *self._kv_at(indices, layer), layer, out[own], None)
        return out

    def _kv_at(
        self, cache_indices: torch.Tensor, layer: AttentionLayer
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K (n, heads, head_dim) and V (n, heads, v_head_dim), cache_indices int32 (n,)."""
        k, v = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        pages, offsets = cache_indices.long() // k.shape[1], cache_indices.long() % k.shape[1]
        return k[pages, offsets], v[pages, offsets]

    @staticmethod
    def _attend_row(
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: AttentionLayer,
        out: torch.Tensor,
        seen: torch.Tensor | None,
    ) -> None:
        """Fill out (n, q_heads, v_head_dim) from one row's queries and its keys in order.

        seen: bool (n, keys), None where the layer says what a query sees.
        """
        group = layer.tp_q_head_num // layer.tp_k_head_num
        for head in range(layer.tp_q_head_num):
            sink = None if layer.sinks is None else float(layer.sinks[head])
            keys, values = k[:, head // group], v[:, head // group]
            if seen is None:
                out[:, head] = attend_one_head(
                    q[:, head],
                    keys,
                    values,
                    layer.scaling,
                    logit_cap=layer.logit_cap,
                    window=layer.sliding_window_size,
                    chunk=layer.chunk_size,
                    sink=sink,
                )
            else:
                out[:, head] = attend_seen(
                    q[:, head],
                    keys,
                    values,
                    layer.scaling,
                    seen,
                    logit_cap=layer.logit_cap,
                    sink=sink,
                )
