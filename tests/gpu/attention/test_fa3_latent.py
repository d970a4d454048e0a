"""fa3 and flashmla over latents, with DeepSeek's sizes, against float64 over the heads."""

from dataclasses import replace

import pytest
import torch

from attention.backends import flash_attention_prompts
from attention.backends.flash_attention_latent import FlashAttentionLatentBackend
from attention.backends.flash_mla import PAGE_SIZE, FlashMLABackend
from attention.features import Feature
from tests.gpu.attention.device_cases import DECODE, EXTEND, FRESH, MIXED
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.proofs.cells import proves
from tests.unit.attention.cases import CaseSpec, relative_error, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, build_latent_case

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

TOLERANCE = 1.5e-2
# Where DeepSeek's heads attend over K and V of heads, in pieces of the prefixes.
AFTER_PREFIXES = rows_of((900, 1), (7, 1), (650, 500), (0, 200), (33, 160), (64, 64))
STEPS = {
    "decode": DECODE,
    "extend": EXTEND,
    "mixed": MIXED,
    "fresh": FRESH,
    "prefixes": AFTER_PREFIXES,
}
# What is stale in memory. Finite, as a kernel that loads a page's unused tail multiplies it by 0.
POISON = 1e4


def device_case(rows, dims=DEEPSEEK, **changes):
    spec = CaseSpec(
        rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=torch.device("cuda"), **changes
    )
    case = build_latent_case(spec, dims)
    case.pool.get_latent(0).nan_to_num_(nan=POISON)
    return case


both_backends = pytest.mark.parametrize(
    "backend_class", [FlashAttentionLatentBackend, FlashMLABackend]
)


def run(case, backend_class):
    return case.run(backend_class(case.config, case.table, case.pool))


@proves("fa3", Feature.MLA)
@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_step_at_every_page_size(rows, page_size):
    case = device_case(rows, page_size=page_size, layout_seed=page_size)
    assert relative_error(run(case, FlashAttentionLatentBackend), case.run_oracle()) < TOLERANCE


@both_backends
@pytest.mark.parametrize("max_piece_bytes", [1 << 20, 1 << 22])
def test_pieces_of_prefixes_are_merged(backend_class, max_piece_bytes, monkeypatch):
    monkeypatch.setattr(flash_attention_prompts, "MAX_PIECE_BYTES", max_piece_bytes)
    case = device_case(AFTER_PREFIXES, page_size=PAGE_SIZE)
    assert relative_error(run(case, backend_class), case.run_oracle()) < TOLERANCE


@proves("flashmla", Feature.MLA, Feature.UNEQUAL_HEAD_DIMS, page_size=PAGE_SIZE)
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_step_of_flash_mla(rows):
    case = device_case(rows, page_size=PAGE_SIZE)
    assert relative_error(run(case, FlashMLABackend), case.run_oracle()) < TOLERANCE


@proves(Feature.MLA, Feature.DECODE)
@both_backends
@pytest.mark.parametrize("num_heads", [8, 32, 128])
def test_any_number_of_heads(num_heads, backend_class):
    case = device_case(DECODE, replace(DEEPSEEK, num_heads=num_heads), page_size=PAGE_SIZE)
    assert relative_error(run(case, backend_class), case.run_oracle()) < TOLERANCE


@proves(Feature.MLA, Feature.DECODE, Feature.GRAPHS)
@both_backends
def test_a_graph_gives_what_an_eager_step_gives(backend_class):
    case = device_case(DECODE, page_size=PAGE_SIZE)
    backend = backend_class(case.config, case.table, case.pool)
    eager = case.run(backend)
    backend.init_cuda_graph_state(len(DECODE) + 7)
    batch, tokens = replace(case.batch, attn_backend=backend), case.tokens()

    def step():
        backend.record_step_tables(batch)
        return case.layer(tokens, case.up, batch)

    backend.init_forward_metadata_capture_cuda_graph(batch)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        step()
        graph.capture_begin()
        out = step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.inference_mode():
        out.fill_(torch.nan)
    graph.replay()
    assert relative_error(out.view_as(eager), eager) < TOLERANCE
