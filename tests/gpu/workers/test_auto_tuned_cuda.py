"""`auto-tuned` on the device: candidates are measured in graphs and eagerly, and attend right."""

import time
from dataclasses import replace
from functools import partial

import pytest
import torch

from attention import AttentionConfig, LayerAttentionConfig
from attention.memory.layout import LatentEntry
from attention.routes import AskedBackends
from attention.selection import AttentionNeeds, detect_device
from attention.timing import AttentionPhase
from attention.tuning.candidates import AUTO_TUNED
from tests.gpu.engines import BUILTIN, CUDA, GREEDY, NEAR_TIE, gaps_to_likeliest, prompts_of
from tests.gpu.needs import NEEDS_GPU
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner import sizing
from workers.runner.attention_scratch import ScratchMeasure
from workers.runner.attention_tuning import AttentionTuner, TuningSubject
from workers.runner.factory import make_model_runner

pytestmark = NEEDS_GPU

HALF = torch.bfloat16
HEADS = {"tp_q_head_num": 32, "tp_k_head_num": 8, "head_dim": 128, "v_head_dim": 128}
LATENTS = {
    "tp_q_head_num": 16,
    "tp_k_head_num": 16,
    "head_dim": 192,
    "v_head_dim": 128,
    "latent": LatentEntry(512, 64),
}


def subject_of(geometry, front=None, **changes):
    facts = {"num_layers": 4, "layers": (LayerAttentionConfig(),) * 4, "kv_dtype": HALF} | geometry
    facts |= changes
    config = AttentionConfig(**facts, max_context_len=8192, page_size=1, dtype=HALF, device=CUDA)
    needs = AttentionNeeds(
        HALF,
        config.kv_dtype,
        needs_mla=config.latent is not None,
        needs_mixed_batches=True,
        needs_sliding_window=any(one.sliding_window_size > 0 for one in config.layers),
        latent=config.latent,
    )
    asked = AskedBackends(AUTO_TUNED, AUTO_TUNED)
    scratch_bytes = 32768 * config.kv_bytes_per_token
    return TuningSubject(asked, detect_device(CUDA), needs, config, scratch_bytes, front)


def tuner_in(folder, config, front=None):
    make = partial(ScratchMeasure, config, front)
    return AttentionTuner(config, SingleRank(), make, folder, max_seconds=4.0)


def with_front():
    from workers.runner.decode_front import FusedFront

    return subject_of(HEADS, FusedFront())


SUBJECTS = {
    "from the projection on": with_front,
    "rotated": lambda: subject_of(HEADS),
    "windows": lambda: subject_of(
        HEADS,
        layers=(LayerAttentionConfig(sliding_window_size=512), LayerAttentionConfig()) * 2,
    ),
    "e4m3": lambda: subject_of(HEADS, kv_dtype=torch.float8_e4m3fn),
    "latents": lambda: subject_of(LATENTS),
}


@pytest.mark.parametrize("subject", SUBJECTS.values(), ids=SUBJECTS.keys())
def test_every_candidate_is_measured_without_an_error(subject, tmp_path):
    config = EngineConfig(device="cuda", max_running_requests=16, max_step_tokens=1024)
    start_s = time.monotonic()
    tuned = tuner_in(tmp_path, config).choose(subject())
    took_s = time.monotonic() - start_s
    assert [one for one in tuned.table.left_out if one.reason.startswith("failed")] == []
    for phase in (AttentionPhase.DECODE, AttentionPhase.EXTEND):
        if len(tuned.table.names[phase]) > 1:
            assert any(point.phase is phase for point in tuned.table.seconds)
    times = {
        f"{name} at {point}": seconds
        for point, at in tuned.table.seconds.items()
        for name, seconds in at.items()
    }
    # No kernel ends sooner. Other processes' turns on the device are in the times, so that only
    # the tuning's own time bounds them: of a candidate's turns, one took its median or more.
    assert all(seconds > 1e-6 for seconds in times.values()), times
    assert sum(times.values()) < took_s, (took_s, times)


def test_an_engine_takes_the_likeliest_tokens_whoever_attends(tmp_path, monkeypatch):
    def tuner_for(config, tp, front):
        return tuner_in(tmp_path, config, front)

    monkeypatch.setattr(sizing, "tuner_for", tuner_for)
    prompts = prompts_of(12, 4000)
    config = EngineConfig(**BUILTIN, attention_backend=AUTO_TUNED)
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    try:
        for _ in range(2):
            tokens = [result.token_ids for result in engine.generate(prompts, GREEDY)]
        backend = runner._backend
        assert runner._graphs.captured_sizes
        assert engine.info.attention_times
        captured = {key.backend for key in runner._graphs._graphs}
        assert captured <= set(backend.graph_backends(1)) | set(backend._decoders().values())
    finally:
        engine.close()
    gaps = gaps_to_likeliest(prompts, tokens)
    assert gaps.max() < NEAR_TIE
    assert (gaps == 0).mean() > 0.95


def test_the_next_start_measures_nothing(tmp_path, monkeypatch):
    config = EngineConfig(device="cuda", max_running_requests=4, max_step_tokens=64)
    subject = replace(subject_of(HEADS), scratch_bytes=1 << 26)
    first = AttentionTuner(
        config, SingleRank(), partial(ScratchMeasure, config, None), tmp_path, max_seconds=30.0
    ).choose(subject)

    def never(*arguments):
        raise AssertionError("measured again")

    again = AttentionTuner(
        config, SingleRank(), lambda *arguments: never, tmp_path, max_seconds=30.0
    ).choose(subject)
    assert again.table.seconds == first.table.seconds
