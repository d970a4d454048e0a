"""The triton backends: their kernels by the interpreter, their tiles, and what they refuse."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from attention.backends import triton_latent, triton_paged
from attention.backends.triton_fp8 import Fp8TritonBackend
from attention.backends.triton_latent import TritonLatentBackend
from attention.backends.triton_paged import TritonBackend
from attention.capability import AttentionBackendError
from attention.kernels import paged_decode
from attention.kernels.decode_shape import decode_shared_bytes, fitting_tuning, measured_tuning
from attention.kernels.gpu_limits import GpuLimits
from tests.fakes.attention_targets import (
    DECODE_HEADS,
    EXTEND_HEADS,
    NEW_TOKENS,
    decode_variants,
    extend_variant,
    join_variant,
    limits_of,
)
from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter
from tests.fakes.triton_targets import SHARED_BYTES
from tests.unit.attention.cases import CaseSpec, build_case, rows_of
from tests.unit.attention.latent_cases import build_latent_case

# Newer versions than the engine is tested with warn of a default that is to change.
pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
SMALL = (8, 6)
HALF = {"dtype": torch.float16, "kv_dtype": torch.float16}


@pytest.fixture(autouse=True)
def ampere(monkeypatch):
    for module in (paged_decode, triton_latent, triton_paged):
        monkeypatch.setattr(module, "gpu_limits", lambda device: limits_of((8, 0)))


@pytest.mark.timeout(TIMEOUT_S)
def test_kernels_compute_what_the_oracle_does_and_plans_have_the_chunks_of_arithmetic() -> None:
    check_by_interpreter("tests.fakes.interpreted_attention", "tests.fakes.interpreted_decode_plan")


@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
@pytest.mark.parametrize("geometry", EXTEND_HEADS.values(), ids=EXTEND_HEADS.keys())
def test_every_gpu_has_tiles_for_every_kind_of_heads(geometry, capability) -> None:
    limits = limits_of(capability)
    rows = []
    for num_new in NEW_TOKENS:
        tiles = geometry.tiles(num_new, limits)
        assert geometry.shared_bytes(tiles, limits) <= limits.shared_bytes
        assert tiles.tile_rows <= max(16, 2 * num_new * geometry.group)
        rows.append(tiles.tile_rows)
    assert rows == sorted(rows)
    shape = geometry.shape(tiles)
    assert shape.tile_dim >= geometry.head_dim
    assert shape.tile_v_dim >= geometry.v_head_dim
    assert shape.has_whole_blocks == (geometry.page_size % tiles.block_keys == 0)


def test_a_gpu_without_room_is_refused_with_its_bytes() -> None:
    with pytest.raises(ValueError, match="no tiles of heads of 256 fit 16384 bytes"):
        EXTEND_HEADS["gemma"].tiles(1, GpuLimits((8, 6), 1, 16 << 10))
    with pytest.raises(ValueError, match="no tiles of heads of 256 fit 4096 bytes"):
        fitting_tuning(DECODE_HEADS["gemma"], 1, 4 << 10)


@pytest.mark.parametrize("num_rows", [1, 64])
@pytest.mark.parametrize("geometry", DECODE_HEADS.values(), ids=DECODE_HEADS.keys())
def test_decode_keeps_what_was_measured_where_it_fits(geometry, num_rows) -> None:
    measured = measured_tuning(geometry, num_rows)
    assert fitting_tuning(geometry, num_rows, SHARED_BYTES[9, 0]) == measured
    small = fitting_tuning(geometry, num_rows, SHARED_BYTES[SMALL])
    assert decode_shared_bytes(geometry, small) <= SHARED_BYTES[SMALL]
    assert small.num_stages >= 2


@pytest.mark.parametrize(("heads", "kind"), [("llama", "tree"), ("fp8", "split")])
def test_extend_kernels_compile_for_a_small_gpu_and_fit_it(heads, kind) -> None:
    geometry, limits, is_tree = EXTEND_HEADS[heads], limits_of(SMALL), kind == "tree"
    tiles = geometry.tiles(1024, limits, is_tree)
    taken = extend_variant(geometry, tiles, kind).compile_for(SMALL).metadata.shared
    assert taken <= geometry.shared_bytes(tiles, limits, is_tree)


def test_decode_kernels_compile_for_a_small_gpu_and_fit_it() -> None:
    geometry = DECODE_HEADS["llama"]
    tuning, plan, chunk = decode_variants(geometry, 64, SMALL)
    assert plan.compile_for(SMALL).metadata.shared <= SHARED_BYTES[SMALL]
    assert chunk.compile_for(SMALL).metadata.shared <= decode_shared_bytes(geometry, tuning)
    join = join_variant(EXTEND_HEADS["llama"]).compile_for(SMALL)
    assert join.metadata.shared <= SHARED_BYTES[SMALL]


def build(backend, spec, **changes):
    case = build_case(spec)
    config = replace(case.config, **changes)
    return backend(config, case.req_to_token_pool, case.token_to_kv_pool)


def test_what_no_kernel_reads_is_refused() -> None:
    spec = CaseSpec(rows_of((3, 1)), **HALF)
    with pytest.raises(AttentionBackendError, match=r"model's dtype torch.float16, not torch.bf"):
        build(TritonBackend, spec, kv_dtype=torch.bfloat16)
    with pytest.raises(AttentionBackendError, match=r"up to 256 elements, this model has \(288"):
        build(TritonBackend, replace(spec, head_dim=288))
    with pytest.raises(AttentionBackendError, match="float8_e4m3fn, not torch.float16"):
        build(Fp8TritonBackend, spec)
    with pytest.raises(AttentionBackendError, match="an Fp8MHATokenToKVPool, not MHATokenToKV"):
        build(Fp8TritonBackend, spec, kv_dtype=torch.float8_e4m3fn)
    latents, heads = build_latent_case(spec), build_case(spec)
    with pytest.raises(AttentionBackendError, match="LatentTokenToKVPool, not MHATokenToKVPool"):
        TritonLatentBackend(latents.config, latents.table, heads.token_to_kv_pool)
    config = replace(latents.config, kv_dtype=torch.bfloat16)
    with pytest.raises(AttentionBackendError, match="latents of the model's dtype"):
        TritonLatentBackend(config, latents.table, latents.pool)


def test_a_gpu_without_room_for_the_heads_refuses_the_model(monkeypatch) -> None:
    monkeypatch.setattr(triton_paged, "gpu_limits", lambda device: GpuLimits((8, 6), 1, 4 << 10))
    with pytest.raises(AttentionBackendError, match="triton: no tiles of heads of 32 fit 4096"):
        build(TritonBackend, CaseSpec(rows_of((3, 1)), **HALF))


def test_layers_and_steps_that_were_not_planned_are_errors() -> None:
    case = build_case(CaseSpec(rows_of((3, 1)), **HALF))
    backend = TritonBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    latents = build_latent_case(CaseSpec(rows_of((3, 1)), **HALF))
    over_latents = TritonLatentBackend(latents.config, latents.table, latents.pool)
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        over_latents.forward_latent(latents.tokens(), latents.up, latents.layer, latents.batch)


def test_only_gpus_that_start_kernels_early_fuse_the_projection(monkeypatch) -> None:
    spec = CaseSpec(rows_of((3, 1)), head_dim=64, v_head_dim=64, **HALF)
    assert not build(TritonBackend, spec).fuses_decode_projection(1)
    monkeypatch.setattr(paged_decode, "gpu_limits", lambda device: limits_of((9, 0)))
    assert build(TritonBackend, spec).fuses_decode_projection(1)
    assert not build(TritonBackend, replace(spec, v_head_dim=32)).fuses_decode_projection(1)
