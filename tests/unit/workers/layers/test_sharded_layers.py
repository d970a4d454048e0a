"""Sharded layers: every rank's slice, put together, is the whole layer. No processes here."""

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from workers.errors import ConfigError
from workers.layers.embedding import ParallelLMHead, TiedLMHead, VocabParallelEmbedding
from workers.layers.gated_mlp import SiluAndMul
from workers.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from workers.layers.norm import RMSNorm
from workers.layers.sharding import KVHeadShard, ShardContext, ShardedLayer
from workers.parallel.group import SingleRank


@dataclass(frozen=True)
class PartialRank(SingleRank):
    """One rank of several, alone: collectives return its own contribution."""

    rank: int = 0
    size: int = 1


class Meeting:
    """Where ranks that are threads add their tensors up."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=30.0)
        self._parts: dict[int, torch.Tensor] = {}

    def sum(self, rank: int, part: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = part
        self._barrier.wait()
        return torch.stack([self._parts[rank] for rank in sorted(self._parts)]).sum(0)


class MeetingRank(SingleRank):
    """One of several ranks that run at the same time. Sums once."""

    def __init__(self, rank: int, size: int, meeting: Meeting) -> None:
        self.rank = rank
        self.size = size
        self.meeting = meeting

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self.meeting.sum(self.rank, tensor)


def context(rank: int = 0, size: int = 1) -> ShardContext:
    return ShardContext(PartialRank(rank, size), torch.float32, torch.device("cpu"))


def load_all(layer: ShardedLayer, tensors: dict[str, torch.Tensor]) -> None:
    assert set(tensors) == set(layer.checkpoint_shapes())
    for name, tensor in tensors.items():
        assert tuple(tensor.shape) == layer.checkpoint_shapes()[name]
        layer.load_shard(name, tensor)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_column_parallel_ranks_join_to_the_whole(size: int) -> None:
    weight, bias, x = torch.randn(12, 6), torch.randn(12), torch.randn(5, 6)
    parts = []
    for rank in range(size):
        layer = ColumnParallelLinear(6, 12, True, context(rank, size))
        load_all(layer, {"weight": weight, "bias": bias})
        parts.append(layer(x))
    torch.testing.assert_close(torch.cat(parts, -1), functional.linear(x, weight, bias))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_row_parallel_ranks_sum_to_the_whole_with_one_bias(size: int) -> None:
    weight, bias, x = torch.randn(6, 12), torch.randn(6), torch.randn(5, 12)
    meeting = Meeting(size)

    def whole_on(rank: int) -> torch.Tensor:
        group = MeetingRank(rank, size, meeting)
        shard = ShardContext(group, torch.float32, torch.device("cpu"))
        layer = RowParallelLinear(12, 6, True, shard)
        load_all(layer, {"weight": weight, "bias": bias})
        return layer(x.chunk(size, -1)[rank])

    with ThreadPoolExecutor(size) as threads:
        wholes = list(threads.map(whole_on, range(size)))
    for whole in wholes:
        torch.testing.assert_close(whole, functional.linear(x, weight, bias))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_merged_columns_keep_gate_and_up_apart(size: int) -> None:
    gate, up, x = torch.randn(8, 6), torch.randn(8, 6), torch.randn(3, 6)
    parts = []
    for rank in range(size):
        layer = MergedColumnParallelLinear(
            6, 8, ("gate_proj", "up_proj"), False, context(rank, size)
        )
        load_all(layer, {"gate_proj.weight": gate, "up_proj.weight": up})
        parts.append(SiluAndMul()(layer(x)))
    want = functional.silu(x @ gate.T) * (x @ up.T)
    torch.testing.assert_close(torch.cat(parts, -1), want)


@pytest.mark.parametrize(("kv_heads", "size"), [(4, 1), (4, 2), (4, 4), (2, 4), (1, 4)])
def test_qkv_ranks_hold_the_kv_head_of_each_of_their_query_heads(kv_heads: int, size: int) -> None:
    q_heads, head_dim, x = 8, 4, torch.randn(3, 6)
    q, k, v = (torch.randn(heads * head_dim, 6) for heads in (q_heads, kv_heads, kv_heads))
    names = ("q_proj", "k_proj", "v_proj")
    for rank in range(size):
        layer = QKVParallelLinear(6, q_heads, kv_heads, head_dim, False, context(rank, size))
        load_all(layer, {f"{n}.weight": w for n, w in zip(names, (q, k, v), strict=True)})
        got_q, got_k, got_v = layer(x).split(layer.split_sizes, -1)
        local = q_heads // size
        whole_heads = range(rank * local, (rank + 1) * local)
        group = layer.tp_q_head_num // layer.tp_k_head_num
        for position, head in enumerate(whole_heads):
            kv_head, kv_position = head * kv_heads // q_heads, position // group
            for got, whole, at, source in (
                (got_q, q, position, head),
                (got_k, k, kv_position, kv_head),
                (got_v, v, kv_position, kv_head),
            ):
                want = x @ whole[source * head_dim : (source + 1) * head_dim].T
                torch.testing.assert_close(got[:, at * head_dim : (at + 1) * head_dim], want)


def test_qkv_bias_is_sharded_like_its_rows() -> None:
    layer = QKVParallelLinear(6, 4, 2, 2, True, context(1, 2))
    biases = {
        "q_proj": torch.arange(8.0),
        "k_proj": torch.arange(4.0),
        "v_proj": -torch.arange(4.0),
    }
    shapes = layer.checkpoint_shapes()
    for name, bias in biases.items():
        layer.load_shard(f"{name}.weight", torch.zeros(shapes[f"{name}.weight"]))
        layer.load_shard(f"{name}.bias", bias)
    assert layer(torch.zeros(1, 6)).flatten().tolist() == [4, 5, 6, 7, 2, 3, -2, -3]


@given(st.integers(1, 16), st.integers(1, 16))
def test_kv_heads_are_all_held_and_evenly(num_kv_heads: int, size: int) -> None:
    if num_kv_heads % size and size % num_kv_heads:
        with pytest.raises(ConfigError, match="num_kv_heads"):
            KVHeadShard.of_rank(num_kv_heads, 0, size)
        return
    shards = [KVHeadShard.of_rank(num_kv_heads, rank, size) for rank in range(size)]
    held = [head for s in shards for head in range(s.first_head, s.first_head + s.num_heads)]
    assert held == sorted(held)
    copies = {held.count(head) for head in range(num_kv_heads)}
    assert copies == {max(1, size // num_kv_heads)}


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("vocab_size", [2, 7, 8])
def test_vocabulary_ranks_join_to_the_whole(vocab_size: int, size: int) -> None:
    weight, hidden = torch.randn(vocab_size, 6), torch.randn(3, 6)
    ids = torch.arange(vocab_size)
    embedded, logits = torch.zeros(vocab_size, 6), []
    for rank in range(size):
        shard = context(rank, size)
        embedding = VocabParallelEmbedding(vocab_size, 6, shard)
        head = ParallelLMHead(vocab_size, 6, shard)
        load_all(embedding, {"weight": weight})
        load_all(head, {"weight": weight})
        embedded += embedding(ids)
        logits.append(functional.linear(hidden, head.weight))
        torch.testing.assert_close(TiedLMHead(embedding)(hidden), head(hidden))
    torch.testing.assert_close(embedded, weight)
    joined = torch.cat(logits, -1)
    torch.testing.assert_close(joined[:, :vocab_size], hidden @ weight.T)
    assert not joined[:, vocab_size:].any()


def test_a_tied_head_owns_no_parameter() -> None:
    assert not list(TiedLMHead(VocabParallelEmbedding(7, 6, context())).parameters())


def test_a_width_that_the_ranks_cannot_share_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="num_attention_heads=6"):
        QKVParallelLinear(8, 6, 2, 4, False, context(0, 4))
    with pytest.raises(ConfigError, match="intermediate_size=10"):
        MergedColumnParallelLinear(8, 10, ("gate_proj", "up_proj"), False, context(0, 4))


def test_fused_norm_is_addition_then_norm() -> None:
    norm = RMSNorm(16, 1e-5, context())
    norm.load_shard("weight", torch.randn(16))
    x, residual = torch.randn(4, 16), torch.randn(4, 16)
    whole = x + residual
    normed = norm.add_and_norm_(x, residual)
    torch.testing.assert_close(residual, whole)
    want = functional.rms_norm(whole, (16,), norm.weight, 1e-5)
    torch.testing.assert_close(normed, want)
