"""An engine whose phases or layers have backends of their own gives the text of one backend."""

import random
from dataclasses import replace

import pytest

from attention.backends.torch_native import TorchNativeBackend
from attention.preferences import PREFERENCES, DeviceGeneration, Preference
from attention.registration import ATTENTION_BACKENDS
from tests.fakes.tiny_models import GEMMA, VOCAB_SIZE, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.sampling.params import SamplingParams

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
RNG = random.Random(0)
PROMPTS = [[RNG.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in (5, 70, 18)]


class OtherBackend(TorchNativeBackend):
    capability = replace(TorchNativeBackend.capability, name="other")


class FullOnly(TorchNativeBackend):
    capability = replace(TorchNativeBackend.capability, name="full_only", has_sliding_window=False)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    own = {backend.capability.name: backend for backend in (OtherBackend, FullOnly)}
    monkeypatch.setattr(ATTENTION_BACKENDS, "_classes", ATTENTION_BACKENDS._classes | own)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(GEMMA["gemma2"], tmp_path_factory.mktemp("gemma2")))


def run(folder, **changes):
    config = EngineConfig(model=folder, device="cpu", num_pages=64, max_step_tokens=32, **changes)
    engine = Engine.from_config(config)
    try:
        texts = [result.token_ids for result in engine.generate(PROMPTS, GREEDY)]
        engine.check_integrity()
        return texts, engine.info.attention_backend
    finally:
        engine.close()


def test_phases_of_their_own(folder):
    texts, name = run(folder, decode_attention_backend="other")
    assert name == "torch_native (prefill), other (decode)"
    alone, name = run(folder, attention_backend="other", prefill_attention_backend="other")
    assert name == "other"
    assert texts == alone


def test_layers_that_a_backend_cannot_do_take_the_next(folder, monkeypatch):
    order = Preference(mha=("full_only", "torch_native"), mla=())
    monkeypatch.setitem(PREFERENCES, DeviceGeneration.NO_GPU, order)
    texts, name = run(folder)
    assert name == "torch_native+full_only"
    monkeypatch.undo()
    assert (texts, "torch_native") == run(folder)
