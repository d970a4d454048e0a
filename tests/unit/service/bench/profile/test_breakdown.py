"""From kernels to a step's parts: names, overlaps, gaps."""

import pytest

from service.bench.profile.breakdown import KernelEvent, advances, device_breakdown
from service.bench.profile.kernel_groups import Group, group_of_kernel


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90", "attn"),
        ("flash::prepare_varlen_num_blocks_kernel(int, int)", "attn"),
        ("_attend_chunk", "attn"),
        ("_attend_projected", "attn"),
        ("_plan_chunks", "attn"),
        ("fmha_v2_flash_attention_bf16", "attn"),
        ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", "gemm"),
        ("void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16", "gemm"),
        ("void gemv2T_kernel_val<int, int, __nv_bfloat16", "gemm"),
        ("void cublasLt::splitKreduce_kernel<32, 16", "gemm"),
        ("_skinny", "gemm"),
        ("_gemv", "gemm"),
        ("_gated", "gemm"),
        ("_gated_tiled", "gemm"),
        ("_tiled", "gemm"),
        ("_rope_kv", "other"),
        ("_add_norm", "other"),
        ("_gate_and_mul", "other"),
        ("_fill_step_tables", "other"),
        ("Memcpy HtoD (Pinned -> Device)", "other"),
        ("void at::native::vectorized_elementwise_kernel<4", "other"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, group: str) -> None:
    expected = {"attn": Group.ATTENTION, "gemm": Group.GEMM, "other": Group.OTHER}[group]
    assert group_of_kernel(name) is expected


def test_an_overlap_counts_once_and_a_gap_is_idle() -> None:
    events = [
        KernelEvent("_gemv", 100.0, 50.0),
        KernelEvent("_add_norm", 130.0, 40.0),
        KernelEvent("_attend_chunk", 180.0, 20.0),
    ]
    parts = [(advance.busy_us, advance.idle_us) for advance in advances(events)]
    assert parts == [(50.0, 0.0), (20.0, 0.0), (20.0, 10.0)]


def test_a_kernel_inside_another_one_costs_nothing() -> None:
    events = [KernelEvent("_gemv", 0.0, 100.0), KernelEvent("_add_norm", 10.0, 20.0)]
    breakdown = device_breakdown(events, 1)
    assert breakdown.step_s == pytest.approx(100e-6)


def test_a_breakdown_is_of_the_mean_step() -> None:
    events = [
        KernelEvent(name, start, 10.0)
        for name, start in (("_gemv", 0.0), ("flash", 10.0), ("_gemv", 30.0), ("flash", 40.0))
    ]
    breakdown = device_breakdown(events, 2)
    assert breakdown.seconds == pytest.approx(
        {Group.ATTENTION: 10e-6, Group.GEMM: 10e-6, Group.OTHER: 0.0, Group.IDLE: 5e-6}
    )
    assert dict(breakdown.largest) == pytest.approx({"_gemv": 10e-6, "flash": 10e-6})


def test_no_events_take_no_time() -> None:
    assert device_breakdown([], 4).step_s == 0.0
