"""How GEMMs are chosen and what is kept of it, with clocks and timings made up."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from triton.runtime.errors import OutOfResources

from workers.layers.gemm import choice as gemm_choice
from workers.layers.gemm import measure as gemm_measure
from workers.layers.gemm.build import TRITON_GATED_GEMMS, TRITON_GEMMS, GemmBuilder
from workers.layers.gemm.candidates import candidates, lt_splits
from workers.layers.gemm.choice import GemmChooser
from workers.layers.gemm.configs import (
    MAX_SAMPLED_TOKENS,
    TOKEN_BUCKETS,
    GemmConfig,
    GemmShape,
    LtConfig,
)
from workers.layers.gemm.cublaslt import CublasLtUnavailableError
from workers.layers.gemm.device_limits import HOPPER, DeviceLimits
from workers.layers.gemm.matrix import PartialGemm
from workers.layers.gemm.measure import Contest, Measured, Trial, measure
from workers.layers.gemm.table import Tables, dump_choices, read_choices

SKINNY = GemmConfig("skinny", 64, 128, 2, 4, 4)
GEMV = GemmConfig("gemv", 2, 1024, 2, 1, 4)
LT = LtConfig(130100, 2, "0a" * 64)
SHAPE = GemmShape(4096, 4096, "split")
WEIGHT = torch.zeros(4096, 4096, dtype=torch.bfloat16)
CONTEST = Contest(SHAPE, [WEIGHT], {})
MODEL_SHAPES = [
    SHAPE,
    GemmShape(28672, 4096, "gated"),
    GemmShape(4096, 14336, "split"),
    GemmShape(8192, 2048, "whole"),
    GemmShape(128256, 4096, "whole"),
]


class FakeLibrary:
    version = 130100


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(GemmBuilder, "library", FakeLibrary())


@pytest.fixture
def asked(monkeypatch):
    """Buckets that were measured, in calls; the choice is SKINNY for all of them."""
    calls = []

    def fake(contest, buckets, builder, max_seconds):
        calls.append((list(buckets), max_seconds))
        return {bucket: Measured(SKINNY, 1.0, 2.0) for bucket in buckets}

    monkeypatch.setattr(gemm_choice, "measure", fake)
    return calls


def chooser_in(folder, shipped=None, cached=None) -> GemmChooser:
    if cached is not None:
        (folder / "cached.json").write_text(dump_choices(cached))
    return GemmChooser(Tables(shipped or {}, {}), folder / "cached.json", HOPPER)


def test_what_is_shipped_is_not_measured(tmp_path, library, asked) -> None:
    shipped = {str(SHAPE): dict.fromkeys(TOKEN_BUCKETS) | {256: LT}}
    choices = chooser_in(tmp_path, shipped).choose(SHAPE, [WEIGHT])
    assert choices[256] == LT
    assert asked == []


def test_missing_buckets_are_measured_and_kept(tmp_path, asked) -> None:
    shipped = {str(SHAPE): dict.fromkeys(TOKEN_BUCKETS[:5])}
    chooser_in(tmp_path, shipped).choose(SHAPE, [WEIGHT])
    assert [buckets for buckets, _ in asked] == [list(TOKEN_BUCKETS[5:])]
    kept = read_choices(tmp_path / "cached.json")
    assert kept == {str(SHAPE): dict.fromkeys(TOKEN_BUCKETS[5:], SKINNY)}
    assert chooser_in(tmp_path, shipped).choose(SHAPE, [WEIGHT]) == dict.fromkeys(
        TOKEN_BUCKETS, SKINNY
    ) | dict.fromkeys(TOKEN_BUCKETS[:5])


@pytest.mark.parametrize("file", ["shipped", "cached"])
def test_algorithms_of_another_cublaslt_are_measured_anew(
    tmp_path, library, asked, file, caplog
) -> None:
    caplog.set_level("INFO")
    other = LtConfig(120000, 1, "00" * 64)
    choices = {str(SHAPE): dict.fromkeys(TOKEN_BUCKETS, LT) | {512: other}}
    chosen = chooser_in(tmp_path, **{file: choices}).choose(SHAPE, [WEIGHT])
    assert [buckets for buckets, _ in asked] == [[512]]
    assert (chosen[512], chosen[256]) == (SKINNY, LT)
    assert "another cuBLASLt" in caplog.text
    assert read_choices(tmp_path / "cached.json")[str(SHAPE)][512] == SKINNY


def test_shapes_of_a_model_share_the_time_for_measuring(tmp_path, monkeypatch, asked) -> None:
    times = iter([100.0, 107.0, 200.0, 214.0])
    monkeypatch.setattr(gemm_choice.time, "monotonic", lambda: next(times))
    chooser = chooser_in(tmp_path)
    chooser.choose(SHAPE, [WEIGHT])
    chooser.choose(GemmShape(8192, 2048, "whole"), [WEIGHT])
    first, second = [seconds for _, seconds in asked]
    assert first == gemm_choice.MAX_MEASURING_SECONDS
    assert second == first - 7.0


def test_weights_of_32_bits_stay_with_cublas(tmp_path, asked) -> None:
    assert chooser_in(tmp_path).choose(SHAPE, [WEIGHT.float()]) == {}
    assert asked == []


@pytest.fixture
def clock(monkeypatch):
    """A start that has no time to measure."""
    monkeypatch.setattr(gemm_choice, "MAX_MEASURING_SECONDS", 0.0)


def guessing(folder, guess, limits=HOPPER) -> GemmChooser:
    tables = Tables({}, {str(SHAPE): guess})
    return GemmChooser(tables, folder / "cached.json", limits)


def test_a_like_gpu_is_followed_where_there_was_no_time(tmp_path, library, clock) -> None:
    guess = {1: GEMV, 16: SKINNY, 256: LT}
    assert guessing(tmp_path, guess).choose(SHAPE, [WEIGHT]) == guess
    assert not (tmp_path / "cached.json").exists()


def test_a_guess_that_does_not_fit_the_gpu_is_left_to_cublas(tmp_path, library, clock) -> None:
    large = GemmConfig("skinny", 64, 128, 1, 6, 4)
    tiled = GemmConfig("tiled", 64, 64, 1, 2, 4)
    guess = {1: GEMV, 16: large, 256: tiled}
    assert guessing(tmp_path, guess).choose(SHAPE, [WEIGHT]) == guess
    chooser = guessing(tmp_path, guess, DeviceLimits((8, 9), 96 << 10))
    assert chooser.choose(SHAPE, [WEIGHT]) == {1: GEMV}


def test_without_cublaslt_a_guess_of_its_algorithms_is_left_to_cublas(
    tmp_path, monkeypatch, clock, caplog
) -> None:
    def missing(builder):
        raise CublasLtUnavailableError("no libcublasLt")

    monkeypatch.setattr(GemmBuilder, "library", property(missing))
    assert guessing(tmp_path, {16: SKINNY, 256: LT}).choose(SHAPE, [WEIGHT]) == {16: SKINNY}
    assert "no libcublasLt" in caplog.text


def test_what_a_start_left_is_measured_while_idle_and_kept(
    tmp_path, library, clock, monkeypatch
) -> None:
    trial_times(monkeypatch, {LT: 3.0})
    chooser = guessing(tmp_path, dict.fromkeys(TOKEN_BUCKETS, SKINNY))
    assert set(chooser.choose(SHAPE, [WEIGHT]).values()) == {SKINNY}
    num_turns = 0
    while chooser.measure_next():
        num_turns += 1
    assert num_turns > 3 * len(TOKEN_BUCKETS)
    assert read_choices(tmp_path / "cached.json") == {str(SHAPE): dict.fromkeys(TOKEN_BUCKETS, LT)}
    again = guessing(tmp_path, {})
    assert set(again.choose(SHAPE, [WEIGHT]).values()) == {LT}
    assert not again.measure_next()


def test_idle_measuring_ends_where_there_is_no_memory(
    tmp_path, library, clock, monkeypatch, caplog
) -> None:
    def full(trial, config, effort):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trial_times(monkeypatch, {})
    monkeypatch.setattr(Trial, "seconds", full)
    chooser = guessing(tmp_path, {1: GEMV})
    chooser.choose(SHAPE, [WEIGHT])
    assert chooser.measure_next()
    assert not chooser.measure_next()
    assert not chooser.measure_next()
    assert "no memory to measure" in caplog.text


def test_only_what_is_like_a_guess_is_timed() -> None:
    builder = GemmBuilder(WEIGHT.device, HOPPER)
    guess = {1: GEMV, 16: SKINNY, 32: SKINNY, 64: None}
    contest = Contest(SHAPE, [WEIGHT], guess)
    timed = contest.trial(32, builder).triton_configs()
    assert timed[0] == SKINNY
    assert {(config.kind, config.num_splits) for config in timed} == {
        ("skinny", splits) for splits in (1, 2, 4)
    }
    assert 1 < len(timed) < len(candidates(SHAPE, 32, HOPPER))
    assert contest.trial(128, builder).triton_configs() == candidates(SHAPE, 128, HOPPER)


def trial_times(monkeypatch, times):
    """Seconds by config: everything else takes 10, cuBLAS 5, a candidate in times its own."""
    monkeypatch.setattr(Trial, "_lt_configs", lambda trial: [LT])

    def seconds(trial, config, effort) -> float:
        return times.get(config, 5.0 if config is None else 10.0)

    monkeypatch.setattr(Trial, "seconds", seconds)


def measured_at_256(monkeypatch, times) -> Measured:
    trial_times(monkeypatch, times)
    return measure(CONTEST, [256], GemmBuilder(WEIGHT.device, HOPPER), 60.0)[256]


def test_a_kernel_that_asks_for_too_much_is_passed_over(monkeypatch) -> None:
    second = candidates(SHAPE, 256, HOPPER)[1]
    trial_times(monkeypatch, {})

    def seconds(trial, config, effort) -> float:
        if config == second:
            raise OutOfResources(163840, 101376, "shared memory")
        return {LT: 3.0}.get(config, 5.0)

    monkeypatch.setattr(Trial, "seconds", seconds)
    builder = GemmBuilder(WEIGHT.device, HOPPER)
    assert measure(CONTEST, [256], builder, 60.0)[256] == Measured(LT, 3.0, 5.0)


def test_the_fastest_is_taken(monkeypatch) -> None:
    second = candidates(SHAPE, 256, HOPPER)[1]
    assert measured_at_256(monkeypatch, {second: 4.0, LT: 3.0}) == Measured(LT, 3.0, 5.0)
    assert measured_at_256(monkeypatch, {second: 2.0, LT: 3.0}) == Measured(second, 2.0, 5.0)


def test_cublas_stays_where_nothing_is_clearly_faster(monkeypatch) -> None:
    assert measured_at_256(monkeypatch, {LT: 4.99}) == Measured(None, 5.0, 5.0)


def test_measuring_ends_when_its_time_is_over(monkeypatch, caplog) -> None:
    trial_times(monkeypatch, {})
    clock = iter(range(0, 100_000, 7))
    monkeypatch.setattr(gemm_measure.time, "monotonic", lambda: next(clock))
    measured = measure(CONTEST, TOKEN_BUCKETS, GemmBuilder(WEIGHT.device, HOPPER), 60.0)
    assert 0 < len(measured) < len(TOKEN_BUCKETS)
    assert 256 in measured
    assert "no time to measure" in caplog.text


@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_candidates_fit_and_are_few_enough_to_time(shape) -> None:
    for num_tokens in TOKEN_BUCKETS:
        configs = candidates(shape, num_tokens, HOPPER)
        assert len(configs) == len(set(configs)) <= 80
        for config in configs:
            assert config.fits(num_tokens, shape.in_features, HOPPER)
            assert config.kind in {**TRITON_GEMMS, **TRITON_GATED_GEMMS}
            assert shape.role != "whole" or config.num_splits == 1
        if shape.role == "whole":
            assert lt_splits(shape, num_tokens) in ([], [1])


def test_a_vocabulary_is_measured_for_sampled_rows_only() -> None:
    assert max(MODEL_SHAPES[-1].buckets) == MAX_SAMPLED_TOKENS
    assert SHAPE.buckets == TOKEN_BUCKETS


def test_each_number_of_tokens_has_the_gemm_of_its_bucket() -> None:
    names = {1: "one", 16: "some", 256: "many"}
    gemms = {n: lambda x, weight, new, name=name: (name, weight) for n, name in names.items()}
    gemm = PartialGemm(WEIGHT, gemms)
    for num_tokens, name in ((1, "one"), (2, "some"), (16, "some"), (17, "many"), (256, "many")):
        assert gemm(torch.zeros(num_tokens, 8)) == (name, WEIGHT)
