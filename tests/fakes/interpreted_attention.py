"""The triton backends by Triton's interpreter, over a reduced grid, against the float64 oracle.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported. In float16: the
interpreter cuts bfloat16 off where a GPU rounds.
"""

from dataclasses import replace

import numpy as np
import torch

from attention import LayerAttentionConfig
from attention.backends import triton_latent, triton_paged
from attention.backends.torch_native_fp8 import Fp8TorchNativeBackend
from attention.backends.triton_deterministic import DeterministicTritonBackend
from attention.backends.triton_fp8 import Fp8TritonBackend
from attention.backends.triton_latent import TritonLatentBackend
from attention.backends.triton_paged import TritonBackend
from attention.forward_batch import ForwardMode
from attention.kernels import paged_decode
from attention.kernels.decode_shape import DecodeGeometry, DecodeTuning
from attention.kernels.gpu_limits import GpuLimits
from attention.kernels.paged_decode import PagedDecode
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from attention.visibility import Tree
from tests.unit.attention.cases import CaseSpec, RowSpec, build_case, relative_error, rows_of
from tests.unit.attention.latent_cases import build_latent_case
from tests.unit.attention.visibility_cases import KINDS, build_visible, fields_of

TOLERANCE = 1e-3
AMPERE = GpuLimits((8, 0), 4, 163 << 10)
# Every head is a program that is interpreted by itself: two of K and V, two of queries to each.
HALF = {"dtype": torch.float16, "kv_dtype": torch.float16, "q_heads": 4, "kv_heads": 2}

EXTEND = rows_of((7, 5), (0, 9), (20, 1), (40, 17), (3, 0))
LONG = rows_of((70, 40), (0, 1), (130, 1))
VERIFY = rows_of((7, 3), (300, 3), (16, 3), (1, 3))
TREES = rows_of((7, 9), (300, 9), (16, 9), (1, 9))
DECODE = rows_of((0, 1), (15, 1), (16, 1), (300, 1))
SPLIT = rows_of((7, 1), (900, 1))
MIXED = rows_of(*[(3 + i, 1) for i in range(32)], (0, 20), (17, 1))
WINDOW = LayerAttentionConfig(sliding_window_size=6)
ALL = LayerAttentionConfig(sliding_window_size=24, logit_cap=1.5, has_sinks=True)


def check(rows, make=None, **changes):
    spec = CaseSpec(rows, **(HALF | changes))
    case = build_case(spec) if make is None else build_visible(spec, make)
    assert relative_error(case.run(TritonBackend), case.run_oracle()) < TOLERANCE, (spec, make)


def check_padding(rows, v_head_dim):
    """Rows without a key come out as zeros, whichever kernel has them."""
    case = build_case(CaseSpec(rows, v_head_dim=v_head_dim, **HALF))
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[0] = 0
    batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths))
    out = replace(case, batch=batch).run(TritonBackend)
    num_padding = rows[0].num_new
    assert not out[:num_padding].any()
    assert relative_error(out[num_padding:], case.run_oracle()[num_padding:]) < TOLERANCE


def check_graph(v_head_dim, rows=DECODE, graph_bs=6, has_trees=False, **changes):
    """What a graph launches, for a batch of fewer rows than it has, all of as many new tokens."""
    spec = CaseSpec(rows, v_head_dim=v_head_dim, **(HALF | changes))
    case = build_visible(spec, KINDS["tree"]) if has_trees else build_case(spec)
    backend = TritonBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_cuda_graph_state(graph_bs + 1)
    num_new = rows[0].num_new
    mode = ForwardMode.DECODE if num_new == 1 else ForwardMode.TARGET_VERIFY
    num_padding = graph_bs - len(rows)
    padding = torch.zeros(num_padding * num_new).long()
    new_lens = torch.full((graph_bs,), num_new, dtype=torch.int32)
    batch = replace(
        case.batch,
        forward_mode=mode,
        batch_size=graph_bs,
        num_tokens=graph_bs * num_new,
        req_pool_indices=torch.cat([case.batch.req_pool_indices, padding[:num_padding]]),
        seq_lens=torch.cat([case.batch.seq_lens, padding[:num_padding].int()]),
        extend_seq_lens=new_lens,
        extend_seq_lens_cpu=new_lens.numpy(),
        extend_prefix_lens_cpu=new_lens.numpy(),
        out_cache_loc=torch.cat([case.batch.out_cache_loc, padding]),
        is_captured=True,
        positions=torch.cat([case.batch.positions, padding]),
    )
    if has_trees:
        cells = torch.ones(num_padding * num_new**2, dtype=torch.bool)
        starts = torch.arange(graph_bs, dtype=torch.int32) * num_new**2
        batch.visibility = Tree(torch.cat([case.batch.visibility.mask, cells]), starts)
    backend.init_forward_metadata_capture_cuda_graph(batch)
    backend.record_step_tables(batch)
    q, k, v = (torch.cat([x, x[: len(padding)]]) for x in (case.q, case.k, case.v))
    out = backend.forward(q, k, v, case.layer, batch)
    assert relative_error(out[: len(case.q)], case.run_oracle()) < TOLERANCE
    assert not out[len(case.q) :].any()


def check_wanted_out():
    """Tokens of no row, which pad a captured segment, keep what they held."""
    case = build_case(CaseSpec(SPLIT, v_head_dim=16, **HALF))
    backend = TritonBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    wanted = torch.full((4, 4 * 16), 7.0, dtype=torch.float16)
    batch = replace(case.batch, attention_out=wanted, num_tokens=4)
    q = torch.cat([case.q, case.q])
    out = backend.forward(q, case.k, case.v, case.layer, batch)
    assert out.data_ptr() == wanted.data_ptr()
    assert relative_error(out[:2], case.run_oracle()) < TOLERANCE
    assert (wanted[2:] == 7.0).all()


def check_e4m3(rows, **changes):
    case = build_case(CaseSpec(rows, **(HALF | changes)))
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    pool = Fp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    pool.set_scales(0, 0.02, 0.03)
    everywhere = torch.arange(pool.num_pages * pool.page_size)
    k, v = (kept.flatten(0, 1).nan_to_num() for kept in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, everywhere, k, v)
    twin = replace(case, config=config, token_to_kv_pool=pool)
    wanted = twin.run(Fp8TorchNativeBackend)
    assert relative_error(twin.run(Fp8TritonBackend), wanted) < TOLERANCE, rows


def check_every_e4m3():
    """Every number that e4m3 has, as the value of a row's only key."""
    raw = torch.arange(256, dtype=torch.uint8)
    raw = raw[raw & 0x7F != 0x7F]
    values = raw.view(torch.float8_e4m3fn).float()
    for start in range(0, len(values) - 32, 32):
        case = build_case(CaseSpec(rows_of((0, 1)), page_size=1, **HALF))
        config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
        pool = Fp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
        own = values[start : start + 32]
        v = own.expand_as(case.v).to(torch.float16)
        twin = replace(case, config=config, token_to_kv_pool=pool, v=v)
        assert torch.equal(twin.run(Fp8TritonBackend)[0, 0].float(), own)


def check_many_chunks():
    """A row of more chunks than are joined at once."""
    limits = replace(AMPERE, num_multiprocessors=24)
    paged_decode.gpu_limits = lambda device: limits
    check(rows_of((2600, 1)), kv_heads=1)
    paged_decode.gpu_limits = lambda device: AMPERE


def check_chunks(lengths, num_chunks):
    """Of 264 programs, 33 chunks of 8 heads, that run at once."""
    paged_decode.gpu_limits = lambda device: replace(AMPERE, num_multiprocessors=132)
    tuning = DecodeTuning(chunks_per_multiprocessor=2, min_chunk_tokens=64)
    decode = PagedDecode(DecodeGeometry(8, 4, 128, 128), torch.device("cpu"), lambda rows: tuning)
    plan = decode.plan(torch.tensor(lengths, dtype=torch.int32), -1)
    assert plan.tensor[0] == num_chunks, (lengths, plan.tensor[0])
    assert plan.max_items >= num_chunks
    paged_decode.gpu_limits = lambda device: AMPERE


def check_waves():
    """Eight rows of one head, 24 chunks in twelve places."""
    paged_decode.gpu_limits = lambda device: replace(AMPERE, num_multiprocessors=4)
    check(rows_of(*[(1998, 1)] * 8), kv_heads=1)
    check(rows_of(*[(10, 1), (1998, 1), (1500, 1), (0, 1)] * 2), kv_heads=1)
    paged_decode.gpu_limits = lambda device: AMPERE


def check_latent(rows, make=None):
    case = build_latent_case(CaseSpec(rows, **HALF))
    if make is not None:
        fields = fields_of(case.spec, *make(case.spec, np.random.default_rng(1)))
        case = replace(case, batch=replace(case.batch, **fields))
    backend = TritonLatentBackend(case.config, case.table, case.pool)
    assert relative_error(case.run(backend), case.run_oracle()) < TOLERANCE, (rows, make)


def check_invariant(layer, page_size):
    """A token's bits, wherever its chunk begins and whatever shares the step."""
    spec = CaseSpec((RowSpec(0, 90, 7),), layer=layer, page_size=page_size, **HALF)
    case = build_case(spec)
    whole = case.run(DeterministicTritonBackend)
    assert relative_error(whole, case.run_oracle()) < TOLERANCE, spec
    for cut in (40, 89):
        row = RowSpec(cut, 90 - cut, 7)
        for rows in ((row,), (*EXTEND[:2], row, *EXTEND[2:])):
            case = build_case(replace(spec, rows=rows))
            out = case.by_row(case.run(DeterministicTritonBackend))[rows.index(row)]
            assert torch.equal(out, whole[cut:]), (spec, cut)


if __name__ == "__main__":
    for module in (paged_decode, triton_latent, triton_paged):
        module.gpu_limits = lambda device: AMPERE
    for steps in (EXTEND, DECODE, MIXED):
        check(steps)
        check(steps, layer=ALL, page_size=1)
    check(LONG, page_size=24, kv_heads=1)
    check(LONG, layer=WINDOW, page_size=64, q_heads=7, kv_heads=1, head_dim=24, v_head_dim=24)
    for layer, size in ((LayerAttentionConfig(), 64), (ALL, 24)):
        check_invariant(layer, size)
    for steps in (EXTEND, SPLIT):
        check(steps, v_head_dim=16)
        check(steps, v_head_dim=16, layer=ALL)
    for kind in KINDS.values():
        check(EXTEND, kind)
        check(EXTEND, kind, layer=WINDOW, page_size=1)
        check_latent(EXTEND, kind)
    check(LONG, KINDS["items"], kv_heads=1)
    for dim in (32, 16):
        check_padding(DECODE, dim)
        check_graph(dim)
    check_graph(32, VERIFY)
    check_graph(32, TREES, has_trees=True)
    check_graph(16, TREES, has_trees=True, layer=ALL, page_size=1)
    check_padding(EXTEND, 32)
    check_wanted_out()
    check_many_chunks()
    check_chunks([4096] * 4, 32)
    # Not 36 and 35, of which three and two would run alone behind the others.
    check_chunks([1500] * 12, 24)
    check_chunks([4096] * 5, 30)
    # Neither 20, which leave 13 of 33 places empty, nor 40, of which seven would run alone.
    check_chunks([7000] * 20, 60)
    check_chunks([7000] * 29, 29)
    check_waves()
    # One by one they are more than run at once, and short.
    check_chunks([100] * 40, 40)
    check_chunks([0] * 3, 3)
    check_e4m3(EXTEND)
    check_e4m3(SPLIT, layer=ALL)
    check_every_e4m3()
    check_latent(EXTEND)
    check_latent(SPLIT)
    print("all equal")
