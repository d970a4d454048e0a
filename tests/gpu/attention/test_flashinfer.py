"""The flashinfer backends on the device against float64: few shapes, as each compiles for minutes.

`python3 -m tests.gpu.attention.flash_infer_kernels` compiles them beforehand.
"""

import inspect
from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.backends.flash_infer import FlashInferBackend
from attention.backends.flash_infer_fp8 import Fp8FlashInferBackend
from attention.backends.flash_infer_latent import FlashInferLatentBackend
from attention.features import Feature
from attention.kernels.flash_infer import load_flash_infer
from attention.kernels.page_lists import PageLists
from attention.kernels.providers import load_page_lists
from tests.fakes import flash_infer as described
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    DECODE,
    EXTEND,
    FP8_TOLERANCE,
    FRESH,
    MIXED,
    capture,
    device_case,
    device_spec,
    e4m3_twin,
    error_of,
    oracle,
)
from tests.gpu.attention.flash_infer_kernels import HEADS, LAYERS, PLAIN, modules
from tests.gpu.engines import BUILTIN, GREEDY, NEAR_TIE, gaps_to_likeliest, generate, prompts_of
from tests.gpu.needs import NEEDS_GPU, needs_backend
from tests.gpu.no_waiting import no_waiting
from tests.proofs.cells import proves
from tests.unit.attention.account_cases import with_account
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, build_latent_case
from tests.unit.attention.visibility_cases import KINDS, build_visible
from workers.config import EngineConfig

pytestmark = [*NEEDS_GPU, needs_backend("flashinfer")]

LATENT_TOLERANCE = 1.5e-2
POISON = 1e4
DRAFTS = rows_of((40, 8), (5, 5), (300, 1), (1000, 16), (64, 3))
STEPS = {"decode": DECODE, "extend": EXTEND, "mixed": MIXED, "drafts": DRAFTS, "fresh": FRESH}


@pytest.fixture(scope="module", autouse=True)
def _compiled_kernels():
    missing = [module.name for module in modules() if not module.is_compiled]
    if missing:
        pytest.skip(
            f"{len(missing)} of FlashInfer's kernels are not compiled: "
            "python3 -m tests.gpu.attention.flash_infer_kernels"
        )


@proves("flashinfer")
@pytest.mark.parametrize("page_size", [1, 64, 256])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_kind_of_layer_in_every_step(rows, layer, page_size):
    spec = device_spec(rows, layer=layer, page_size=page_size, layout_seed=page_size)
    assert error_of(device_case(spec), FlashInferBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
@pytest.mark.parametrize("heads", ["cuda_cores", "small", "gemma"])
def test_other_heads(heads, rows):
    layer = LAYERS["together"] if heads == "gemma" else PLAIN
    case = device_case(device_spec(rows, layer=layer, page_size=16, **HEADS[heads]))
    assert error_of(case, FlashInferBackend) < BF16_TOLERANCE


@pytest.mark.parametrize("heads", ["llama", "cuda_cores"])
def test_long_rows_are_split_over_the_device(heads):
    for rows in (rows_of((8000, 1), (5, 1), (4095, 1)), rows_of((6000, 700), (20000, 8), (1, 1))):
        case = device_case(device_spec(rows, page_size=64, **HEADS[heads]))
        assert error_of(case, FlashInferBackend) < BF16_TOLERANCE


@proves("flashinfer", Feature.VERIFY)
@pytest.mark.parametrize("layer", [PLAIN, LAYERS["together"]], ids=["plain", "together"])
def test_keys_of_rows_with_drafts_are_cut_into_parts(layer):
    """On an H200 1, 8, 3 and 1 parts of 128 keys; with the window 1, 2, 2 and 1."""
    case = device_case(device_spec(rows_of((40, 8), (900, 8), (300, 8), (0, 8)), layer=layer))
    assert error_of(case, FlashInferBackend) < BF16_TOLERANCE


@proves("flashinfer")
@pytest.mark.parametrize("layer", [PLAIN, LAYERS["together"]], ids=["plain", "together"])
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_every_kind_of_visibility(make, layer):
    for rows in (DRAFTS, EXTEND, rows_of((40, 300), (0, 700), (300, 1))):
        case = build_visible(device_spec(rows, layer=layer), make)
        for buffer in case.token_to_kv_pool.get_kv_buffer(0):
            buffer.nan_to_num_(nan=POISON)
        assert error_of(case, FlashInferBackend) < BF16_TOLERANCE


@proves("flashinfer", Feature.BOUNDED_ACCOUNTS)
@pytest.mark.parametrize("layer", [LAYERS["together"], LAYERS["one_key"]])
def test_tokens_that_were_given_back_are_in_no_output(layer):
    for rows in STEPS.values():
        case = device_case(device_spec(rows, layer=layer, page_size=16))
        own = with_account(case)
        for buffer in own.token_to_kv_pool.get_kv_buffer(0):
            buffer.nan_to_num_(nan=POISON)
        assert relative_error(own.run(FlashInferBackend), oracle(case)) < BF16_TOLERANCE


@proves("flashinfer", Feature.GRAPHS, Feature.DECODE)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize(
    ("layer", "heads"),
    [(PLAIN, "llama"), (LAYERS["together"], "llama"), (PLAIN, "cuda_cores")],
    ids=["plain", "together", "cuda_cores"],
)
def test_replays_follow_shuffled_pages(layer, heads, page_size):
    changes = {"layer": layer, "page_size": page_size, **HEADS[heads]}
    cases = [device_case(device_spec(DECODE, layout_seed=seed, **changes)) for seed in range(2)]
    step = capture(cases[0], FlashInferBackend, graph_bs=12)
    for case in (*cases, cases[0]):
        assert relative_error(step.replay(case), oracle(case)) < BF16_TOLERANCE


@pytest.mark.parametrize("heads", ["llama", "cuda_cores"])
def test_replays_follow_lengths_that_grow_and_shrink(heads):
    rows = rows_of(*[(4000, 1)] * 4)
    step = capture(device_case(device_spec(rows, **HEADS[heads])), FlashInferBackend, graph_bs=8)
    for lengths in ((4000, 4000, 4000, 4000), (0, 3, 4000, 1), (700, 1, 64, 129)):
        case = step.case
        seq_lens = torch.tensor(lengths, dtype=torch.int32) + 1
        case.batch.seq_lens.copy_(seq_lens)
        case.batch.seq_lens_cpu[:] = seq_lens.numpy()
        expected = oracle(case)
        assert relative_error(step.replay(case), expected) < BF16_TOLERANCE


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_nothing_waits_for_the_device(rows):
    case = device_case(device_spec(rows))
    backend = FlashInferBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    with torch.inference_mode(), no_waiting():
        backend.init_forward_metadata(case.batch)
        out = backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert relative_error(out, oracle(case)) < BF16_TOLERANCE


def test_planning_a_replay_does_not_wait_for_the_device():
    step = capture(device_case(device_spec(DECODE)), FlashInferBackend, graph_bs=12)
    lengths = np.zeros(12, dtype=np.int32)
    lengths[: len(DECODE)] = step.case.batch.seq_lens_cpu
    with no_waiting():
        for _ in range(2):
            step.backend.before_replay(12, lengths)


@pytest.mark.parametrize(("page_size", "window"), [(1, 0), (16, 0), (16, 100)])
def test_page_lists_are_made_as_described(page_size, window):
    case = device_case(device_spec(MIXED, page_size=page_size))
    batch, longest = case.batch, int(case.batch.seq_lens_cpu.max())
    num_pages = int((-(-batch.seq_lens_cpu // page_size)).sum())
    filled = []
    for fill, device in ((load_page_lists(), "cuda"), (described.fill_page_lists, "cpu")):
        lists = PageLists.allocate(batch.batch_size, num_pages, torch.device(device))
        tensors = (
            case.req_to_token_pool.req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            batch.extend_seq_lens,
        )
        on_device = [tensor.to(device) for tensor in tensors]
        fill(*on_device, lists, page_size, longest, window)
        filled.append((lists.indptr.cpu(), lists.last_page_lens.cpu(), lists.indices.cpu()))
    assert all(torch.equal(*pair) for pair in zip(*filled, strict=True))


@pytest.mark.parametrize(
    ("real", "fake"),
    [("decode", "FakeDecode"), ("prefill", "FakePrefill"), ("latent", "FakeLatent")],
)
def test_wrappers_take_what_their_stand_ins_take(real, fake):
    """Names, and the places of those that are given by place."""
    package, stand_in = getattr(load_flash_infer(), real), getattr(described, fake)
    for method in ("__init__", "plan", "run"):
        theirs = list(inspect.signature(getattr(package, method)).parameters)
        ours = inspect.signature(getattr(stand_in, method)).parameters.values()
        by_place = [one.name for one in ours if one.kind is one.POSITIONAL_OR_KEYWORD]
        assert theirs[: len(by_place)] == by_place
        named = {one.name for one in ours if one.kind is one.KEYWORD_ONLY} - {"compiled"}
        assert named <= set(theirs)


WINDOWED = [LAYERS["together"], LAYERS["one_key"]]
"""Of one module: what has neither a window nor a cap would take another one."""


@proves("flashinfer_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("page_size", [1, 64, 256])
@pytest.mark.parametrize("layer", WINDOWED, ids=["together", "one_key"])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_fp8_cache_agrees_with_exact_values(rows, layer, page_size):
    case = device_case(device_spec(rows, layer=layer, page_size=page_size))
    error = relative_error(e4m3_twin(case).run(Fp8FlashInferBackend), oracle(case))
    assert error < FP8_TOLERANCE


@proves("flashinfer_fp8", Feature.FP8_KV)
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS.keys())
def test_fp8_cache_with_every_kind_of_visibility(make):
    case = device_case(device_spec(DRAFTS, layer=LAYERS["together"]))
    case = replace(case, batch=build_visible(case.spec, make).batch)
    error = relative_error(e4m3_twin(case).run(Fp8FlashInferBackend), oracle(case))
    assert error < FP8_TOLERANCE


@proves("flashinfer_fp8", Feature.FP8_KV, Feature.GRAPHS, Feature.DECODE)
def test_fp8_replays_follow_shuffled_pages():
    spec = device_spec(DECODE, layer=LAYERS["together"])
    exact = [device_case(replace(spec, layout_seed=seed)) for seed in range(2)]
    twins = [e4m3_twin(case) for case in exact]
    step = capture(twins[0], Fp8FlashInferBackend, graph_bs=12)
    for case, twin in zip(exact, twins, strict=True):
        assert relative_error(step.replay(twin), oracle(case)) < FP8_TOLERANCE


def latent_case(rows, dims=DEEPSEEK, **changes):
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    spec = CaseSpec(rows, device=torch.device("cuda"), **half, **changes)
    case = build_latent_case(spec, dims)
    case.pool.get_latent(0).nan_to_num_(nan=POISON)
    return case


@proves("flashinfer", Feature.MLA)
@pytest.mark.parametrize("page_size", [1, 64])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_latents_in_every_step(rows, page_size):
    case = latent_case(rows, page_size=page_size)
    backend = FlashInferLatentBackend(case.config, case.table, case.pool)
    assert relative_error(case.run(backend), case.run_oracle()) < LATENT_TOLERANCE


@proves("flashinfer", Feature.MLA, Feature.DECODE, Feature.GRAPHS)
@pytest.mark.parametrize("num_heads", [16, 128])
def test_replays_over_latents_are_planned_anew(num_heads):
    case = latent_case(DECODE, replace(DEEPSEEK, num_heads=num_heads), page_size=64)
    backend = FlashInferLatentBackend(case.config, case.table, case.pool)
    num_rows = len(DECODE)
    backend.init_cuda_graph_state(num_rows + 7)
    batch, tokens = replace(case.batch, attn_backend=backend), case.tokens()
    ones = np.ones(num_rows, dtype=np.int32)
    backend.init_forward_metadata_capture_cuda_graph(replace(batch, seq_lens_cpu=ones))

    def step():
        backend.record_step_tables(batch)
        return case.layer(tokens, case.up, batch)

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
    backend.before_replay(num_rows, case.batch.seq_lens_cpu)
    graph.replay()
    out = out.view(-1, num_heads, DEEPSEEK.v_head_dim)
    assert relative_error(out, case.run_oracle()) < LATENT_TOLERANCE


def test_padding_rows_of_a_graph_attend_to_the_dummy_page():
    case = device_case(device_spec(DECODE))
    step = capture(case, FlashInferBackend, graph_bs=12)
    step.replay(case)
    assert step.out[len(DECODE) :].isfinite().all()


def test_an_engine_chooses_likeliest_tokens_in_graphs_and_without():
    prompts = prompts_of(5, 4000)
    config = EngineConfig(**BUILTIN, attention_backend="flashinfer")
    gaps = gaps_to_likeliest(prompts, generate(config, prompts, GREEDY, rounds=3))
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95


def test_idle_batch_gives_an_empty_result():
    assert build_case(device_spec(())).run(FlashInferBackend).shape == (0, 8, 128)
