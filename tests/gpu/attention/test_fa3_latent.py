"""fa3 and flashmla over latents, with DeepSeek's sizes, against float64 over the heads."""

from dataclasses import replace

import pytest

from attention.backends import flash_attention_prompts
from attention.backends.flash_attention_latent import FlashAttentionLatentBackend
from attention.backends.flash_mla import PAGE_SIZE, FlashMLABackend
from attention.features import Feature
from tests.gpu.attention.device_cases import DECODE
from tests.gpu.attention.latent_device_cases import (
    AFTER_PREFIXES,
    STEPS,
    eager_and_replayed,
    latent_device_case,
    run,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import relative_error
from tests.unit.attention.latent_cases import DEEPSEEK

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

TOLERANCE = 1.5e-2
both_backends = pytest.mark.parametrize(
    "backend_class", [FlashAttentionLatentBackend, FlashMLABackend]
)


@proves("fa3", Feature.MLA)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_step_at_every_page_size(rows, page_size):
    case = latent_device_case(rows, page_size=page_size, layout_seed=page_size)
    assert relative_error(run(case, FlashAttentionLatentBackend), case.run_oracle()) < TOLERANCE


@both_backends
@pytest.mark.parametrize("max_piece_bytes", [1 << 20, 1 << 22])
def test_pieces_of_prefixes_are_merged(backend_class, max_piece_bytes, monkeypatch):
    monkeypatch.setattr(flash_attention_prompts, "MAX_PIECE_BYTES", max_piece_bytes)
    case = latent_device_case(AFTER_PREFIXES, page_size=PAGE_SIZE)
    assert relative_error(run(case, backend_class), case.run_oracle()) < TOLERANCE


@proves("flashmla", Feature.MLA, Feature.UNEQUAL_HEAD_DIMS, page_size=PAGE_SIZE)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_step_of_flash_mla(rows):
    case = latent_device_case(rows, page_size=PAGE_SIZE)
    assert relative_error(run(case, FlashMLABackend), case.run_oracle()) < TOLERANCE


@proves(Feature.MLA, Feature.DECODE)
@both_backends
@pytest.mark.parametrize("num_heads", [8, 32, 128])
def test_any_number_of_heads(num_heads, backend_class):
    case = latent_device_case(DECODE, replace(DEEPSEEK, num_heads=num_heads), page_size=PAGE_SIZE)
    assert relative_error(run(case, backend_class), case.run_oracle()) < TOLERANCE


@proves(Feature.MLA, Feature.DECODE, Feature.GRAPHS)
@both_backends
def test_a_graph_gives_what_an_eager_step_gives(backend_class):
    case = latent_device_case(DECODE, page_size=PAGE_SIZE)
    eager, replayed = eager_and_replayed(case, backend_class)
    assert relative_error(replayed, eager) < TOLERANCE
