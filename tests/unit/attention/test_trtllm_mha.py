"""trtllm_mha against the float64 oracle; its kernel is replaced by a stand-in that refuses what the
package refuses. What it does on Blackwell has not been seen."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from attention import LayerAttentionConfig
from attention.backends import triton_paged, trtllm_mha
from attention.backends.trtllm_mha import PAGE_SIZES, TRTLLMMHABackend
from attention.kernels import blackwell
from attention.selection import why_unfit
from tests.fakes.attention_targets import limits_of
from tests.fakes.blackwell import trtllm_batch_decode_with_kv_cache
from tests.fakes.flash_attention import fake_triton_kernels
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of
from tests.unit.attention.test_selection import BF16, BLACKWELL, HOPPER

pytestmark = pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")

TOLERANCE = 1e-2
DECODE = rows_of((0, 1), (1, 1), (15, 1), (16, 1), (300, 1), (64, 1))
LAYERS = {
    "plain": LayerAttentionConfig(),
    "window": LayerAttentionConfig(sliding_window_size=24),
    "window_of_one": LayerAttentionConfig(sliding_window_size=1),
    "sinks": LayerAttentionConfig(has_sinks=True),
    "both": LayerAttentionConfig(sliding_window_size=100, has_sinks=True),
}


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch):
    monkeypatch.setattr(triton_paged, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(triton_paged, "gpu_limits", lambda device: limits_of((10, 0)))
    monkeypatch.setattr(trtllm_mha, "load_trtllm_mha", lambda: trtllm_batch_decode_with_kv_cache)


def case_of(rows, **changes):
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    return build_case(CaseSpec(rows, head_dim=64, v_head_dim=64, **half, **changes))


@pytest.mark.parametrize("page_size", PAGE_SIZES)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_arguments_mean_what_the_oracle_computes(layer, page_size):
    case = case_of(DECODE, layer=layer, page_size=page_size)
    assert relative_error(case.run(TRTLLMMHABackend), case.run_oracle()) < TOLERANCE


def test_recorded_steps_follow_the_batch():
    case = case_of(DECODE)
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer[0] = 0.0  # the dummy page holds numbers
    backend = TRTLLMMHABackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_cuda_graph_state(len(DECODE) + 1)
    backend.init_forward_metadata_capture_cuda_graph(case.batch)
    for lengths in (torch.zeros_like(case.batch.seq_lens), case.batch.seq_lens):
        backend.record_step_tables(replace(case.batch, seq_lens=lengths))
        out = backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert relative_error(out, case.run_oracle()) < TOLERANCE


def test_only_decode_steps_are_its_own(monkeypatch):
    seen = []
    monkeypatch.setattr(
        triton_paged.PagedExtend, "attend", lambda self, *args: seen.append(len(args[0]))
    )
    for rows, num_tokens in ((DECODE, []), (rows_of((9, 4), (70, 1)), [5])):
        seen.clear()
        case_of(rows).run(TRTLLMMHABackend)
        assert seen == num_tokens


def test_an_idle_batch_gives_an_empty_result():
    assert case_of(()).run(TRTLLMMHABackend).shape == (0, 8, 64)


def test_it_is_for_data_centre_blackwell():
    capability = TRTLLMMHABackend.capability
    assert why_unfit(capability, BLACKWELL, BF16) is None
    assert "needs sm100" in why_unfit(capability, HOPPER, BF16)
    assert "page size 128, only with 16, 32, 64" in why_unfit(
        capability, BLACKWELL, replace(BF16, page_size=128)
    )


def test_a_package_that_is_missing_is_named_with_its_install(monkeypatch):
    def missing(name):
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(blackwell.importlib, "import_module", missing)
    assert "flashinfer-python" in blackwell.probe_trtllm_mha().missing
