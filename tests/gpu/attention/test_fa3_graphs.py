"""FlashAttention-3 in CUDA graphs: replays read this step's lengths and pages, never older ones."""

import pytest
import torch

from attention.backends.flash_attention import (
    DeterministicFlashAttentionBackend,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_triton import TritonDecodeFlashAttentionBackend
from attention.features import Feature
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    FP8_TOLERANCE,
    LAYERS_AND_PAGES,
    capture,
    device_case,
    device_spec,
    error_of,
    fp8_twin,
    oracle,
)
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.gpu.no_waiting import no_waiting
from tests.proofs.cells import proves
from tests.unit.attention.cases import relative_error, rows_of

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

EXACT_BACKENDS = [FlashAttentionBackend, TritonDecodeFlashAttentionBackend]
BACKENDS = [*EXACT_BACKENDS, DeterministicFlashAttentionBackend]


@proves(Feature.GRAPHS, Feature.DECODE)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("layer", "page_size"), LAYERS_AND_PAGES)
def test_replays_follow_shuffled_pages(layer, page_size, backend):
    cases = [
        device_case(device_spec(DECODE, layer=layer, page_size=page_size, layout_seed=seed))
        for seed in range(3)
    ]
    step = capture(cases[0], backend, graph_bs=12)
    for case in cases:
        expected, eager = oracle(case), case.run(backend)
        out = step.replay(case)
        assert relative_error(out, expected) < BF16_TOLERANCE
        assert relative_error(out, eager) < BF16_TOLERANCE


@proves(Feature.GRAPHS, Feature.DECODE)
@pytest.mark.parametrize("backend", EXACT_BACKENDS)
def test_replays_follow_lengths_that_grow_and_shrink(backend):
    same_memory = device_spec(rows_of(*[(4000, 1)] * 4), q_heads=32, kv_heads=8)
    step = capture(device_case(same_memory), backend, graph_bs=4)
    for lengths in ((4000, 4000, 4000, 4000), (0, 3, 4000, 1), (700, 1, 64, 129)):
        case = step.case
        seq_lens = torch.tensor(lengths, dtype=torch.int32) + 1
        batch = case.batch
        batch.seq_lens.copy_(seq_lens)
        batch.seq_lens_cpu[:] = seq_lens.numpy()
        expected = oracle(case)
        assert relative_error(step.replay(case), expected) < BF16_TOLERANCE


@proves("fa3_fp8", Feature.GRAPHS, Feature.DECODE, Feature.FP8_KV)
@pytest.mark.parametrize("page_size", [1, 64, 128])
def test_fp8_replays_follow_shuffled_pages(page_size):
    exact = [
        device_case(device_spec(DECODE, page_size=page_size, layout_seed=seed)) for seed in range(2)
    ]
    twins = [fp8_twin(case, 0.02, 0.03) for case in exact]
    step = capture(twins[0], Fp8FlashAttentionBackend, graph_bs=9)
    for case, twin in zip(exact, twins, strict=True):
        assert relative_error(step.replay(twin), oracle(case)) < FP8_TOLERANCE


@pytest.mark.parametrize("rows", [DECODE, rows_of((3, 40), (100, 1))], ids=["decode", "mixed"])
@pytest.mark.parametrize("backend_class", EXACT_BACKENDS)
def test_nothing_waits_for_the_device(rows, backend_class):
    case = device_case(device_spec(rows))
    backend = backend_class(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    assert error_of(case, backend_class) < BF16_TOLERANCE
    with no_waiting():
        backend.init_forward_metadata(case.batch)
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)


@pytest.mark.parametrize("backend_class", EXACT_BACKENDS)
def test_recording_step_tables_does_not_wait_for_the_device(backend_class):
    case = device_case(device_spec(DECODE))
    backend = backend_class(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_cuda_graph_state(len(DECODE))
    backend.init_forward_metadata_capture_cuda_graph(case.batch)
    backend.record_step_tables(case.batch)
    with no_waiting():
        backend.record_step_tables(case.batch)
