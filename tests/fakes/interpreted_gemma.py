"""Gemma over fused kernels by Triton's interpreter: kernels against float64, the model against the
one of plain torch.

To be run with TRITON_INTERPRET=1, which Triton reads when it is imported.
"""

import tempfile
from pathlib import Path

import torch
from torch.nn import functional

from attention.qkv_projection import HeadNorm, Rotation
from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import GEMMA, random_prompt, save_tiny_model
from workers.config import EngineConfig
from workers.layers.cuda.activation import gate_and_mul
from workers.layers.cuda.logit_cap import cap_logits_
from workers.layers.cuda.rope import FusedRope, RopeShape
from workers.layers.cuda.sandwich_norm import NormScale, add_sandwich_norm_
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import GemmConfig
from workers.layers.gemm.device_limits import HOPPER
from workers.layers.gemm.skinny import triton_gated_gemm
from workers.layers.gemm.table import Tables
from workers.layers.rope_frequencies import RopeSpec, cos_sin_table
from workers.loading.loader import load_model
from workers.models import cuda_stream, registry
from workers.models.cuda_gemma import CudaGemmaForCausalLM
from workers.models.gemma import GemmaForCausalLM
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
# Not bfloat16, which Triton's interpreter cuts off where a GPU rounds.
ROUNDING = {torch.float32: 1e-5, torch.float16: 2e-3}


def check_close(got, want, dtype):
    assert got.dtype is dtype
    error = (got.double() - want).norm() / want.norm()
    assert error < ROUNDING[dtype], float(error)


def normed(x, scale, eps=1e-6):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * scale.double()


def check_sandwich(num_tokens, hidden_size, num_splits, dtype):
    partial_dtype = dtype if num_splits == 1 else torch.float32
    partials = torch.randn(num_splits, num_tokens, hidden_size).to(partial_dtype)
    residual = torch.randn(num_tokens, hidden_size).to(dtype)
    after, before = (NormScale(1.0 + torch.randn(hidden_size), 1e-6) for _ in range(2))
    stream = residual.double() + normed(partials.double().sum(0), after.scale)
    hidden = add_sandwich_norm_(partials, residual, after, before)
    check_close(residual, stream, dtype)
    check_close(hidden, normed(stream, before.scale), dtype)


def check_gelu(num_tokens, width, num_splits, dtype):
    partials = torch.randn(num_splits, num_tokens, 2 * width) * 3
    gate, up = partials.double().sum(0).chunk(2, dim=-1)
    want = functional.gelu(gate, approximate="tanh") * up
    check_close(gate_and_mul(partials, dtype, "gelu_tanh"), want, dtype)


def check_gated_product(kind, num_tokens, width, in_features):
    x, weight = torch.randn(num_tokens, in_features), torch.randn(2 * width, in_features) * 0.2
    gate, up = (x.double() @ weight.double().t()).chunk(2, dim=-1)
    config = GemmConfig(kind, 8 if kind == "gated_gemv" else 16, 16, 1, 1, 4)
    by_gate = {
        "silu": functional.silu(gate) * up,
        "gelu_tanh": functional.gelu(gate, approximate="tanh") * up,
    }
    for name, want in by_gate.items():
        check_close(triton_gated_gemm(x, weight, config, name), want, torch.float32)


def check_cap(num_rows, width, dtype):
    padded = (torch.randn(num_rows, width + 24) * 40).to(dtype)
    padded[0, 3] = torch.nan
    logits, beyond = padded[:, :width], padded[:, width:].clone()
    want = 30.0 * torch.tanh(logits.double() / 30.0)
    cap_logits_(logits, 30.0)
    assert logits[0, 3].isnan()
    assert torch.equal(padded[:, width:], beyond)
    check_close(logits.nan_to_num(), want.nan_to_num(), dtype)


def check_head_norm(num_q, num_kv, head_dim, num_splits, dtype, scale_dtype):
    """Scales in float32 multiply what was not rounded, others what was."""
    shape, num_tokens = RopeShape(num_q, num_kv, head_dim), 5
    partials = torch.randn(num_splits, num_tokens, sum(shape.split_sizes))
    scales = (1.0 + torch.randn(2, head_dim)).to(scale_dtype)
    cos_sin = cos_sin_table(RopeSpec("default", 1e4, head_dim, 64, {}), 64)
    positions, places = torch.randint(0, 64, (num_tokens,)), torch.randperm(9)[:num_tokens]
    pools = torch.zeros(2, 9, num_kv, head_dim, dtype=dtype)
    norm = HeadNorm(scales[0], scales[1], 1e-6)
    q = FusedRope(shape, Rotation(cos_sin, None, norm))(
        partials, positions, places, pools[0], pools[1], dtype
    )
    parts = [x.unflatten(-1, (-1, head_dim)) for x in partials.split(shape.split_sizes, dim=-1)]
    heads = [part.double().sum(0) for part in parts]
    cos, sin = cos_sin.double()[positions].unsqueeze(1).chunk(2, dim=-1)
    for got, part, scale in zip((q, pools[0][places]), heads, scales, strict=False):
        first, second = normed(part, scale).chunk(2, dim=-1)
        want = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        check_close(got, want, dtype)
    check_close(pools[1][places], heads[2], dtype)


class PlainChooser:
    """As GemmChooser, of no device: what is not of 16 bits goes to torch's own product."""

    @staticmethod
    def for_device(device):
        return GemmChooser(Tables({}, {}), Path("/nonexistent"), HOPPER)


def check_model(tiny, folder):
    """Prompts in chunks beside each other, then tokens one by one: the logits of plain torch."""
    save_tiny_model(tiny, folder)
    first, second = random_prompt(14, seed=1), random_prompt(9, seed=2)
    steps = [{0: first[:5], 1: second[:8]}, {1: second[8:], 0: first[5:6]}, {0: first[6:]}]
    outputs = []
    for model_class in (GemmaForCausalLM, CudaGemmaForCausalLM):
        registry.GemmaForCausalLM = model_class
        loaded = load_model(EngineConfig(model=str(folder)), SingleRank(), CPU, torch.float32)
        assert type(loaded.model) is model_class
        rows = ModelRows(loaded, torch_native_backend(loaded))
        logits = [row for step in steps for row in rows.step(step).values()]
        outputs.append(torch.cat([*logits, rows.step({0: [5], 1: [6]})[1]]))
    plain, fused = outputs
    assert torch.allclose(plain, fused, rtol=0, atol=1e-4), (plain - fused).abs().max()


if __name__ == "__main__":
    torch.manual_seed(0)
    for dtype in ROUNDING:
        check_sandwich(3, 24, 1, dtype)
        check_sandwich(1, 96, 3, dtype)
        check_gelu(2, 40, 3, dtype)
        check_cap(3, 100, dtype)
        check_head_norm(4, 2, 16, 3, dtype, torch.float32)
    check_head_norm(4, 2, 16, 1, torch.float16, torch.float16)
    check_gated_product("gated_gemv", 1, 20, 32)
    check_gated_product("gated", 5, 20, 32)
    cuda_stream.GemmChooser = PlainChooser
    for tiny in GEMMA.values():
        with tempfile.TemporaryDirectory() as folder:
            check_model(tiny, Path(folder))
    print("all equal")
