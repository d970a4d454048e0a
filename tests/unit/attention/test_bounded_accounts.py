"""Windows in accounts of their own: pages that no query sees are somebody else's, NaN here, and
tables go on naming them. The kernels' stand-ins multiply what a window hides by zero."""

from dataclasses import replace

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends import flash_attention, triton_decoder
from attention.backends.flash_attention import FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.capability import AttentionBackendError
from attention.features import Feature
from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from tests.fakes.flash_attention import (
    FakePagedDecode,
    fake_flash_attention_3,
    fake_triton_kernels,
)
from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter
from tests.proofs.cells import proves
from tests.unit.attention.account_cases import windowed, with_account
from tests.unit.attention.cases import relative_error, rows_of
from tests.unit.attention.visibility_cases import build_visible, everything, items, tree

BACKENDS = [TorchNativeBackend, FlashAttentionBackend, TritonDecodeFlashAttentionBackend]
TOLERANCE = 1e-2
STEPS = {
    "decode": rows_of((0, 1), (1, 1), (15, 1), (16, 1), (300, 1), (64, 1)),
    "extend": rows_of((0, 5), (207, 130), (128, 2), (33, 16)),
    "mixed": rows_of(*[(40 + i, 1) for i in range(33)], (0, 300), (255, 1), (17, 9), (0, 1)),
}
LAYERS = {
    "window": LayerAttentionConfig(sliding_window_size=24),
    "of_one": LayerAttentionConfig(sliding_window_size=1),
    "everything": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5, has_sinks=True),
}


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch):
    monkeypatch.setattr(flash_attention, "load_flash_attention_3", fake_flash_attention_3)
    monkeypatch.setattr(flash_attention, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(triton_decoder, "PagedDecode", FakePagedDecode)


@proves(Feature.BOUNDED_ACCOUNTS)
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("backend", BACKENDS)
def test_pages_that_were_given_back_are_in_no_output(backend, page_size, rows, layer):
    case = windowed(rows, layer, page_size)
    assert relative_error(with_account(case).run(backend), case.run_oracle()) < TOLERANCE


@pytest.mark.parametrize("make", [tree, everything])
@pytest.mark.parametrize("page_size", [1, 16])
def test_drafts_and_encoders_see_no_page_that_was_given_back(page_size, make):
    case = build_visible(windowed(STEPS["extend"], LAYERS["window"], page_size).spec, make)
    out = with_account(case).run(TorchNativeBackend)
    assert relative_error(out, case.run_oracle()) < TOLERANCE


def test_items_are_refused_where_the_account_lets_go_of_their_prefix():
    case = build_visible(windowed(STEPS["extend"], LAYERS["window"], 16).spec, items)
    with pytest.raises(
        AttentionBackendError, match="let go of the prefix have no items: window_24"
    ):
        with_account(case).run(TorchNativeBackend)


@pytest.mark.parametrize("backend_class", BACKENDS[1:])
def test_tables_of_every_account_are_recorded(backend_class):
    """A layer that sees everything and one that does not, in a graph that has more rows."""
    case = with_account(windowed(STEPS["decode"], LAYERS["window"], 16))
    config = replace(case.config, num_layers=2, layers=(LayerAttentionConfig(), LAYERS["window"]))
    pages = (case.token_to_kv_pool.num_pages,) * 2
    pool = GroupedTokenToKVPool(config, pages, MHATokenToKVPool)
    windows = pool.get_kv_buffer(1)
    for buffer, kept in zip(windows, case.token_to_kv_pool.get_kv_buffer(0), strict=True):
        buffer.copy_(kept)
    backend = backend_class(config, case.req_to_token_pool, pool)
    backend.init_cuda_graph_state(8)
    backend.init_forward_metadata_capture_cuda_graph(case.batch)
    backend.record_step_tables(case.batch)
    captured = {window: one.page_table for window, one in backend._metadata.items()}
    assert captured.keys() == {-1, 24}
    slots = case.batch.req_pool_indices.tolist()
    long_row = 4  # of 300 tokens and one
    for window, table in zip((-1, 24), case.req_to_token_pool.own_tables, strict=True):
        named = (table[slots[long_row], :301:16] // 16).tolist()
        if window > 0:
            named[:17] = [0] * 17  # positions 277 and up are seen
        assert captured[window][long_row, :19].tolist() == named
    case.layer.layer_id = 1
    with torch.inference_mode():
        out = backend.forward_decode(case.q, case.k, case.v, case.layer, case.batch)
    expected = windowed(STEPS["decode"], LAYERS["window"], 16).run_oracle()
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.timeout(TIMEOUT_S)
def test_the_kernels_that_fill_a_step_s_tables_do_what_plain_torch_does() -> None:
    pytest.importorskip("triton", reason="comes with torch for CUDA only")
    check_by_interpreter("tests.fakes.interpreted_step_tables")
