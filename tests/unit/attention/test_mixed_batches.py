"""Mixed steps of the fa3 backends: which rows are attended by which call, and that it is all one
result."""

from dataclasses import replace

import pytest
import torch

from attention.backends import flash_attention
from attention.backends.flash_attention import (
    DeterministicFlashAttentionBackend,
    FlashAttentionBackend,
)
from attention.backends.flash_attention_fp8 import Fp8FlashAttentionBackend
from attention.backends.flash_attention_metadata import StepFacts, metadata_of
from attention.backends.mixed_batches import (
    MAX_PROMPT_TOKENS_PER_DECODE_ROW,
    MIN_DECODE_ROWS,
    cut_mixed_step,
    num_leading_decode_rows,
)
from attention.kernels.step_tables import StepTables
from attention.memory import cuda_kv_pool
from attention.memory.cuda_kv_pool import Fp8MHATokenToKVPool
from tests.fakes.flash_attention import fake_flash_attention_3, fake_triton_kernels
from tests.unit.attention.cases import (
    AttentionCase,
    CaseSpec,
    RowSpec,
    build_case,
    relative_error,
    rows_of,
)
from tests.unit.attention.test_flash_attention import (
    BF16_TOLERANCE,
    FP8_TOLERANCE,
    LAYERS,
)

PROMPTS = [(0, 40), (16, 9), (5, 1), (0, 1)]


def decode_rows(num_rows: int) -> list[tuple[int, int]]:
    return [(1 + 7 * row % 50, 1) for row in range(num_rows)]


MIXED = rows_of(*decode_rows(MIN_DECODE_ROWS), *PROMPTS)


@pytest.fixture
def calls(monkeypatch) -> list[tuple[int, int, bool]]:
    """(rows, most queries of a row, has a plan of the splits) of each kernel call."""
    seen: list[tuple[int, int, bool]] = []
    kernels = fake_flash_attention_3()

    def attend(*tensors, **arguments):
        rows, has_plan = (
            len(arguments["cache_seqlens"]),
            arguments["scheduler_metadata"] is not None,
        )
        seen.append((rows, arguments["max_seqlen_q"], has_plan))
        return kernels.attend(*tensors, **arguments)

    fakes = replace(kernels, attend=attend)
    monkeypatch.setattr(flash_attention, "load_flash_attention_3", lambda: fakes)
    monkeypatch.setattr(flash_attention, "load_triton_kernels", fake_triton_kernels)
    monkeypatch.setattr(cuda_kv_pool, "load_triton_kernels", fake_triton_kernels)
    return seen


def case_of(rows: tuple[RowSpec, ...], **changes) -> AttentionCase:
    return build_case(CaseSpec(rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, **changes))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
@pytest.mark.parametrize("page_size", [1, 16, 128])
def test_decode_rows_have_a_call_of_their_own_and_everything_agrees(calls, page_size, layer):
    case = case_of(MIXED, page_size=page_size, layer=layer)
    assert relative_error(case.run(FlashAttentionBackend), case.run_oracle()) < BF16_TOLERANCE
    assert calls == [(MIN_DECODE_ROWS, 1, True), (len(PROMPTS), 40, False)]


@pytest.mark.parametrize(
    "rows",
    [
        rows_of(*decode_rows(MIN_DECODE_ROWS - 1), *PROMPTS),
        rows_of((0, 1), *decode_rows(MIN_DECODE_ROWS), (0, 3)),
        rows_of((7, 2), *decode_rows(MIN_DECODE_ROWS)),
        rows_of(
            *decode_rows(MIN_DECODE_ROWS),
            (0, MAX_PROMPT_TOKENS_PER_DECODE_ROW * MIN_DECODE_ROWS + 1),
        ),
    ],
    ids=["too few", "a new row first", "a prompt first", "long prompts"],
)
def test_other_steps_are_one_call(calls, rows):
    case = case_of(rows)
    assert relative_error(case.run(FlashAttentionBackend), case.run_oracle()) < BF16_TOLERANCE
    assert [num_rows for num_rows, _, _ in calls] == [len(rows)]


def test_a_package_that_fills_no_given_tensor_attends_all_rows_at_once(calls, monkeypatch):
    kernels = replace(flash_attention.load_flash_attention_3(), takes_out=False)
    monkeypatch.setattr(flash_attention, "load_flash_attention_3", lambda: kernels)
    case = case_of(MIXED)
    assert relative_error(case.run(FlashAttentionBackend), case.run_oracle()) < BF16_TOLERANCE
    assert [num_rows for num_rows, _, _ in calls] == [len(MIXED)]


def test_an_e4m3_cache_is_read_with_its_scales_in_both_parts(calls):
    case = case_of(MIXED, head_dim=32, v_head_dim=32)
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=0.0)
    config = replace(case.config, kv_dtype=torch.float8_e4m3fn)
    pool = Fp8MHATokenToKVPool(config, case.token_to_kv_pool.num_pages)
    pool.set_scales(0, 0.02, 0.03)
    everywhere = torch.arange(pool.num_pages * pool.page_size)
    k, v = (buffer.flatten(0, 1) for buffer in case.token_to_kv_pool.get_kv_buffer(0))
    pool.set_kv_buffer(0, everywhere, k, v)
    twin = replace(case, config=config, token_to_kv_pool=pool)
    assert relative_error(twin.run(Fp8FlashAttentionBackend), case.run_oracle()) < FP8_TOLERANCE
    assert len(calls) == 2


def test_where_bits_must_not_depend_on_the_company_every_step_is_the_same_call(calls):
    """The package chooses kernels by how many queries a row has at most."""
    for rows in (MIXED, rows_of((30, 1), (0, 12)), rows_of((30, 1)), rows_of((0, 40))):
        case_of(rows).run(DeterministicFlashAttentionBackend)
    assert calls == [(len(MIXED), 256, False), (2, 256, False), (1, 256, False), (1, 256, False)]


def test_every_step_is_cut_anew(calls):
    """The same backend: a mixed step, then one of prompts only, then the mixed one again."""
    mixed, prompts = case_of(MIXED), rows_of((0, 5), (0, 7))
    only_prompts = case_of(prompts)
    backend = FlashAttentionBackend(mixed.config, mixed.req_to_token_pool, mixed.token_to_kv_pool)
    for case in (mixed, only_prompts, mixed):
        backend.init_forward_metadata(case.batch)
        backend.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert [num_rows for num_rows, _, _ in calls] == [MIN_DECODE_ROWS, 4, 2, MIN_DECODE_ROWS, 4]


def test_leading_decode_rows_end_at_the_first_row_that_is_none():
    def count(*lengths: tuple[int, int]) -> int:
        return num_leading_decode_rows(case_of(rows_of(*lengths)).batch)

    assert count() == 0
    assert count((4, 1), (9, 1)) == 2
    assert count((4, 1), (9, 1), (0, 6), (4, 1)) == 2
    assert count((4, 1), (0, 1), (4, 1)) == 1
    assert count((0, 3), (4, 1)) == 0


def test_parts_are_views_of_the_step_s_tables():
    tables = StepTables.allocate(5, 3, torch.device("cpu"))
    tables.cu_seqlens_q.copy_(torch.tensor([0, 1, 2, 3, 9, 12]))
    whole = metadata_of(tables, StepFacts(5, 6, 40), -1)
    parts = cut_mixed_step(whole, 3)
    assert (parts.num_decode_rows, parts.decode.max_seq_len_q) == (3, 1)
    assert parts.decode.cu_seqlens_q.tolist() == [0, 1, 2, 3]
    assert parts.prefill.cu_seqlens_q.tolist() == [3, 9, 12]
    assert parts.prefill.max_seq_len_q == 6
    tables.cache_seqlens[3] = 7
    tables.page_table[2, 1] = 5
    assert parts.prefill.cache_seqlens_int32.tolist() == [7, 0]
    assert parts.decode.page_table[2].tolist() == [0, 5, 0]
