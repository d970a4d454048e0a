"""The fused EAGLE-3 head by Triton's interpreter, against the one of plain torch: what it reads,
what it makes of a pass and what it proposes, on one rank and on two.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import math
from dataclasses import fields, replace

import numpy as np
import torch

from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.registry import create_attention_backend
from tests.fakes.eagle_heads import ROUNDED, eagle_spec
from tests.fakes.interpreted_threads import run_one_kernel_at_a_time
from tests.fakes.model_rows import MAX_ROWS, make_batch
from tests.fakes.qkv_projection import finish
from tests.fakes.rows_going_on import GoingOn
from tests.fakes.thread_ranks import ThreadRanks
from workers.graphs import draft_rows
from workers.graphs.draft_rows import TORCH_ROW_KERNELS, StaticRows
from workers.layers.cuda.draft_rows import CUDA_ROW_KERNELS, spread_rows
from workers.layers.cuda.likeliest import likeliest_columns, likeliest_named
from workers.layers.cuda.pair_norm import pair_norm
from workers.layers.formats.layer import stored_by
from workers.layers.kept.fp8 import Fp8Rows
from workers.layers.norm import RMSNorm
from workers.layers.quantised.whole_product import sum_parts, whole_product
from workers.layers.sharding import ShardContext, weight_slots
from workers.models.cuda_eagle_head import CudaEagleHead
from workers.models.eagle_head import EagleHead
from workers.models.pair_states import StatesBefore
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import SingleRank
from workers.runner.kv_memory import create_kv_pool

CPU = torch.device("cpu")
MAX_ERROR = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""Of a tensor's norm. The interpreter cuts bfloat16 off where a GPU rounds."""
MAX_ROUNDING_ERROR = 0.2
"""Of activations in E4M3 in every product of a pass, beside the same weights. The interpreter
halves what is rounded up to a power of two."""
E4M3 = torch.float8_e4m3fn
NATIVE = {E4M3: "torch_native_fp8"}
ROWS = {0: [3, 9, 27, 81], 1: [5, 25], 3: [2]}
PREFIXES = dict.fromkeys(ROWS, 0)
DECODED = {0: [7], 3: [11]}


class FusedDecode:
    """As AttentionDispatch: of decode steps it takes projections, in plain torch."""

    def __init__(self, backend):
        self.num_projected = 0
        self._backend = backend
        self.forward = backend.forward

    def fuses_decode_projection(self, num_rows):
        return True

    def forward_projected(self, projection, layer, batch):
        self.num_projected += 1
        heads = layer.tp_q_head_num, layer.tp_k_head_num
        finished = finish(projection, batch.positions, *heads)
        return self._backend.forward(*(x.to(projection.dtype) for x in finished), layer, batch)


class Placed:
    """A head over pages of its own, with the same weights whatever its class. multiply: as of
    LinearLayer.multiply_kept_by, of a head that keeps its weights rounded; None: it has them as
    matrices, rounded if is_rounded says so."""

    def __init__(self, head_class, spec, tp, dtype, kv_dtype, is_rounded=False, multiply=None):
        shard = ShardContext(tp, dtype, CPU, has_formats=is_rounded)
        self.head = head_class(spec, 256, shard).eval()
        layers = self.head.layers_as_stored()
        keeping = () if multiply is None else layers
        stored = stored_by(ROUNDED, self.head, shard, keeping) if is_rounded else None
        slots = weight_slots(self.head) if stored is None else stored.slots
        for name, slot in slots.items():
            random = torch.Generator().manual_seed(sum(name.encode()))
            noise = torch.randn(slot.shape, generator=random) * slot.shape[-1] ** -0.5
            slot.load((1.0 + noise if "norm" in name else noise).to(dtype))
            slot.settle()
        self.head.target_ids.copy_(3 * torch.arange(spec.draft_vocab_size) + 1)
        for layer in keeping:
            layer.multiply_kept_by(multiply)
        self.num_kept = sum(layer.is_kept for layer in layers)
        config = self.head.geometry.attention_config(256, 16, dtype, kv_dtype, CPU)
        table = ReqToTokenPool(MAX_ROWS, 256, CPU)
        for row in range(MAX_ROWS):
            indices = torch.arange((row + 1) * 256, (row + 2) * 256, dtype=torch.int32)
            table.write(torch.tensor([row]), 0, indices)
        self.pool = create_kv_pool(config, ((MAX_ROWS + 1) * 16,), ())
        name = NATIVE.get(kv_dtype, "torch_native")
        self.backend = create_attention_backend(name, config, table, self.pool)

    def batch(self, new_tokens, prefix_lens):
        batch = make_batch(new_tokens, prefix_lens, self.backend)
        self.backend.init_forward_metadata(batch)
        return batch

    def run(self, fuses=False):
        """Rows read, a decode pass behind them and one that brings tokens again -> pages of the
        rows, and the states and logits of both passes."""
        size = self.head.norm.weight.shape[0]
        random = torch.Generator().manual_seed(5)
        states = torch.randn(7, size, generator=random).to(self.head.norm.weight.dtype)
        batch = self.batch(ROWS, PREFIXES)
        untouched = states.clone()
        tokens = TokenInputs(batch.input_ids, batch.positions)
        rows = torch.randperm(len(states), generator=random).int()
        before = StatesBefore(states[rows.argsort()], rows)
        self.head.read(tokens, before, batch.out_cache_loc, self.pool)
        read = self.pages(batch.out_cache_loc)
        batch = self.batch(DECODED, {row: len(ROWS[row]) for row in DECODED})
        if fuses:
            batch = replace(batch, attn_backend=FusedDecode(self.backend))
        decoded = self.head(batch.input_ids, states[: len(DECODED)], batch)
        assert not fuses or batch.attn_backend.num_projected == 1
        batch = self.batch(ROWS, {row: len(tokens) + 1 for row, tokens in ROWS.items()})
        extended = self.head(batch.input_ids, states, batch)
        assert torch.equal(states, untouched)
        logits = self.head.logits(extended)
        written = self.pages(batch.out_cache_loc)
        found, again = self.head.draft(batch.input_ids, states, batch)
        assert found.dtype is torch.int64
        if self.num_kept:
            # Of products that are added up in another order.
            check_close(again, extended, 1e-6)
        else:
            check_sum(again, extended)
        columns = (self.head.target_ids == found.unsqueeze(1)).int().argmax(dim=1, keepdim=True)
        of_found = logits.gather(1, columns).squeeze(1)
        return *read, decoded, extended, *written, logits, of_found

    def pages(self, places):
        k, v = self.pool.get_kv_buffer(0)
        return tuple(pages.flatten(0, 1).float()[places] for pages in (k, v))


def check_sum(got, want):
    """Of the same two summands, rounded once. The interpreter's bfloat16 is a rounding off."""
    if want.dtype is torch.bfloat16:
        check_close(got, want, 2**-8)
    else:
        assert torch.equal(got, want)


def check_close(got, want, max_error):
    assert got.dtype is want.dtype
    assert got.shape == want.shape
    error = float((got.float() - want.float()).norm() / want.float().norm())
    assert error < max_error, error


@torch.inference_mode()
def check_head(dtype, kv_dtype=None, tp=None, fuses=False, **changes):
    """tp: of the fused head alone, whose states and logits then are the plain one's."""
    spec = eagle_spec(**changes)
    kv_dtype = kv_dtype or dtype
    plain = Placed(EagleHead, spec, SingleRank(), dtype, kv_dtype).run()
    fused = Placed(CudaEagleHead, spec, tp or SingleRank(), dtype, kv_dtype).run(fuses)
    max_error = 4e-2 if kv_dtype is E4M3 else MAX_ERROR[dtype]
    for got, want in zip(fused, plain, strict=True):
        if got.shape == want.shape or tp is None:
            check_close(got, want, max_error)
    # What each of them takes for likeliest has the largest of its logits.
    assert torch.equal(fused[-1], fused[-2].max(dim=-1).values)


class Exactly:
    """As WholeProduct, of unrounded activations, in two parts."""

    def __init__(self, kept):
        self._weight = kept.dequantised()

    def __call__(self, x):
        return x @ self._weight.t()

    def parts(self, x):
        halves = zip(x.chunk(2, dim=1), self._weight.chunk(2, dim=1), strict=True)
        return torch.stack([columns @ weight.t() for columns, weight in halves])


@torch.inference_mode()
def check_rounded_head(multiply, max_error, tp=None, num_kept=6, **changes):
    """Against the plain head of the rounded weights. num_kept: of six layers; the head of 77 tokens
    has no whole tiles and is a matrix."""
    spec = replace(eagle_spec(**changes), draft_vocab_size=96 if num_kept == 6 else 77)
    alone = SingleRank()
    plain = Placed(EagleHead, spec, alone, torch.float32, torch.float32, is_rounded=True).run()
    placed = Placed(CudaEagleHead, spec, tp or alone, torch.float32, torch.float32, True, multiply)
    assert placed.num_kept == num_kept
    *fused, logits, of_found = placed.run()
    for got, want in zip((*fused, logits), plain, strict=False):
        if got.shape == want.shape or tp is None:
            check_close(got, want, max_error)
    assert torch.equal(of_found, logits.max(dim=-1).values)


def check_pair_norm(num_tokens, size, dtype):
    pair = torch.randn(2, num_tokens, size).to(dtype)
    norms = [RMSNorm(size, 1e-5, ShardContext(SingleRank(), dtype, CPU)) for _ in pair]
    for norm in norms:
        norm.weight.copy_(torch.randn(size))
    weights = norms[0].weight, norms[1].weight
    want = torch.cat([norm(x) for norm, x in zip(norms, pair, strict=True)], dim=-1)
    check_close(pair_norm(*pair, weights, 1e-5), want, MAX_ERROR[dtype])
    for index_dtype in (torch.int32, torch.int64):
        rows = torch.randint(0, num_tokens, (5,), dtype=index_dtype)
        wanted = torch.cat([want[rows, :size], want[rows.flip(0), size:]], dim=-1)
        given = rows, rows.flip(0)
        check_close(pair_norm(*pair, weights, 1e-5, *given), wanted, MAX_ERROR[dtype])
    wanted = torch.cat([want[:, :size], want[:1, size:].expand(num_tokens, -1)], dim=-1)
    first = torch.zeros(num_tokens, dtype=torch.int64)
    check_close(pair_norm(*pair, weights, 1e-5, None, first), wanted, MAX_ERROR[dtype])


def check_likeliest(num_rows, num_tokens, dtype):
    """Few values, so that many are equal; both zeros, infinities and what is no number."""
    values = torch.tensor([-math.inf, -2.5, -0.0, 0.0, 1.5, math.inf, math.nan])
    names = torch.randperm(num_tokens) * 5
    for most in (1, 2, 4, 5, 6, 7):
        drawn = values[torch.randint(0, most, (num_rows, num_tokens))].to(dtype)
        want = drawn.float().argmax(dim=-1)
        assert torch.equal(likeliest_columns(drawn), want), most
        assert torch.equal(likeliest_named(drawn, names), names[want]), most
    noise = torch.randn(num_rows, num_tokens + 3).to(dtype)[:, :num_tokens]
    assert torch.equal(likeliest_named(noise, names), names[noise.argmax(dim=-1)])


def check_spread(num_rows, num_passes):
    """Into rows and passes among more of them, and a table that begins within a line."""
    slots, firsts = torch.randperm(num_rows + 2)[:num_rows], torch.randint(0, 40, (num_rows,))
    is_row, ids = torch.randint(0, 2, (num_rows,)), torch.randint(0, 99, (num_rows,))
    staged = torch.stack([slots, firsts * is_row, is_row, ids])
    staged = torch.cat([staged, torch.randint(0, 10**6, (num_passes + 1, num_rows))])
    spread = []
    for kind in (draft_rows.spread_rows, spread_rows):
        static = StaticRows.allocate(num_rows + 1, num_passes + 1, CPU)
        table = torch.full((num_rows + 2, 64), -7, dtype=torch.int32)
        kind(staged, static.passes(num_passes, num_rows), table[:, 1:])
        own = static.all_passes
        spread.append((table, *(getattr(own, field.name) for field in fields(own))))
    assert all(torch.equal(*pair) for pair in zip(*spread, strict=True))
    assert int((spread[0][0] != -7).sum()) == num_rows * num_passes


def check_going_on():
    for seed in range(12):
        case = GoingOn.drawn(np.random.default_rng(seed), seed % 2 == 0, CPU)
        outcomes = []
        for kernels in (TORCH_ROW_KERNELS, CUDA_ROW_KERNELS):
            staged, table = case.staged.clone(), case.table.clone()
            kernels.go_on(staged, 2, case.rows_before, table)
            outcomes.append((staged, table))
        assert all(torch.equal(*pair) for pair in zip(*outcomes, strict=True)), seed


def check_sums():
    for shape in ((8, 3, 1000), (2, 1, 5), (1, 4, 2048)):
        parts = torch.randn(shape)
        check_close(sum_parts(parts, torch.float32), parts.sum(0), 1e-6)
        check_close(sum_parts(parts, torch.bfloat16), parts.sum(0).bfloat16(), 1e-2)


if __name__ == "__main__":
    torch.manual_seed(0)
    run_one_kernel_at_a_time()
    for dtype in MAX_ERROR:
        with torch.inference_mode():
            check_pair_norm(3, 96, dtype)
            check_pair_norm(1, 256, dtype)
            check_likeliest(2, 700, dtype)
        check_head(dtype)
    with torch.inference_mode():
        check_likeliest(1, (1 << 15) + 37, torch.float32)
        check_spread(1, 4)
        check_spread(5, 3)
        check_going_on()
    check_head(torch.float32, head_dim=128, num_q_heads=3, num_kv_heads=1)
    check_head(torch.float32, has_qkv_bias=True, has_o_bias=True, has_mlp_bias=True)
    check_head(torch.float32, fuses=True)
    check_head(torch.bfloat16, fuses=True, head_dim=128)
    check_head(torch.float32, kv_dtype=E4M3)
    ThreadRanks(2).run(lambda tp: check_head(torch.float32, tp=tp))
    # In 16 bits the interpreter rounds as no GPU does.
    Fp8Rows.dtypes = (torch.float32,)
    biased = {"has_qkv_bias": True, "has_o_bias": True, "has_mlp_bias": True}
    check_rounded_head(Exactly, 1e-5)
    check_rounded_head(Exactly, 1e-5, num_kept=5, **biased)
    ThreadRanks(2).run(lambda tp: check_rounded_head(Exactly, 1e-5, tp))
    ThreadRanks(2).run(lambda tp: check_rounded_head(Exactly, 1e-5, tp, num_kept=5))
    check_rounded_head(whole_product, MAX_ROUNDING_ERROR, **biased)
    check_sums()
    print("all equal")
