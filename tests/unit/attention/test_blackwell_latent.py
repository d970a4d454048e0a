"""cutlass_mla and trtllm_mla against the float64 oracle; their kernels are replaced by stand-ins
that refuse what the packages refuse. What they do on Blackwell has not been seen."""

import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from attention.backends import cutlass_mla, triton_latent, trtllm_mla
from attention.backends.cutlass_mla import CutlassMLABackend
from attention.backends.trtllm_mla import TRTLLMMLABackend
from attention.capability import AttentionBackendError
from attention.kernels import blackwell
from attention.selection import why_unfit
from tests.fakes.attention_targets import limits_of
from tests.fakes.blackwell import (
    cutlass_mla_decode,
    fake_cutlass_mla,
    trtllm_batch_decode_with_kv_cache_mla,
)
from tests.fakes.flash_attention import fake_triton_kernels
from tests.unit.attention.cases import CaseSpec, relative_error, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, build_latent_case
from tests.unit.attention.test_selection import BF16, BLACKWELL, CONSUMER_BLACKWELL, HOPPER

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

DIMS = replace(DEEPSEEK, num_heads=4)
TOLERANCE = 1.5e-2
DECODE = rows_of((0, 1), (1, 1), (63, 1), (64, 1), (300, 1), (127, 1))
WIDE = rows_of((130, 1), (600, 1))
BACKENDS = [(CutlassMLABackend, 128), (TRTLLMMLABackend, 64), (TRTLLMMLABackend, 32)]
each_backend = pytest.mark.parametrize(("backend_class", "page_size"), BACKENDS)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(triton_latent, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(triton_latent, "gpu_limits", lambda device: limits_of((10, 0)))
    monkeypatch.setattr(cutlass_mla, "load_cutlass_mla", fake_cutlass_mla)
    monkeypatch.setattr(
        trtllm_mla, "load_trtllm_mla", lambda: trtllm_batch_decode_with_kv_cache_mla
    )


def case_of(rows, page_size, dims=DIMS):
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    return build_latent_case(CaseSpec(rows, page_size=page_size, **half), dims)


@each_backend
@pytest.mark.parametrize("rows", [DECODE, WIDE], ids=["decode", "wide"])
def test_arguments_mean_what_the_oracle_computes(rows, backend_class, page_size):
    case = case_of(rows, page_size)
    backend = backend_class(case.config, case.table, case.pool)
    assert relative_error(case.run(backend), case.run_oracle()) < TOLERANCE


@each_backend
def test_recorded_steps_follow_the_batch_and_rows_that_pad_it_have_a_key(backend_class, page_size):
    case = case_of(DECODE, page_size)
    case.pool.get_latent(0)[0] = 0.0  # the dummy page holds numbers
    backend = backend_class(case.config, case.table, case.pool)
    backend.init_cuda_graph_state(len(DECODE) + 1)
    batch = replace(case.batch, attn_backend=backend)
    backend.init_forward_metadata_capture_cuda_graph(batch)
    for lengths in (torch.zeros_like(batch.seq_lens), batch.seq_lens):
        backend.record_step_tables(replace(batch, seq_lens=lengths))
        with torch.inference_mode():
            out = case.layer(case.tokens(), case.up, batch)
    out = out.view(-1, DIMS.num_heads, DIMS.v_head_dim)
    assert relative_error(out, case.run_oracle()) < TOLERANCE


@each_backend
def test_only_decode_steps_are_theirs(backend_class, page_size, monkeypatch):
    seen = []
    monkeypatch.setattr(
        triton_latent.PagedExtend, "attend", lambda self, *args: seen.append(len(args[0]))
    )
    for rows, num_tokens in ((DECODE, []), (rows_of((9, 4), (70, 1)), [5])):
        seen.clear()
        case = case_of(rows, page_size)
        case.run(backend_class(case.config, case.table, case.pool))
        assert seen == num_tokens


def test_more_heads_than_the_kernel_has_are_refused_with_the_remedy():
    case = case_of(DECODE, 128, replace(DEEPSEEK, num_heads=129))
    with pytest.raises(AttentionBackendError, match="up to 128 heads.*tensor parallelism"):
        CutlassMLABackend(case.config, case.table, case.pool)


@each_backend
def test_they_are_for_latents_of_deepseeks_sizes_on_data_centre_blackwell(backend_class, page_size):
    capability = backend_class.capability
    latents = replace(BF16, needs_mla=True, latent=DEEPSEEK.entry, page_size=page_size)
    assert why_unfit(capability, BLACKWELL, latents) is None
    assert "page size 16" in why_unfit(capability, BLACKWELL, replace(latents, page_size=16))
    assert "needs sm100" in why_unfit(capability, HOPPER, latents)
    assert "beyond sm103" in why_unfit(capability, CONSUMER_BLACKWELL, latents)
    assert "the kernel reads latents" in why_unfit(capability, BLACKWELL, BF16)


def test_packages_are_asked_for_by_their_own_names(monkeypatch):
    package = SimpleNamespace(
        cutlass_mla_decode=cutlass_mla_decode,
        cutlass_mla_get_workspace_size=len,
        trtllm_batch_decode_with_kv_cache_mla=trtllm_batch_decode_with_kv_cache_mla,
    )
    monkeypatch.setattr(blackwell.importlib, "import_module", lambda name: package)
    assert blackwell.load_cutlass_mla().attend is cutlass_mla_decode
    assert blackwell.load_trtllm_mla() is trtllm_batch_decode_with_kv_cache_mla


@pytest.mark.parametrize(
    ("probe", "install"),
    [
        (blackwell.probe_cutlass_mla, "sglang-kernel"),
        (blackwell.probe_trtllm_mla, "flashinfer-python"),
    ],
)
def test_a_package_that_is_missing_is_named_with_its_install(probe, install, monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(blackwell.importlib, "import_module", missing)
    found = probe()
    assert not found.is_available
    assert install in found.missing


def test_stand_ins_take_no_argument_that_the_packages_do_not_have():
    """Their signatures, as those versions have them."""
    cutlass = "q_nope q_pe kv_c_and_k_pe_cache seq_lens page_table workspace sm_scale num_kv_splits"
    assert list(inspect.signature(cutlass_mla_decode).parameters) == cutlass.split()
    trtllm = (
        "query kv_cache workspace_buffer qk_nope_head_dim kv_lora_rank qk_rope_head_dim "
        "block_tables seq_lens max_seq_len sparse_mla_top_k out bmm1_scale bmm2_scale sinks "
        "skip_softmax_threshold_scale_factor enable_pdl backend is_var_seq "
        "uses_shared_paged_kv_idx lse return_lse cute_dsl_impl"
    )
    ours = inspect.signature(trtllm_batch_decode_with_kv_cache_mla).parameters
    assert set(ours) <= set(trtllm.split())
