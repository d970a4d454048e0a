"""`auto-tuned`: an engine takes what was measured, keeps it, and every rank chooses alike."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import attention
from attention.backends.torch_native import TorchNativeBackend
from attention.capability import AttentionBackendError
from attention.config import AttentionConfig, LayerAttentionConfig
from attention.preferences import PREFERENCES, DeviceFacts, DeviceGeneration, Preference
from attention.registration import ATTENTION_BACKENDS
from attention.routes import AskedBackends
from attention.selection import AttentionNeeds
from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED
from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.attention.tuning.doubles import DECODE, KnownCosts, ManualClock
from workers import Engine
from workers.config import EngineConfig
from workers.parallel.group import SingleRank
from workers.runner import attention_tuning, sizing
from workers.runner.attention_report import measurement_records
from workers.runner.attention_tuning import (
    MAX_MEASURED_KEYS,
    AttentionTuner,
    TuningSubject,
    measured_config,
)
from workers.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
PLAIN = LayerAttentionConfig()


class Wide(TorchNativeBackend):
    capability = replace(TorchNativeBackend.capability, name="wide")


class OtherPages(TorchNativeBackend):
    capability = replace(
        TorchNativeBackend.capability, name="pages_of_64", page_sizes=(64,), default_page_size=64
    )


COSTS = {
    "torch_native": lambda point: 1e-3 * point.rows,
    "wide": lambda point: 4e-3,
    "pages_of_64": lambda point: 1e-5,
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    own = {one.capability.name: one for one in (Wide, OtherPages)}
    monkeypatch.setattr(ATTENTION_BACKENDS, "_classes", ATTENTION_BACKENDS._classes | own)
    use_order(monkeypatch, "torch_native", "wide")


def use_order(monkeypatch, *names):
    monkeypatch.setitem(PREFERENCES, DeviceGeneration.NO_GPU, Preference(mha=names, mla=()))


def subject_of(num_layers=3, layers=None, scratch_bytes=1 << 30, **needs):
    dtype = torch.float32
    layers = layers or (PLAIN,) * num_layers
    config = AttentionConfig(
        num_layers=len(layers),
        tp_q_head_num=4,
        tp_k_head_num=2,
        head_dim=16,
        v_head_dim=16,
        max_context_len=4096,
        page_size=1,
        dtype=dtype,
        kv_dtype=dtype,
        device=torch.device("cpu"),
        layers=layers,
    )
    return TuningSubject(
        AskedBackends(AUTO_TUNED, AUTO_TUNED),
        DeviceFacts("cpu", "CPU", None),
        AttentionNeeds(dtype, dtype, **needs),
        config,
        scratch_bytes,
    )


class Bench:
    """A tuner whose measuring is known. made: a measure for each set of candidates."""

    def __init__(self, folder, costs=COSTS, tp=None, **changes):
        self.made = []
        self.costs = costs
        config = EngineConfig(max_running_requests=64, max_step_tokens=1024)
        clock = ManualClock()
        self.tuner = AttentionTuner(
            config, tp or SingleRank(), self.make, folder, clock=clock, **changes
        )
        self.clock = clock

    def make(self, candidates, measured, points):
        measure = KnownCosts(self.costs, self.clock)
        self.made.append((candidates.page_size, measured, measure))
        return measure


def test_the_choice_follows_what_was_measured_and_is_told(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    tuned = Bench(tmp_path).tuner.choose(subject_of())
    assert set(tuned.chosen[DECODE]) == {"torch_native", "wide"}
    assert tuned.decoders_of(1) == ("torch_native",)
    assert tuned.decoders_of(64) == ("wide",)
    assert "attention was measured in" in caplog.text
    assert "decode: wide in" in caplog.text
    assert "torch_native 333.3 us, wide 1333.3 us a layer" in caplog.text


def test_the_next_start_reads_what_this_one_measured(tmp_path):
    first, second = Bench(tmp_path), Bench(tmp_path)
    tuned = first.tuner.choose(subject_of())
    again = second.tuner.choose(subject_of())
    assert len(first.made[0][2].asked) > 10
    assert second.made[0][2].asked == []
    assert again.table == tuned.table


@pytest.mark.parametrize("other", [subject_of(num_layers=4), subject_of(page_size=8)])
def test_other_shapes_are_measured_anew(tmp_path, other):
    Bench(tmp_path).tuner.choose(subject_of())
    bench = Bench(tmp_path)
    bench.tuner.choose(other)
    assert bench.made[0][2].asked


@pytest.mark.parametrize("changed", ["attention", "workers/layers/cuda"])
def test_other_kernels_are_measured_anew(tmp_path, monkeypatch, changed):
    """Those that rotate and write K and V, too: where attention does not do so, they are timed."""
    versions = {"attention": "1", "workers/layers/cuda": "1"}
    root = Path(attention.__file__).parents[1]

    def version_of(folder):
        return versions[folder.relative_to(root).as_posix()]

    monkeypatch.setattr(attention_tuning, "code_version", version_of)
    Bench(tmp_path).tuner.choose(subject_of())
    versions[changed] = "2"
    bench = Bench(tmp_path)
    bench.tuner.choose(subject_of())
    assert len(bench.made[0][2].asked) > 10


def test_a_start_that_ran_out_of_time_is_gone_on_with(tmp_path):
    first, second = Bench(tmp_path, max_seconds=0.35), Bench(tmp_path)
    first.tuner.choose(subject_of())
    second.tuner.choose(subject_of())
    asked = [point for bench in (first, second) for point, _ in bench.made[0][2].asked]
    assert len(first.made[0][2].asked) == 6
    assert len(asked) == len(set(asked)) > 6


def test_what_failed_is_tried_again_at_the_next_start(tmp_path):
    broken = COSTS | {"wide": lambda point: "RuntimeError: no memory"}
    tuned = Bench(tmp_path, broken).tuner.choose(subject_of())
    assert tuned.chosen[DECODE] == ("torch_native",)
    assert "RuntimeError: no memory" in tuned.left_out[0].reason
    assert "wide" in Bench(tmp_path).tuner.choose(subject_of()).chosen[DECODE]


def test_where_all_fail_the_start_does(tmp_path):
    broken = dict.fromkeys(COSTS, lambda point: "RuntimeError: no such kernel")
    with pytest.raises(AttentionBackendError, match=r"works in decode: torch_native: .* no such"):
        Bench(tmp_path, broken).tuner.choose(subject_of())


def test_pools_of_other_pages_are_measured_as_whole_sets_and_the_fastest_is_taken(
    tmp_path, monkeypatch
):
    use_order(monkeypatch, "torch_native", "pages_of_64")
    bench = Bench(tmp_path)
    tuned = bench.tuner.choose(subject_of())
    assert [page_size for page_size, _, _ in bench.made] == [16, 64]
    assert all(measure.asked for _, _, measure in bench.made), "one candidate alone is timed too"
    assert tuned.candidates.page_size == 64
    assert tuned.chosen[DECODE] == ("pages_of_64",)
    slow = COSTS | {"pages_of_64": lambda point: 1.0}
    assert Bench(tmp_path / "slow", slow).tuner.choose(subject_of()).candidates.page_size == 16


def test_ranks_take_what_rank_0_measured(tmp_path):
    benches = {}

    def choose(tp):
        bench = benches[tp.rank] = Bench(tmp_path / str(tp.rank), tp=tp)
        return bench.tuner.choose(subject_of())

    first, second = ThreadRanks(2).run(choose)
    assert benches[1].made == []
    assert first.table == second.table
    assert first.table.seconds


def test_only_as_many_layers_are_measured_as_there_is_memory_for():
    whole = subject_of(num_layers=32)
    layer_bytes = whole.attention.kv_bytes_per_token // 32
    for fitting, expected in ((32, 32), (31, 16), (9, 8)):
        subject = replace(whole, scratch_bytes=fitting * layer_bytes * MAX_MEASURED_KEYS)
        assert measured_config(subject, 64).num_layers == expected
    assert measured_config(replace(whole, scratch_bytes=1), 64).num_layers == 4


def test_cross_attention_is_refused_by_name(tmp_path):
    layers = (PLAIN, LayerAttentionConfig(max_encoder_tokens=8))
    with pytest.raises(AttentionBackendError, match="measures no cross-attention"):
        Bench(tmp_path).tuner.choose(subject_of(layers=layers))


def test_records_are_of_one_layer_and_say_what_is_taken(tmp_path):
    records = measurement_records(Bench(tmp_path).tuner.choose(subject_of(num_layers=4)))
    many = [one for one in records if one.phase == "decode" and one.rows == 64]
    assert {(one.backend, one.is_chosen) for one in many} == {
        ("torch_native", False),
        ("wide", True),
    }
    assert {one.seconds for one in many if one.backend == "wide"} == {1e-3}


def test_an_engine_attends_by_its_measurements_and_its_texts_stay(tmp_path, monkeypatch):
    folder = str(save_tiny_model(NATIVE["llama3"], tmp_path / "model"))
    costs = {"torch_native": lambda point: 1.0, "wide": lambda point: 0.1 * point.rows}

    def tuner_for(config, tp, front):
        make = partial(lambda costs, *arguments: KnownCosts(costs), costs)
        return AttentionTuner(config, tp, make, tmp_path, clock=lambda: 0.0)

    monkeypatch.setattr(sizing, "tuner_for", tuner_for)
    prompts = [[5 + n] * (4 + n) for n in range(16)]
    records = []
    texts = {}
    for name in (None, AUTO_TUNED):
        config = EngineConfig(
            model=folder,
            device="cpu",
            num_pages=64,
            max_running_requests=16,
            attention_backend=name,
        )
        engine = Engine.from_config(config, on_step=records.append)
        try:
            texts[name] = [one.token_ids for one in engine.generate(prompts, GREEDY)]
            texts[name] += [one.token_ids for one in engine.generate(prompts[:1], GREEDY)]
            info = engine.info
        finally:
            engine.close()
    assert texts[None] == texts[AUTO_TUNED]
    assert info.attention_backend.startswith("auto-tuned: ")
    assert {one.backend for one in info.attention_times} == {"torch_native", "wide"}
    attended = {one.backend for record in records for one in record.attention}
    assert attended == {"torch_native", "wide"}


def test_measured_phases_of_drafts_are_those_of_the_engine(tmp_path):
    bench = Bench(tmp_path)
    bench.tuner._config = replace(bench.tuner._config, speculative="ngram")
    tuned = bench.tuner.choose(subject_of())
    assert AttentionPhase.VERIFY in tuned.chosen


def test_the_cache_lies_in_the_users_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    tuner = attention_tuning.tuner_for(EngineConfig(), SingleRank(), None)
    assert tuner._folder == tmp_path / ".cache" / "tessera"
