"""The flashinfer backends' plans and arguments; the wrappers are replaced by what they document.

What the real kernels do with them is tests/gpu/attention's to find out.
"""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends import (
    flash_infer,
    flash_infer_latent,
    flash_infer_masks,
    flash_infer_workspace,
)
from attention.backends.flash_infer import FlashInferBackend
from attention.backends.flash_infer_fp8 import Fp8FlashInferBackend
from attention.backends.flash_infer_latent import FlashInferLatentBackend
from attention.backends.flash_infer_workspace import (
    FlashInferWorkspace,
    UploadBuffers,
    eager_bytes,
    graph_bytes,
)
from attention.capability import AttentionBackendError
from attention.kernels import flash_infer as package
from attention.kernels.gpu_limits import GpuLimits
from attention.memory.fp8_kv_pool import Fp8MHATokenToKVPool
from tests.fakes.flash_infer import FakePackage, fill_page_lists
from tests.unit.attention.cases import PAGE_SIZES, CaseSpec, build_case, relative_error, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, build_latent_case
from tests.unit.attention.visibility_cases import KINDS, build_visible

TOLERANCE = 1e-2
LATENT_TOLERANCE = 1.5e-2
FP8_TOLERANCE = 6e-2
CPU = torch.device("cpu")
DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (200, 1), (64, 1))
EXTEND = rows_of((0, 5), (7, 60), (128, 2), (33, 16))
MIXED = rows_of((40, 1), (0, 90), (55, 1), (17, 9), (0, 1))
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "no_new": rows_of((30, 0), (9, 4))}
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "cap": LayerAttentionConfig(logit_cap=0.8),
    "all": LayerAttentionConfig(sliding_window_size=50, logit_cap=1.5),
}
DIMS = replace(DEEPSEEK, num_heads=4)


@pytest.fixture(autouse=True)
def fake(monkeypatch):
    fake = FakePackage()
    for module in (flash_infer, flash_infer_latent):
        monkeypatch.setattr(module, "load_flash_infer", fake.kernels)
        monkeypatch.setattr(module, "load_page_lists", lambda: fill_page_lists)
    for module in (flash_infer_latent, flash_infer_workspace):
        monkeypatch.setattr(module, "gpu_limits", lambda device: GpuLimits((9, 0), 4, 1 << 17))
    monkeypatch.setattr(package, "missing_compiler", lambda: None)
    return fake


def half(rows, **changes):
    dims = {"head_dim": 64, "v_head_dim": 64, "dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    return CaseSpec(rows, **{**dims, **changes})


def backend_of(case, **changes):
    config = replace(case.config, **changes)
    return FlashInferBackend(config, case.req_to_token_pool, case.token_to_kv_pool)


def forward(backend, case, batch=None):
    with torch.inference_mode():
        return backend.forward(case.q, case.k, case.v, case.layer, batch or case.batch)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["tensor_cores", "cuda_cores"])
def test_arguments_mean_what_the_oracle_computes(heads, rows, layer):
    case = build_case(half(rows, layer=layer, q_heads=heads[0], kv_heads=heads[1]))
    assert relative_error(case.run(FlashInferBackend), case.run_oracle()) < TOLERANCE


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_every_page_size(page_size):
    for rows in (DECODE, MIXED):
        case = build_case(half(rows, page_size=page_size))
        assert relative_error(case.run(FlashInferBackend), case.run_oracle()) < TOLERANCE


@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["all"]], ids=["plain", "all"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_masks_say_what_new_tokens_see(make, layer, monkeypatch):
    monkeypatch.setattr(flash_infer_masks, "_QUERIES_PER_BLOCK", 16)
    for rows in (rows_of((40, 8), (0, 5), (30, 1), (64, 3)), EXTEND):
        case = build_visible(half(rows, layer=layer), make)
        assert relative_error(case.run(FlashInferBackend), case.run_oracle()) < TOLERANCE


def test_causal_steps_have_no_mask():
    with pytest.raises(ValueError, match="no mask"):
        flash_infer_masks.pack_mask(build_case(half(EXTEND)).batch, LAYERS["plain"].retention)


def test_a_step_without_tokens_and_a_step_that_was_not_planned():
    assert build_case(half(())).run(FlashInferBackend).shape == (0, 8, 64)
    case = build_case(half(DECODE))
    with pytest.raises(RuntimeError, match="init_forward_metadata"):
        forward(backend_of(case), case)
    backend = backend_of(case)
    backend.init_forward_metadata(case.batch)
    case.layer.logit_cap = 3.0
    with pytest.raises(ValueError, match="logit_cap=3"):
        forward(backend, case)


def test_output_goes_where_the_step_wants_it():
    case = build_case(half(MIXED))
    wanted = torch.empty((len(case.q), 8 * 64), dtype=torch.bfloat16)
    out = replace(case, batch=replace(case.batch, attention_out=wanted)).run(FlashInferBackend)
    assert out.data_ptr() == wanted.data_ptr()
    assert relative_error(out, case.run_oracle()) < TOLERANCE


def test_kinds_of_layers_are_planned_apart_and_share_what_they_can(fake):
    """Two kinds in one step: the stand-in refuses a plan that another one overwrote."""
    full = build_case(half(MIXED))
    windowed = build_case(half(MIXED, layer=LAYERS["window"]))
    kinds = (LAYERS["plain"], LAYERS["window"])
    backend = backend_of(full, layers=kinds, num_layers=2)
    backend.init_forward_metadata(full.batch)
    for case in (full, windowed):
        assert relative_error(forward(backend, case), case.run_oracle()) < TOLERANCE
    prefills = [name for name in fake.built if name.startswith("prefill")]
    assert (len(prefills), len(fake.built)) == (2, 3), "without a window, decode on CUDA cores"
    backend_of(full, layers=kinds, num_layers=2)
    assert len(fake.built) == 3, "what is compiled is not compiled again"


def padded(batch, num_rows):
    extra = num_rows - batch.batch_size
    zeros = torch.zeros(extra, dtype=torch.int32)
    return replace(
        batch,
        batch_size=num_rows,
        num_tokens=num_rows,
        req_pool_indices=torch.cat([batch.req_pool_indices, zeros.long()]),
        seq_lens=torch.cat([batch.seq_lens, zeros]),
        extend_seq_lens=torch.cat([batch.extend_seq_lens, zeros + 1]),
        out_cache_loc=torch.cat([batch.out_cache_loc, zeros.long()]),
        extend_seq_lens_cpu=np.ones(num_rows, dtype=np.int32),
    )


def replay(backend, case, num_rows, seed=0):
    """What a graph of num_rows rows does with the case: the hook, then the recorded launches."""
    batch = padded(case.batch, num_rows)
    lengths = np.zeros(num_rows + 2, dtype=np.int32)
    lengths[: case.batch.batch_size] = case.batch.seq_lens_cpu
    assert backend.plans_on_host
    backend.before_replay(num_rows, lengths)
    backend.record_step_tables(batch)
    rows = (case.q, case.k, case.v)
    q, k, v = (torch.cat([t, t.new_zeros(num_rows - len(t), *t.shape[1:])]) for t in rows)
    with torch.inference_mode():
        out = backend.forward(q, k, v, case.layer, batch)
    assert out.isfinite().all(), "rows that pad a graph have a key"
    return out[: case.batch.batch_size]


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)], ids=["tensor_cores", "cuda_cores"])
def test_replays_are_planned_anew_and_read_their_own_pages(heads):
    spec = half(DECODE, q_heads=heads[0], kv_heads=heads[1], layer=LAYERS["cap"])
    case = build_case(spec)
    backend = backend_of(case)
    backend.init_cuda_graph_state(10)
    blank = padded(build_case(spec.with_rows()).batch, 8)
    backend.init_forward_metadata_capture_cuda_graph(blank)
    assert relative_error(replay(backend, case, 8), case.run_oracle()) < TOLERANCE
    case.batch.seq_lens.sub_(1).clamp_(min=1)
    case.batch.seq_lens_cpu[:] = case.batch.seq_lens.numpy()
    case.batch.out_cache_loc.copy_(
        case.req_to_token_pool.req_to_token[case.batch.req_pool_indices, case.batch.seq_lens - 1]
    )
    assert relative_error(replay(backend, case, 8), case.run_oracle()) < TOLERANCE


def test_graphs_need_their_state_first_and_no_more_rows_than_it_has():
    case = build_case(half(DECODE))
    backend = backend_of(case)
    with pytest.raises(RuntimeError, match="init_cuda_graph_state"):
        backend.init_forward_metadata_capture_cuda_graph(case.batch)
    backend.init_cuda_graph_state(len(DECODE) - 1)
    with pytest.raises(ValueError, match=f"told at most {len(DECODE) - 1}"):
        backend.init_forward_metadata_capture_cuda_graph(case.batch)


def test_what_no_kernel_reads_is_refused_with_the_remedy():
    case = build_case(half(DECODE))
    with pytest.raises(AttentionBackendError, match=r"not torch.float8_e4m3fn; flashinfer_fp8"):
        backend_of(case, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(AttentionBackendError, match="an Fp8MHATokenToKVPool, not MHATokenToKVPo"):
        Fp8FlashInferBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    with pytest.raises(AttentionBackendError, match=r"float8_e4m3fn, not torch.bfloat16"):
        Fp8FlashInferBackend._check(case.config)
    with pytest.raises(AttentionBackendError, match=r"64, 128, 256 .*\(96, 96\); triton has"):
        backend_of(case, head_dim=96, v_head_dim=96)
    latents = latent_case(DECODE)
    with pytest.raises(AttentionBackendError, match="LatentTokenToKVPool, not MHATokenToKVPool"):
        FlashInferLatentBackend(latents.config, latents.table, case.token_to_kv_pool)
    config = replace(latents.config, kv_dtype=torch.float16)
    with pytest.raises(AttentionBackendError, match="latents of the model's dtype"):
        FlashInferLatentBackend(config, latents.table, latents.pool)


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_fp8_scales_are_the_pool_s(rows):
    case = build_case(half(rows, q_heads=4, kv_heads=4, page_size=8))
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    pool = Fp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    pool.set_scales(0, 0.02, 0.03)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, torch.arange(len(k)), k, v)
    twin = replace(case, config=config, token_to_kv_pool=pool)
    assert relative_error(twin.run(Fp8FlashInferBackend), case.run_oracle()) < FP8_TOLERANCE


def latent_case(rows, **changes):
    dtypes = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    return build_latent_case(CaseSpec(rows, **dtypes, **changes), DIMS)


@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_latents_mean_what_the_oracle_computes(rows, page_size):
    case = latent_case(rows, page_size=page_size)
    out = case.run(FlashInferLatentBackend(case.config, case.table, case.pool))
    assert relative_error(out, case.run_oracle()) < LATENT_TOLERANCE


def test_replays_over_latents_are_planned_anew():
    case = latent_case(DECODE)
    backend = FlashInferLatentBackend(case.config, case.table, case.pool)
    backend.init_cuda_graph_state(len(DECODE))
    ones = np.ones(len(DECODE), dtype=np.int32)
    backend.init_forward_metadata_capture_cuda_graph(replace(case.batch, seq_lens_cpu=ones))
    batch = replace(case.batch, attn_backend=backend)
    for fewer in (1, 0):
        seq_lens = (case.batch.seq_lens - fewer).clamp(min=0)
        backend.before_replay(len(DECODE), seq_lens.numpy())
        backend.record_step_tables(replace(batch, seq_lens=seq_lens))
        with torch.inference_mode():
            out = case.layer(case.tokens(), case.up, batch)
    out = out.view(-1, DIMS.num_heads, DIMS.v_head_dim)
    assert relative_error(out, case.run_oracle()) < LATENT_TOLERANCE


class Events(list):
    """Marks that have not been passed until somebody waits."""

    def new(self):
        number, marks = len(self), self
        self.append(f"new {number}")

        class Mark:
            def record(self):
                marks.append(f"record {number}")

            def query(self):
                return False

            def synchronize(self):
                marks.append(f"wait {number}")

        return Mark()


def test_a_plan_s_page_locked_memory_is_written_again_behind_its_upload_only():
    events, seen = Events(), []
    uploads = UploadBuffers(2, False, events.new)
    for _ in range(4):
        uploads.upload(lambda buffer: seen.append(buffer.data_ptr()))
    assert seen[0] == seen[2] != seen[1] == seen[3]
    assert events == [
        "new 0",
        "record 0",
        "new 2",
        "record 2",
        "wait 0",
        "record 0",
        "wait 2",
        "record 2",
    ]


def test_workspaces_grow_for_graphs_and_hold_what_scheduler_cuh_counts():
    # 4 multiprocessors, 2 programs each; tiles of 128 rows, then of 16, of which 9 are in use.
    assert eager_bytes(CPU, group=4, head_dim=128) == 8 * 128 * 4 * 129 * 4
    assert graph_bytes(CPU, 8, q_heads=8, kv_heads=2, head_dim=128) == 9 * 16 * 8 * 129 * 4
    assert graph_bytes(CPU, 2, q_heads=64, kv_heads=2, head_dim=128) == 4 * 64 * 64 * 129 * 4
    assert graph_bytes(CPU, 1, q_heads=80, kv_heads=1, head_dim=64) == 8 * 128 * 80 * 65 * 4
    workspace = FlashInferWorkspace(1, 0, CPU)
    first = workspace.buffer
    workspace.reserve(len(first))
    assert workspace.buffer is first
    workspace.reserve(len(first) + 1)
    assert len(workspace.buffer) == len(first) + 1


def test_what_nvcc_would_compile_is_named_before_a_backend_is_built():
    done, missing = (SimpleNamespace(name=n, is_compiled=n == "done") for n in ("done", "missing"))
    assert package.uncompiled(lambda: [done]) == ""
    assert package.uncompiled(lambda: [done, missing]).endswith("nvcc compiles: missing")

    def refused():
        raise PermissionError("read-only")

    assert "cannot write the sources of its kernels: read-only" in package.uncompiled(refused)
