"""The geometry of a model's attention on one rank. Knows no weights, no pools, no requests."""

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from attention.memory.layout import (
    AccountRetention,
    BoundedRetention,
    CacheGroup,
    CurrentChunk,
    Entry,
    EveryToken,
    FixedLength,
    HeadsEntry,
    KVLayout,
    LastTokens,
    LatentEntry,
)

MIN_PAGE_SIZE = 1
MAX_PAGE_SIZE = 256


@dataclass(frozen=True, slots=True)
class AttentionHeads:
    """Query and KV heads of one rank, and elements per K (and query) head and per V head."""

    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        if self.tp_q_head_num % self.tp_k_head_num:
            raise ValueError(
                f"tp_q_head_num={self.tp_q_head_num} is not a multiple of "
                f"tp_k_head_num={self.tp_k_head_num}"
            )

    @property
    def pair_flops(self) -> int:
        """Of one query token and one key: its share of the two products."""
        return 2 * self.tp_q_head_num * (self.head_dim + self.v_head_dim)

    @property
    def entry(self) -> HeadsEntry:
        """What a layer of such heads keeps of a token."""
        return HeadsEntry(self.tp_k_head_num, self.head_dim, self.v_head_dim)


@dataclass(frozen=True, slots=True)
class LayerAttentionConfig:
    """What differs between the attention layers of one model.

    sliding_window_size: number of most recent keys a query sees, itself included; -1 means all.
    logit_cap: c > 0 replaces a score s by c * tanh(s / c) before the softmax; 0 disables it.
    has_sinks: whether the layer adds one learned logit per head to the softmax denominator.
    chunk_size: a query sees the keys since its chunk of so many positions began; -1 means all.
    heads: the layer's own; None means the model's.
    kv_layer_id: an earlier layer whose K and V this one reads, storing none; None means its own.
    max_encoder_tokens: above 0, the layer's queries see what the request's encoder made, at most so
    many tokens, and none of the request's own.
    """

    sliding_window_size: int = -1
    logit_cap: float = 0.0
    has_sinks: bool = False
    chunk_size: int = -1
    heads: AttentionHeads | None = None
    kv_layer_id: int | None = None
    max_encoder_tokens: int = 0

    def __post_init__(self) -> None:
        if self.sliding_window_size > 0 and self.chunk_size > 0:
            raise ValueError(
                f"a layer has a window or chunks, not both: {self.sliding_window_size} and "
                f"{self.chunk_size}"
            )
        is_plain = self.sliding_window_size <= 0 and self.chunk_size <= 0 and self.logit_cap == 0.0
        is_own = self.kv_layer_id is None and not self.has_sinks
        if self.max_encoder_tokens and not (is_plain and is_own):
            raise ValueError("a layer that sees an encoder's tokens sees all of them, and plainly")

    @property
    def retention(self) -> AccountRetention:
        """Which tokens its queries see."""
        if self.max_encoder_tokens > 0:
            return FixedLength(self.max_encoder_tokens)
        if self.sliding_window_size > 0:
            return LastTokens(self.sliding_window_size)
        return CurrentChunk(self.chunk_size) if self.chunk_size > 0 else EveryToken()


class LayerKind(NamedTuple):
    """What layers that are planned and priced alike have in common. account: which one keeps the
    K and V that they read, 0 or one of AttentionConfig.bounded_retentions, counted from 1, or
    AttentionConfig.encoder_account."""

    retention: AccountRetention
    heads: AttentionHeads
    account: int = 0


class LayerCost(NamedTuple):
    """What a key takes to be read, in bytes of K and V, and a (query, key) pair in flops."""

    key_bytes: int
    pair_flops: int


@dataclass(frozen=True)
class AttentionConfig:
    """Geometry shared by the backend, the pools and the layers of one rank.

    tp_q_head_num, tp_k_head_num: query and KV heads of this rank (KV heads are replicated when
    a model has fewer of them than there are ranks, so tp_k_head_num >= 1). head_dim, v_head_dim:
    elements per head. These hold for every layer that names no heads of its own.
    max_context_len: tokens per request, prompt and output. dtype: of q and of the attention
    output. kv_dtype: of the pool.
    latent: what every layer keeps of a token in place of K and V; the heads are then those that
    follow from it, as many K and V heads as query heads.
    has_bounded_accounts: whether tokens that some layers see for a while only are kept in accounts
    of their own; else account 0 keeps every token of every layer.
    """

    num_layers: int
    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    max_context_len: int
    page_size: int
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    layers: tuple[LayerAttentionConfig, ...]
    latent: LatentEntry | None = None
    has_bounded_accounts: bool = False

    def __post_init__(self) -> None:
        if not MIN_PAGE_SIZE <= self.page_size <= MAX_PAGE_SIZE:
            raise ValueError(
                f"page_size must lie in {MIN_PAGE_SIZE}..{MAX_PAGE_SIZE}, got {self.page_size}"
            )
        if len(self.layers) != self.num_layers:
            raise ValueError(f"{len(self.layers)} layer configs for num_layers={self.num_layers}")
        if self.latent is not None and set(self.layers) != {LayerAttentionConfig()}:
            raise ValueError("layers that keep latents see every token and are all alike")
        for layer_id in range(self.num_layers):
            self._check_layer(layer_id)

    def _check_layer(self, layer_id: int) -> None:
        """Raises ValueError where its heads do not divide, or the layer whose K and V it reads has
        none like its own or does not keep all that it sees."""
        heads, source = self.heads_of(layer_id), self.layers[layer_id].kv_layer_id
        if source is None:
            return
        if not 0 <= source < layer_id or self.layers[source].kv_layer_id is not None:
            raise ValueError(f"layer {layer_id} cannot read the K and V of layer {source}")
        if self.heads_of(source).entry != heads.entry:
            raise ValueError(f"layer {layer_id} has other KV heads than layer {source}")
        kept = self.layers[source].retention
        if not isinstance(kept, EveryToken) and kept != self.layers[layer_id].retention:
            raise ValueError(f"layer {layer_id} sees tokens that layer {source} does not keep")

    @cached_property
    def heads(self) -> AttentionHeads:
        """Those of layers that have none of their own."""
        return AttentionHeads(
            self.tp_q_head_num, self.tp_k_head_num, self.head_dim, self.v_head_dim
        )

    def heads_of(self, layer_id: int) -> AttentionHeads:
        return self.layers[layer_id].heads or self.heads

    def kind_of(self, layer_id: int) -> LayerKind:
        account = self.account_of(layer_id)
        return LayerKind(self.layers[layer_id].retention, self.heads_of(layer_id), account)

    @cached_property
    def bounded_retentions(self) -> tuple[BoundedRetention, ...]:
        """Of the accounts beside account 0. What lets go of nothing within max_context_len needs
        none."""
        if not self.has_bounded_accounts:
            return ()
        kinds = (account.retention for account in self.kv_layout.accounts)
        return tuple(
            kind
            for kind in kinds
            if isinstance(kind, LastTokens | CurrentChunk)
            and kind.num_tokens < self.max_context_len
        )

    @cached_property
    def max_encoder_tokens(self) -> int:
        """Of a request, over all layers that see an encoder's tokens; 0 where none does."""
        return max((layer.max_encoder_tokens for layer in self.layers), default=0)

    @property
    def encoder_account(self) -> int:
        """The account of an encoder's tokens, where there is one: it is the last."""
        return 1 + len(self.bounded_retentions)

    @property
    def num_accounts(self) -> int:
        return self.encoder_account + bool(self.max_encoder_tokens)

    def account_of(self, layer_id: int) -> int:
        """The account that keeps the K and V which the layer reads."""
        source = self.layers[layer_id].kv_layer_id
        kept = self.layers[layer_id if source is None else source].retention
        bounded = self.bounded_retentions
        if isinstance(kept, FixedLength):
            return self.encoder_account
        return 1 + bounded.index(kept) if kept in bounded else 0

    def account_of_group(self, group: CacheGroup) -> int:
        return self.account_of(group.layer_ids[0])

    @cached_property
    def cost_by_kind(self) -> dict[LayerKind, LayerCost]:
        """Of all layers of a kind together."""
        return {
            kind: LayerCost(
                num_layers * kind.heads.entry.elements_per_token * self.kv_dtype.itemsize,
                num_layers * kind.heads.pair_flops,
            )
            for kind, num_layers in self.num_layers_by_kind.items()
        }

    @cached_property
    def num_layers_by_kind(self) -> dict[LayerKind, int]:
        return dict(Counter(self.kind_of(layer_id) for layer_id in range(self.num_layers)))

    @cached_property
    def kv_layout(self) -> KVLayout:
        """A group for each (entry, retention) of the layers that store K and V."""
        members: dict[tuple[Entry, AccountRetention], list[int]] = {}
        for layer_id, layer in enumerate(self.layers):
            if layer.kv_layer_id is None:
                key = self.latent or self.heads_of(layer_id).entry, layer.retention
                members.setdefault(key, []).append(layer_id)
        return KVLayout(
            tuple(
                CacheGroup(_group_name(entry, retention), tuple(layer_ids), entry, retention)
                for (entry, retention), layer_ids in members.items()
            )
        )

    def kv_bytes_of_account(self, account: int) -> int:
        """Bytes one token occupies in an account, over the layers that it serves."""
        groups = (g for g in self.kv_layout.groups if self.account_of_group(g) == account)
        return sum(group.elements_per_token for group in groups) * self.kv_dtype.itemsize

    @property
    def keeps_one_entry(self) -> bool:
        """Whether every layer stores K and V, all of one shape."""
        groups = self.kv_layout.groups
        num_stored = sum(len(group.layer_ids) for group in groups)
        return num_stored == self.num_layers and len({group.entry for group in groups}) == 1

    @cached_property
    def kv_bytes_per_token(self) -> int:
        """Bytes one token occupies in the pool over all layers of this rank."""
        elements = sum(group.elements_per_token for group in self.kv_layout.groups)
        return elements * self.kv_dtype.itemsize


def _group_name(entry: Entry, retention: AccountRetention) -> str:
    """As "last_512_2x64+64": what is seen, then heads and the elements of a K and a V head; or as
    "every_latent_512+64"."""
    match entry:
        case HeadsEntry(num_heads, head_dim, v_head_dim):
            heads = f"{num_heads}x{head_dim}+{v_head_dim}"
        case LatentEntry(latent_dim, rope_dim):
            heads = f"latent_{latent_dim}+{rope_dim}"
    match retention:
        case LastTokens(num_tokens):
            return f"last_{num_tokens}_{heads}"
        case CurrentChunk(num_tokens):
            return f"chunk_{num_tokens}_{heads}"
        case EveryToken():
            return f"every_{heads}"
        case FixedLength(max_tokens):
            return f"encoder_{max_tokens}_{heads}"
