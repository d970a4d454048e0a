"""Decode graphs of models in transformers' own code, and of native ones with its experts."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from tests.fakes.tiny_models import SLIDING_WINDOW, VOCAB_SIZE, TinyModel, save_tiny_model
from tests.gpu.engines import CUDA, NEAR_TIE, NUM_TOKENS, prompts_of
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.gpu.no_waiting import no_waiting
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.graphs.graph_set import CudaGraphCapturer
from workers.models import transformers_bridge
from workers.models.features import FLAT, ModelFeature
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = NEEDS_GPU

GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)

_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
_EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 8, "num_experts": 8}
# Every token to every expert: which ones a token gets, is no matter of a rounding.
_ROUTED = {"n_routed_experts": 4, "n_shared_experts": 2, "first_k_dense_replace": 1}
TINY = {
    "gemma3": TinyModel(
        "gemma3_text", {**_HEADS, "query_pre_attn_scalar": 64, "sliding_window": SLIDING_WINDOW}
    ),
    "gpt_oss": TinyModel("gpt_oss", {**_HEADS, **_EXPERTS, "sliding_window": SLIDING_WINDOW}),
    "qwen3_moe": TinyModel("qwen3_moe", {**_HEADS, **_EXPERTS, "moe_intermediate_size": 64}),
    "olmo2": TinyModel("olmo2", _HEADS),
    "longrope": TinyModel(
        "phi3",
        {
            **_HEADS,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "original_max_position_embeddings": 64,
                "short_factor": [1.0 + i / 32 for i in range(32)],
                "long_factor": [1.5 + i / 16 for i in range(32)],
            },
            "max_position_embeddings": 256,
            "original_max_position_embeddings": 64,
        },
    ),
    "deepseek_v2": TinyModel(
        "deepseek_v2",
        {
            **{**_HEADS, "num_key_value_heads": 4},
            **_ROUTED,
            "num_experts_per_tok": 4,
            "moe_intermediate_size": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 256,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 64,
        },
    ),
}
ALSO_NATIVE = {"gemma3", "gpt_oss", "qwen3_moe"}
WINDOWED = {"gemma3", "gpt_oss"}


def config_of(name, folder, **changes):
    save_tiny_model(TINY[name], folder)
    base = {"model": str(folder), "dtype": "bfloat16", "num_pages": 64, "max_running_requests": 16}
    if name in ALSO_NATIVE:
        base["model_impl"] = "transformers"
    return EngineConfig(**{**base, "enable_prefix_cache": False, **changes})


class CountedEngine:
    """An engine on the GPU that counts replays, whose captures are made beforehand."""

    def __init__(self, config):
        self.runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
        self.engine = Engine.of_runner(config, self.runner)
        self.num_replays = 0
        self.graphs = self.runner._graphs
        if self.graphs is not None:
            while self.graphs._missing:
                assert self.runner.prepare_while_idle()
            self._replay, self.graphs.run = self.graphs.run, self._count

    def _count(self, plan, sampling):
        self.num_replays += 1
        return self._replay(plan, sampling)

    def generate(self, prompts, sampling):
        results = self.engine.generate(prompts, sampling)
        self.engine.check_integrity()
        return results


def prompts(num):
    return prompts_of(num, VOCAB_SIZE, longest=100)


def eager_results(config, num_prompts):
    eager = CountedEngine(replace(config, enable_cuda_graphs=False))
    results = eager.generate(prompts(num_prompts), WITH_LOGPROBS)
    eager.engine.close()
    return results


def launching_strictly(counted):
    """A decode step that waits for the device is an error."""
    launch = counted.runner.launch

    def launch_strictly(plan):
        if not plan.is_decode:
            return launch(plan)
        with no_waiting():
            return launch(plan)

    counted.engine._executor._launch = launch_strictly
    return counted


@NEEDS_FA3
@pytest.mark.parametrize("name", [name for name in TINY if name != "deepseek_v2"])
def test_graphs_give_the_tokens_of_eager_steps(name, tmp_path) -> None:
    """Eight rows in a graph of eight, and attention that splits no row: the same kernels over the
    same shapes."""
    backend = "triton" if name in WINDOWED else "fa3"
    config = config_of(name, tmp_path, attention_backend=f"{backend}_deterministic")
    wanted = eager_results(config, 8)
    graphed = launching_strictly(CountedEngine(config))
    for _ in range(2):
        results = graphed.generate(prompts(8), GREEDY)
        assert [r.token_ids for r in results] == [r.token_ids for r in wanted]
    assert graphed.num_replays >= 2 * (NUM_TOKENS - 2)
    graphed.engine.close()


@NEEDS_FA3
@pytest.mark.parametrize("name", ["gemma3", "olmo2", "deepseek_v2"])
@serves(FLAT.subject, ModelFeature.GPU, ModelFeature.GRAPHS)
def test_padded_graphs_give_the_tokens_of_eager_steps_but_for_near_ties(name, tmp_path) -> None:
    """Six rows in a graph of eight, with the attention that the device gets by default."""
    config = config_of(name, tmp_path)
    wanted = eager_results(config, 6)
    graphed = launching_strictly(CountedEngine(config))
    for _ in range(2):
        assert_equal_but_for_near_ties(graphed.generate(prompts(6), GREEDY), wanted)
    assert graphed.num_replays >= 2 * (NUM_TOKENS - 2)
    graphed.engine.close()


def assert_equal_but_for_near_ties(ours, eager):
    """Up to the first other token of a row; there, eager steps found both about as likely."""
    num_equal = 0
    for tokens, wanted in zip(ours, eager, strict=True):
        differs = np.flatnonzero(np.array(tokens.token_ids) != np.array(wanted.token_ids))
        num_equal += int(differs[0]) if len(differs) else NUM_TOKENS
        if len(differs):
            entry = wanted.logprobs[differs[0]]
            assert tokens.token_ids[differs[0]] in entry.top_token_ids
            assert entry.top_logprobs[0] - entry.top_logprobs[1] < NEAR_TIE
    assert num_equal > 0.25 * len(ours) * NUM_TOKENS


@NEEDS_FA3
def test_grouped_products_without_a_kernel_are_found_at_the_start(
    tmp_path, caplog, monkeypatch
) -> None:
    """float16: torch reads on the host how many rows each expert has."""
    monkeypatch.setattr(transformers_bridge, "fuse_experts", lambda body, products: 0)
    counted = CountedEngine(config_of("qwen3_moe", tmp_path, dtype="float16"))
    assert counted.graphs is None
    assert "decode steps run without CUDA graphs" in caplog.text
    assert "grouped_mm" in caplog.text
    counted.engine.close()


def test_a_capture_that_fails_leaves_device_and_capturer_usable() -> None:
    """A sum that the host reads: CUDA invalidates the capture."""
    torch.cuda.set_device(CUDA)
    x, capturer = torch.ones(4, device=CUDA), CudaGraphCapturer(CUDA)
    with pytest.raises(RuntimeError, match=r"captur|not permitted"):
        capturer.record(lambda: x * x.sum().item())
    torch.cuda.empty_cache()
    assert torch.rand(3, device=CUDA).shape == (3,)
    y = torch.full((1 << 20,), 2.0, device=CUDA)
    replay, out = capturer.capture(lambda: (x + 1) * y.sum())
    x.fill_(2.0)
    replay()
    assert out.tolist() == [3.0 * 2 * (1 << 20)] * 4


def test_graphs_are_captured_though_those_before_them_are_gone_and_their_tensors_are_not() -> None:
    x, capturer = torch.ones(4, device=CUDA), CudaGraphCapturer(CUDA)
    products = []
    for factor in (2.0, 3.0):
        replay, out = capturer.capture(partial(torch.mul, x, factor))
        replay()
        del replay
        products.append(out)
    assert [one.tolist() for one in products] == [[2.0] * 4, [3.0] * 4]


@NEEDS_FA3
def test_an_engine_outlives_a_capture_that_fails(tmp_path, monkeypatch, caplog) -> None:
    """The trial at the start saw nothing, as of code that behaves in another way when captured."""
    config = config_of("olmo2", tmp_path)
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    local_logits = runner._model.local_logits

    def reads_when_captured(hidden):
        if torch.cuda.is_current_stream_capturing():
            hidden.sum().item()
        return local_logits(hidden)

    monkeypatch.setattr(runner._model, "local_logits", reads_when_captured)
    engine = Engine.of_runner(config, runner)
    results = [engine.generate(prompts(8), GREEDY) for _ in range(2)]
    assert runner._graphs.captured_sizes == []
    assert caplog.text.count("no further CUDA graphs are captured") == 1
    assert [r.token_ids for r in results[0]] == [r.token_ids for r in results[1]]
    engine.check_integrity()
    engine.close()
