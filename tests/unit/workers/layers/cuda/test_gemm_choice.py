"""How GEMMs are chosen and what is kept of it, with clocks and timings made up."""

import json

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.layers.cuda import gemm_choice, gemm_measure
from workers.layers.cuda.chosen_gemm import TRITON_GEMMS, GemmBuilder
from workers.layers.cuda.gemm import GemmConfig
from workers.layers.cuda.gemm_candidates import (
    MAX_SAMPLED_TOKENS,
    TOKEN_BUCKETS,
    GemmShape,
    candidates,
    lt_splits,
)
from workers.layers.cuda.gemm_choice import (
    SHIPPED_FOLDER,
    GemmChooser,
    dump_choices,
    merged,
    read_choices,
)
from workers.layers.cuda.gemm_measure import Measured, Trial, measure
from workers.layers.cuda.linear import PartialGemm
from workers.layers.cuda.lt_gemm import LtConfig

SKINNY = GemmConfig("skinny", 64, 128, 2, 4, 4)
LT = LtConfig(130100, 2, "0a" * 64)
SHAPE = GemmShape(4096, 4096, "split")
WEIGHT = torch.zeros(4096, 4096, dtype=torch.bfloat16)
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

    def fake(shape, weights, buckets, builder, max_seconds):
        calls.append((list(buckets), max_seconds))
        return {bucket: Measured(SKINNY, 1.0, 2.0) for bucket in buckets}

    monkeypatch.setattr(gemm_choice, "measure", fake)
    return calls


def chooser_in(folder, shipped=None, cached=None) -> GemmChooser:
    for name, choices in (("shipped", shipped), ("cached", cached)):
        if choices is not None:
            (folder / f"{name}.json").write_text(dump_choices(choices))
    return GemmChooser(folder / "shipped.json", folder / "cached.json")


def test_choices_survive_the_file(tmp_path) -> None:
    choices = {"a": {1: SKINNY, 16: LT, 8192: None}, "b": {}}
    (tmp_path / "x.json").write_text(dump_choices(choices))
    assert read_choices(tmp_path / "x.json") == choices


def test_of_two_files_the_second_goes_first_bucket_by_bucket() -> None:
    first, second = {"a": {1: SKINNY, 16: LT}}, {"a": {16: None}, "b": {1: LT}}
    assert merged(first, second) == {"a": {1: SKINNY, 16: None}, "b": {1: LT}}


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
    assert chooser_in(tmp_path).choose(SHAPE, [WEIGHT]) == dict.fromkeys(
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


def trial_times(monkeypatch, times):
    """Seconds by config: everything else takes 10, cuBLAS 5, a candidate in times its own."""
    monkeypatch.setattr(Trial, "_lt_configs", lambda trial: [LT])

    def seconds(trial, config, effort) -> float:
        return times.get(config, 5.0 if config is None else 10.0)

    monkeypatch.setattr(Trial, "seconds", seconds)


def measured_at_256(monkeypatch, times) -> Measured:
    trial_times(monkeypatch, times)
    return measure(SHAPE, [WEIGHT], [256], GemmBuilder(WEIGHT.device), 60.0)[256]


def test_the_fastest_is_taken(monkeypatch) -> None:
    second = candidates(SHAPE, 256)[1]
    assert measured_at_256(monkeypatch, {second: 4.0, LT: 3.0}) == Measured(LT, 3.0, 5.0)
    assert measured_at_256(monkeypatch, {second: 2.0, LT: 3.0}) == Measured(second, 2.0, 5.0)


def test_cublas_stays_where_nothing_is_clearly_faster(monkeypatch) -> None:
    assert measured_at_256(monkeypatch, {LT: 4.99}) == Measured(None, 5.0, 5.0)


def test_measuring_ends_when_its_time_is_over(monkeypatch, caplog) -> None:
    trial_times(monkeypatch, {})
    clock = iter(range(0, 100_000, 7))
    monkeypatch.setattr(gemm_measure.time, "monotonic", lambda: next(clock))
    measured = measure(SHAPE, [WEIGHT], TOKEN_BUCKETS, GemmBuilder(WEIGHT.device), 60.0)
    assert 0 < len(measured) < len(TOKEN_BUCKETS)
    assert 256 in measured
    assert "no time to measure" in caplog.text


@pytest.mark.parametrize("shape", MODEL_SHAPES, ids=str)
def test_candidates_fit_and_are_few_enough_to_time(shape) -> None:
    for num_tokens in TOKEN_BUCKETS:
        configs = candidates(shape, num_tokens)
        assert len(configs) == len(set(configs)) <= 80
        for config in configs:
            assert config.fits(num_tokens, shape.in_features)
            assert config.kind in TRITON_GEMMS
            assert shape.role != "whole" or config.num_splits == 1
        if shape.role == "whole":
            assert lt_splits(shape, num_tokens) in ([], [1])


def test_a_vocabulary_is_measured_for_sampled_rows_only() -> None:
    assert max(MODEL_SHAPES[-1].buckets) == MAX_SAMPLED_TOKENS
    assert SHAPE.buckets == TOKEN_BUCKETS


def test_each_number_of_tokens_has_the_gemm_of_its_bucket() -> None:
    names = {1: "one", 16: "some", 256: "many"}
    gemms = {n: lambda x, weight, name=name: (name, weight) for n, name in names.items()}
    gemm = PartialGemm(WEIGHT, gemms)
    for num_tokens, name in ((1, "one"), (2, "some"), (16, "some"), (17, "many"), (256, "many")):
        assert gemm(torch.zeros(num_tokens, 8)) == (name, WEIGHT)


@pytest.mark.parametrize("path", sorted(SHIPPED_FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_shipped_choices_are_whole(path) -> None:
    choices = read_choices(path)
    assert choices
    assert dump_choices(choices) == path.read_text(encoding="utf-8")
    for key, by_tokens in choices.items():
        size, role = key.split()
        out_features, in_features = map(int, size.split("x"))
        assert sorted(by_tokens) == list(TOKEN_BUCKETS)
        for num_tokens, config in by_tokens.items():
            assert config is None or config.fits(num_tokens, in_features), (key, num_tokens)
            assert role != "whole" or config is None or config.num_splits == 1
        assert json.loads(path.read_text(encoding="utf-8"))[key].keys() == {
            str(n) for n in TOKEN_BUCKETS
        }
