"""Every fused kernel against float64, on fresh random inputs."""

from functools import partial
from itertools import product

import pytest
import torch
from torch.nn import functional

triton = pytest.importorskip("triton")

from attention.kernels.decode_shape import DecodeGeometry, measured_tuning  # noqa: E402
from attention.kernels.paged_decode import PagedDecode, ScoreRule  # noqa: E402
from attention.qkv_projection import HeadNorm, QKVProjection, Rotation  # noqa: E402
from tests.gpu.needs import NEEDS_GPU, NEEDS_HOPPER  # noqa: E402
from workers.graphs.decode_step import StepRows, TorchStepKernels  # noqa: E402
from workers.graphs.ring import StagingRing  # noqa: E402
from workers.layers.cuda.activation import gate_and_mul  # noqa: E402
from workers.layers.cuda.greedy import TritonStepKernels  # noqa: E402
from workers.layers.cuda.logit_cap import cap_logits_  # noqa: E402
from workers.layers.cuda.norm import add_rms_norm_, rms_norm  # noqa: E402
from workers.layers.cuda.rope import FusedRope, RopeShape  # noqa: E402
from workers.layers.cuda.sandwich_norm import NormScale, add_sandwich_norm_  # noqa: E402
from workers.layers.gemm.candidates import candidates  # noqa: E402
from workers.layers.gemm.choice import GemmChooser  # noqa: E402
from workers.layers.gemm.configs import GemmShape  # noqa: E402
from workers.layers.gemm.device_limits import HOPPER, DeviceLimits  # noqa: E402
from workers.layers.gemm.skinny import triton_gated_gemm, triton_gemm  # noqa: E402
from workers.layers.gemm.table import Tables  # noqa: E402
from workers.layers.rope_frequencies import RopeSpec, cos_sin_table  # noqa: E402
from workers.models.transformers_norms import rms_norm_in_torch  # noqa: E402

pytestmark = NEEDS_GPU
CUDA = torch.device("cuda", 0)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1.2e-2}
DTYPES = list(TOLERANCE)
GATES = {"silu": functional.silu, "gelu_tanh": partial(functional.gelu, approximate="tanh")}
LIMITS = DeviceLimits.of(CUDA) if torch.cuda.is_available() else HOPPER
FEW_TOKENS = [(1, 2, 16), (40, 64), (128,)]
"""By block size: the same compiled kernels serve those of one."""


def relative_error(out, reference):
    return ((out.double() - reference.double()).norm() / reference.double().norm()).item()


def randn(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype, device=CUDA)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 4096), (7, 256), (300, 5120)])
@pytest.mark.parametrize("num_splits", [1, 4])
def test_add_and_norm(dtype, num_tokens, hidden_size, num_splits) -> None:
    partial_dtype = dtype if num_splits == 1 else torch.float32
    partials = randn(num_splits, num_tokens, hidden_size, dtype=partial_dtype)
    residual = randn(num_tokens, hidden_size, dtype=dtype)
    weight = randn(hidden_size, dtype=dtype)
    stream = residual.double() + partials.double().sum(0)
    normed = stream * torch.rsqrt(stream.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
    hidden = add_rms_norm_(partials, residual, weight, 1e-5)
    assert relative_error(residual, stream) < TOLERANCE[dtype]
    assert relative_error(hidden, normed) < TOLERANCE[dtype]
    # Norms of transformers' code may have a scale in float32, and round once less.
    for scale in (weight, weight.float()):
        out = rms_norm(residual, scale, 1e-5)
        assert relative_error(out, normed) < TOLERANCE[dtype]
        is_same = out == rms_norm_in_torch(residual, scale, 1e-5)
        assert dtype is torch.float32 or is_same.float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "width"), [(1, 14336), (33, 640)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_gate_and_mul(dtype, num_tokens, width, num_splits) -> None:
    partials = randn(num_splits, num_tokens, 2 * width)
    gate, up = partials.double().sum(0).chunk(2, dim=-1)
    for name, function in GATES.items():
        out = gate_and_mul(partials, dtype, name)
        assert relative_error(out, function(gate) * up) < TOLERANCE[dtype], name


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "hidden_size"), [(1, 3840), (7, 256), (300, 5376)])
@pytest.mark.parametrize("num_splits", [1, 3])
def test_norms_around_a_residual_addition(dtype, num_tokens, hidden_size, num_splits) -> None:
    partial_dtype = dtype if num_splits == 1 else torch.float32
    partials = randn(num_splits, num_tokens, hidden_size, dtype=partial_dtype)
    residual = randn(num_tokens, hidden_size, dtype=dtype)
    after, before = (NormScale(1.0 + randn(hidden_size), 1e-6) for _ in range(2))

    def normed(x, scale):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale.double()

    stream = residual.double() + normed(partials.double().sum(0), after.scale)
    # As separate kernels would compute it, rounding where they store.
    delta = rms_norm_in_torch(partials.float().sum(0).to(dtype), after.scale, 1e-6)
    plain = residual + delta
    hidden = add_sandwich_norm_(partials, residual, after, before)
    assert relative_error(residual, stream) < TOLERANCE[dtype]
    assert relative_error(hidden, normed(stream, before.scale)) < TOLERANCE[dtype]
    assert dtype is torch.float32 or (residual == plain).float().mean() > 0.99
    again = rms_norm_in_torch(residual, before.scale, 1e-6)
    assert dtype is torch.float32 or (hidden == again).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES)
def test_logits_are_capped_where_they_lie(dtype) -> None:
    padded = (randn(5, 256000 + 24) * 40).to(dtype)
    padded[0, 3] = torch.nan
    logits, beyond = padded[:, :256000], padded[:, 256000:].clone()
    wanted = 30.0 * torch.tanh(logits.double() / 30.0)
    cap_logits_(logits, 30.0)
    assert logits[0, 3].isnan()
    assert logits.isnan().sum() == 1
    assert torch.equal(padded[:, 256000:], beyond)
    assert relative_error(logits.nan_to_num(), wanted.nan_to_num()) < TOLERANCE[dtype]


@pytest.mark.parametrize("token_counts", FEW_TOKENS, ids=str)
@pytest.mark.parametrize(
    ("out_features", "in_features"), [(6144, 4096), (4096, 14336), (9001, 1024), (8192, 3840)]
)
def test_every_gemm_candidate(token_counts, out_features, in_features) -> None:
    weight = randn(out_features, in_features, dtype=torch.bfloat16)
    for num_tokens in token_counts:
        x = randn(num_tokens, in_features, dtype=torch.bfloat16)
        reference = x.double() @ weight.double().t()
        configs = candidates(GemmShape(out_features, in_features, "split"), num_tokens, LIMITS)
        assert configs
        for config in configs:
            out = triton_gemm(x, weight, config).double().sum(0)
            assert relative_error(out, reference) < TOLERANCE[torch.bfloat16], config


@pytest.mark.parametrize("token_counts", FEW_TOKENS, ids=str)
@pytest.mark.parametrize(("width", "in_features"), [(14336, 4096), (3001, 1024), (15360, 3840)])
def test_every_gated_gemm_candidate(token_counts, width, in_features) -> None:
    weight = randn(2 * width, in_features, dtype=torch.bfloat16) * in_features**-0.5
    for num_tokens in token_counts:
        x = randn(num_tokens, in_features, dtype=torch.bfloat16)
        gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
        configs = candidates(GemmShape(2 * width, in_features, "gated"), num_tokens, LIMITS)
        gated = [config for config in configs if config.is_gated]
        assert gated
        for config, (name, function) in product(gated, GATES.items()):
            out = triton_gated_gemm(x, weight, config, name)
            error = relative_error(out, function(gate) * up)
            assert error < TOLERANCE[torch.bfloat16], (config, name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("extras", [None, "rounded first", "rounded once"])
@pytest.mark.parametrize(
    ("num_q", "num_kv", "head_dim"), [(32, 8, 128), (6, 3, 64), (4, 1, 256), (16, 8, 256)]
)
def test_rope_writes_queries_keys_and_values(
    dtype, num_splits, extras, num_q, num_kv, head_dim
) -> None:
    """extras: bias and head norm, whose scale is of the model's dtype or float32."""
    has_extras = extras is not None
    num_tokens, page_size = 37, 16
    shape = RopeShape(num_q, num_kv, head_dim)
    partials = randn(num_splits, num_tokens, sum(shape.split_sizes))
    bias = randn(partials.shape[2], dtype=dtype) if has_extras else None
    weights = randn(2, head_dim, dtype=torch.float32 if extras == "rounded once" else dtype)
    norm = HeadNorm(weights[0], weights[1], 1e-6) if has_extras else None
    cos_sin = cos_sin_table(RopeSpec("default", 1e4, head_dim, 256, {}), 256).to(CUDA)
    pools = torch.zeros((2, 8, page_size, num_kv, head_dim), dtype=dtype, device=CUDA)
    positions = torch.randint(0, 256, (num_tokens,), device=CUDA)
    locations = torch.randperm(7 * page_size, device=CUDA)[:num_tokens] + page_size
    q = FusedRope(shape, Rotation(cos_sin, bias, norm))(
        partials, positions, locations, pools[0], pools[1], dtype
    )
    total = partials.double().sum(0) + (0 if bias is None else bias.double())
    parts = [part.unflatten(-1, (-1, head_dim)) for part in total.split(shape.split_sizes, dim=-1)]
    cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    rotated = []
    for part, weight in zip(parts, weights, strict=False):
        if norm is not None:
            part = part * torch.rsqrt(part.square().mean(-1, keepdim=True) + 1e-6) * weight.double()
        first, second = part.chunk(2, dim=-1)
        rotated.append(torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1))
    keys, values = pools.flatten(1, 2)
    assert relative_error(q, rotated[0]) < TOLERANCE[dtype]
    assert relative_error(keys[locations], rotated[1]) < TOLERANCE[dtype]
    assert relative_error(values[locations], parts[2]) < TOLERANCE[dtype]
    untouched = torch.ones(len(keys), dtype=torch.bool, device=CUDA)
    untouched[locations] = False
    assert not keys[untouched].any()
    assert not values[untouched].any()


# One product rounded apart shows in a bfloat16 of tens of thousands: hence the seeds.
@NEEDS_HOPPER
@pytest.mark.parametrize("num_splits", [1, 4])
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("is_gemma", [False, True])
def test_attention_stores_the_bits_that_the_rope_kernel_stores(seed, num_splits, is_gemma) -> None:
    torch.manual_seed(seed)
    num_rows, page_size, dtype = 24, 16, torch.bfloat16
    num_q, head_dim = (16, 256) if is_gemma else (32, 128)
    shape = RopeShape(num_q, 8, head_dim)
    partials = randn(num_splits, num_rows, sum(shape.split_sizes))
    norm = HeadNorm(1.0 + randn(head_dim), 1.0 + randn(head_dim), 1e-6)
    rotation = Rotation(
        cos_sin_table(RopeSpec("default", 1e4, head_dim, 512, {}), 512).to(CUDA),
        None if is_gemma else randn(partials.shape[2], dtype=dtype),
        norm if is_gemma else None,
    )
    seq_lens = torch.randint(1, 500, (num_rows,), device=CUDA, dtype=torch.int32)
    page_table = torch.randperm(num_rows * 32, device=CUDA).int().view(num_rows, 32)
    last = seq_lens.long() - 1
    pages = page_table.gather(1, (last // page_size)[:, None]).squeeze(1)
    locations = pages.long() * page_size + last % page_size
    pools = randn(2, 2, num_rows * 32, page_size, 8, head_dim).to(dtype)
    FusedRope(shape, rotation)(partials, last, locations, *pools[0], dtype)
    geometry = DecodeGeometry(8, num_q // 8, head_dim, page_size)
    decode = PagedDecode(geometry, CUDA, lambda rows: measured_tuning(geometry, rows))
    plan = decode.plan(seq_lens, -1)
    projection = QKVProjection(partials * 1.0, rotation, dtype)
    rule = ScoreRule(head_dim**-0.5, 0.0, None)
    decode.attend_projected(projection, locations, tuple(pools[1]), page_table, plan, rule)
    rows = pools.flatten(2, 3)[:, :, locations]
    # Two kernels may add up a head's squares in two orders.
    most_unlike = 1e-3 if is_gemma else 0.0
    assert (rows[0] != rows[1]).float().mean() <= most_unlike
    assert relative_error(rows[0], rows[1]) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_rows", [1, 5, 32])
def test_step_ends_equal_the_plain_ones(num_rows) -> None:
    vocab, num_slots = 128256, 40
    logits = randn(num_rows, vocab, dtype=torch.bfloat16)
    logits[0, 7] = float("nan")
    slots = torch.randperm(num_slots)[:num_rows]
    host_rows = torch.stack(
        [slots, torch.arange(num_rows), torch.arange(num_rows) % 3 - 1, slots * 2, slots + 9]
    ).to(torch.int32)
    outcomes = []
    for kind in (TorchStepKernels, TritonStepKernels):
        tables = torch.zeros((2, num_slots, 64), dtype=torch.int32, device=CUDA).unbind()
        last = torch.arange(num_slots, device=CUDA)
        kernels = kind(tables, last)
        rows = StepRows.allocate(num_rows, CUDA, 2)
        staging = StagingRing.pinned(64, 1, CUDA, 2)
        staging.take()
        slot = staging.take()
        slot.rows[:, :num_rows] = host_rows.numpy()
        staging.point_device_at(slot)
        kernels.begin(staging.ring, rows)
        kernels.end(logits, rows.slots, staging.ring)
        torch.cuda.synchronize()
        slot.check_answered(slot.step)
        sampled = torch.from_numpy(slot.sampled[:num_rows].copy()).to(CUDA)
        filled = (rows.input_ids, rows.positions, rows.seq_lens, rows.prefix_lens)
        places = (rows.out_cache_loc, *rows.bounded_cache_locs)
        outcomes.append((*tables, last, *filled, *places, sampled))
    for plain, fused in zip(*outcomes, strict=True):
        assert torch.equal(plain, fused) or _only_ties_differ(plain, fused, logits)


def _only_ties_differ(plain, fused, logits):
    """The lowest id among equal logits is promised; torch on CUDA takes any."""
    if plain.shape != (logits.shape[0],):
        return plain.shape == (40,)
    rows = torch.arange(len(plain), device=CUDA)
    return torch.equal(logits[rows, plain.long()], logits[rows, fused.long()])


def test_measured_choices_are_kept_on_disk(tmp_path) -> None:
    shape = GemmShape(512, 1024, "split")
    weights = [randn(512, 1024, dtype=torch.bfloat16)]
    path, nothing = tmp_path / "cache" / "gemm.json", Tables({}, {})
    choices = GemmChooser(nothing, path, LIMITS).choose(shape, weights)
    again = GemmChooser(nothing, path, LIMITS)
    assert again.known == {str(shape): choices}
