"""flashmla against the float64 oracle; the kernels are replaced by what they document."""

from dataclasses import replace

import pytest
import torch

from attention.backends import flash_attention_latent, flash_mla
from attention.backends.flash_mla import PAGE_SIZE, FlashMLABackend
from attention.registry import LATENT_BACKENDS
from attention.selection import why_unfit
from tests.fakes.flash_attention import fake_flash_attention_3, fake_triton_kernels
from tests.fakes.flash_mla import fake_flash_mla
from tests.unit.attention.cases import CaseSpec, relative_error, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, build_latent_case
from tests.unit.attention.test_selection import BF16, HOPPER

DIMS = replace(DEEPSEEK, num_heads=4)
TOLERANCE = 1.5e-2
DECODE = rows_of((0, 1), (1, 1), (63, 1), (64, 1), (300, 1))
STEPS = {"decode": DECODE, "mixed": rows_of((40, 1), (0, 90), (7, 9)), "fresh": rows_of((0, 70))}


@pytest.fixture(autouse=True)
def fake_kernels(monkeypatch):
    monkeypatch.setattr(flash_attention_latent, "load_flash_attention_3", fake_flash_attention_3)
    monkeypatch.setattr(flash_attention_latent, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(flash_mla, "load_flash_mla", fake_flash_mla)


def case_of(rows):
    spec = CaseSpec(rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, page_size=PAGE_SIZE)
    return build_latent_case(spec, DIMS)


def backend_of(case):
    return FlashMLABackend(case.config, case.table, case.pool)


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_arguments_mean_what_the_oracle_computes(rows):
    case = case_of(rows)
    assert relative_error(case.run(backend_of(case)), case.run_oracle()) < TOLERANCE


def test_only_rows_that_decode_go_to_flash_mla(monkeypatch):
    calls = []
    kernels = fake_flash_mla()
    watched = replace(kernels, attend=lambda **args: calls.append(1) or kernels.attend(**args))
    monkeypatch.setattr(flash_mla, "load_flash_mla", lambda: watched)
    for rows, expected in ((DECODE, 1), (STEPS["mixed"], 1), (STEPS["fresh"], 0)):
        calls.clear()
        case = case_of(rows)
        case.run(backend_of(case))
        assert len(calls) == expected


def test_a_step_is_planned_by_its_first_layer_and_again_by_every_replay():
    """The stand-in refuses the plan of another step: lengths grow between two runs of a graph."""
    case = case_of(DECODE)
    backend = backend_of(case)
    backend.init_cuda_graph_state(len(DECODE))
    backend.init_forward_metadata_capture_cuda_graph(case.batch)
    batch = replace(case.batch, attn_backend=backend)
    for shorter in (1, 0):
        seq_lens = (case.batch.seq_lens - shorter).clamp(min=0)
        with torch.inference_mode():
            backend.record_step_tables(replace(batch, seq_lens=seq_lens))
            out = case.layer(case.tokens(), case.up, batch)
    out = out.view(-1, DIMS.num_heads, DIMS.v_head_dim)
    assert relative_error(out, case.run_oracle()) < TOLERANCE


def test_it_is_for_latents_of_deepseeks_sizes_in_pages_of_64():
    capability = LATENT_BACKENDS.get("flashmla").capability
    latents = replace(BF16, needs_mla=True, latent=DEEPSEEK.entry, page_size=64)
    assert why_unfit(capability, HOPPER, latents) is None
    assert "page size 128" in why_unfit(capability, HOPPER, replace(latents, page_size=128))
    smaller = replace(DEEPSEEK.entry, latent_dim=256)
    assert "latents of 512" in why_unfit(capability, HOPPER, replace(latents, latent=smaller))
    assert "no K and V of heads" in why_unfit(capability, HOPPER, BF16)
