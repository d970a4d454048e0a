"""Measuring on a CPU: real backends over real scratch pools, an injected clock."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import AttentionConfig, LatentEntry, LayerAttentionConfig
from attention.backends.torch_native import TorchNativeBackend
from attention.config import AttentionHeads
from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.registration import ATTENTION_BACKENDS
from attention.timing import AttentionPhase
from attention.tuning.candidates import CandidateSet
from attention.tuning.layers import measured_layers
from attention.tuning.measure import AttentionMeasurement, ScratchSpace
from attention.tuning.points import StepPoint
from attention.tuning.stopwatch import HostStopwatch
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, ManualClock, decode, extend
from tests.unit.workers.graphs.test_decode_graphs import ReplayableTorchBackend

POINTS = [
    decode(1, 9),
    decode(8, 30, is_uneven=True),
    extend(2, 5, 11),
    extend(8, 3, 20, is_uneven=True),
    StepPoint(AttentionPhase.VERIFY, 2, 4, 10),
]
CLOCK = ManualClock()


class Costly(TorchNativeBackend):
    """Every layer takes two seconds of the clock."""

    capability = replace(TorchNativeBackend.capability, name="costly")
    layer_s = 2.0

    def forward(self, *arguments):
        CLOCK.now_s += self.layer_s
        return super().forward(*arguments)


class Cheap(Costly, ReplayableTorchBackend):
    capability = replace(TorchNativeBackend.capability, name="cheap")
    layer_s = 0.5


class Broken(TorchNativeBackend):
    capability = replace(TorchNativeBackend.capability, name="broken")

    def init_forward_metadata(self, forward_batch):
        if forward_batch.batch_size > 1:
            raise LookupError("no kernel for several rows")
        super().init_forward_metadata(forward_batch)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    own = {one.capability.name: one for one in (Costly, Cheap, Broken)}
    monkeypatch.setattr(ATTENTION_BACKENDS, "_classes", ATTENTION_BACKENDS._classes | own)


def config_of(*layers, **changes):
    layers = layers or (LayerAttentionConfig(),) * 2
    facts = {
        "num_layers": len(layers),
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "head_dim": 8,
        "v_head_dim": 8,
        "max_context_len": 200,
        "page_size": 4,
        "dtype": torch.float32,
        "kv_dtype": torch.float32,
        "device": torch.device("cpu"),
        "layers": layers,
    }
    return AttentionConfig(**facts | changes)


def measurement(config, make_pool, names=("torch_native",), uses_graphs=False):
    by_name = {name: (name,) * config.num_layers for name in names}
    phases = (DECODE, EXTEND, AttentionPhase.VERIFY)
    candidates = CandidateSet(config.page_size, False, dict.fromkeys(phases, by_name))
    space = ScratchSpace.over(config, POINTS, make_pool)
    layers = measured_layers(config, None)
    watch = HostStopwatch(CLOCK)
    return AttentionMeasurement(candidates, space, layers, watch, uses_graphs, CLOCK)


@pytest.mark.parametrize("uses_graphs", [True, False])
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_times_are_those_of_all_layers(point, uses_graphs):
    names = ("costly", "cheap")
    measure = measurement(config_of(), MHATokenToKVPool, names, uses_graphs)
    result = measure(point, names)
    assert result.seconds == {"costly": 4.0, "cheap": 1.0}
    assert result.errors == {}


def test_first_runs_that_compile_are_told_apart():
    """Costly takes four seconds of the clock in its first run, cheap one, and a late one none."""
    measure = measurement(config_of(), MHATokenToKVPool, ("costly", "cheap", "torch_native"))
    result = measure(extend(2, 5, 11), ("costly", "cheap", "torch_native"))
    assert result.compiling_s == 5.0


def test_who_fails_is_named_with_its_error_and_the_others_are_timed():
    names = ("cheap", "broken")
    measure = measurement(config_of(), MHATokenToKVPool, names)
    assert set(measure(decode(1, 9), names).seconds) == set(names)
    result = measure(extend(2, 5, 11), names)
    assert result.seconds == {"cheap": 1.0}
    assert result.errors == {"broken": "LookupError: no kernel for several rows"}


GEMMA = (
    LayerAttentionConfig(sliding_window_size=6, logit_cap=20.0),
    LayerAttentionConfig(chunk_size=8),
    LayerAttentionConfig(has_sinks=True),
    LayerAttentionConfig(heads=AttentionHeads(4, 1, 16, 8)),
    LayerAttentionConfig(heads=AttentionHeads(4, 1, 16, 8), kv_layer_id=3),
)
LATENT = {
    "latent": LatentEntry(16, 8),
    "tp_k_head_num": 4,
    "head_dim": 12,
    "v_head_dim": 8,
}


def grouped_pool(config, num_pages):
    return GroupedTokenToKVPool(config, (num_pages,), MHATokenToKVPool)


@pytest.mark.parametrize(
    ("config", "make_pool"),
    [(config_of(*GEMMA), grouped_pool), (config_of(**LATENT), LatentTokenToKVPool)],
    ids=["layers that differ", "latents"],
)
@pytest.mark.parametrize("point", POINTS, ids=str)
def test_every_kind_of_layer_is_called_as_a_model_calls_it(config, make_pool, point):
    result = measurement(config, make_pool)(point, ("torch_native",))
    assert result.errors == {}
    assert set(result.seconds) == {"torch_native"}


@pytest.mark.parametrize("point", POINTS, ids=str)
def test_rows_of_a_step_have_pages_of_their_own_and_stand_in_the_table(point):
    config = config_of()
    space = ScratchSpace.over(config, POINTS, MHATokenToKVPool)
    batch = space.batch(point, None)
    seq_lens, new = point.lengths()
    assert batch.num_tokens == new.sum()
    table = space.table.req_to_token.numpy()
    rows = [table[row, :length] for row, length in enumerate(seq_lens)]
    places = np.concatenate(rows)
    assert len(set(places.tolist())) == len(places)
    assert places.min() >= config.page_size, "page 0 is the dummy page"
    pages = [set((row // config.page_size).tolist()) for row in rows]
    assert sum(map(len, pages)) == len(set().union(*pages))
    expected = [row[-n:] for row, n in zip(rows, new, strict=True)]
    assert batch.out_cache_loc.tolist() == np.concatenate(expected).tolist()
    positions = [np.arange(m - n, m) for m, n in zip(seq_lens, new, strict=True)]
    assert batch.positions.tolist() == np.concatenate(positions).tolist()
