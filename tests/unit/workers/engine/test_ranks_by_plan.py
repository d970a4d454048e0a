"""Models of transformers on two ranks, in an engine: the text and log probabilities of one rank."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.thread_ranks import ThreadRanks
from tests.fakes.tiny_reference import BANNED_TOKENS, build_reference, config_of, random_prompt
from tests.proofs.served import serves
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.results import GenerateResult
from workers.models import transformers_model
from workers.models.features import FLAT, ROW_BY_ROW, STATEFUL, ModelFeature
from workers.parallel.group import SingleRank
from workers.runner.executor import PendingStep, StepExecutor
from workers.runner.factory import make_model_runner
from workers.runner.model_runner import ModelRunner
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import StepPlan

MAX_LOGPROB_ERROR = 1e-4
PROMPTS = [random_prompt(length) for length in (3, 24, 41)]
SAMPLING = SamplingParams(
    temperature=0.0,
    max_tokens=24,
    ignore_eos=True,
    logprobs=0,
    prompt_logprobs=0,
    logit_bias=dict.fromkeys(BANNED_TOKENS, -100.0),
)
FAMILIES = {
    "qwen3_next": "Qwen3NextForCausalLM",  # states, experts, heads that are joined again
    "gemma4_text": "Gemma4ForCausalLM",  # layers that differ and share K and V
    "glm_moe_dsa": "GlmMoeDsaForCausalLM",  # row by row
    "gpt_neox": "GPTNeoXForCausalLM",  # biases, Q, K and V in one
    "phi3": "Phi3ForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "minimax": "MiniMaxForCausalLM",
    "mimo_v2_flash": "MiMoV2FlashForCausalLM",
    "gemma3": "Gemma3ForConditionalGeneration",  # text of a model for images
}


class OnBothRanks:
    """Launches each plan on the follower too, which runs in a thread of its own."""

    def __init__(self, inner: StepExecutor, follower: ModelRunner, thread: ThreadPoolExecutor):
        self._inner, self._follower, self._thread = inner, follower, thread

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def launch(self, plan: StepPlan) -> PendingStep:
        self._thread.submit(self._follower.run_follower, plan)
        return self._inner.launch(plan)


@contextmanager
def one_at_a_time() -> Iterator[None]:
    """transformers builds models with settings of the whole process."""
    lock, load = threading.Lock(), transformers_model.load_transformers_model

    def locked(*arguments: Any) -> Any:
        with lock:
            return load(*arguments)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(transformers_model, "load_transformers_model", locked)
        yield


def results_of(folder: Path, size: int) -> list[GenerateResult]:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        tp_size=size,
        num_pages=512,
        max_step_tokens=16,
        num_cpu_threads=1,
        max_context_len=128,
        model_impl="transformers",
    )
    device = torch.device("cpu")

    def build(tp: Any) -> ModelRunner:
        return make_model_runner(config, tp, device, lambda done, total: None)

    if size == 1:
        engine = Engine.of_runner(config, build(SingleRank()))
        try:
            return engine.generate(PROMPTS, SAMPLING)
        finally:
            engine.close()
    with one_at_a_time(), ThreadPoolExecutor(1) as thread:
        first, follower = ThreadRanks(2).run(build)
        engine = Engine.of_runner(
            config, first, wrap_executor=lambda inner: OnBothRanks(inner, follower, thread)
        )
        try:
            return engine.generate(PROMPTS, SAMPLING)
        finally:
            engine.close()


def logprobs_of(result: GenerateResult) -> torch.Tensor:
    assert result.prompt_logprobs is not None
    entries = [*result.prompt_logprobs[1:], *result.logprobs]
    return torch.tensor([entry.logprob for entry in entries if entry is not None])


# tests/distributed has real ranks and fewer families in every run.
@pytest.mark.nightly
@pytest.mark.parametrize("model_type", FAMILIES)
@serves(FLAT.subject, ROW_BY_ROW.subject, STATEFUL.subject, ModelFeature.TENSOR_PARALLEL)
def test_two_ranks_give_what_one_gives(model_type: str, tmp_path: Path) -> None:
    class_name = FAMILIES[model_type]
    build_reference(config_of(model_type, class_name, {}), class_name, tmp_path)
    for one, two in zip(results_of(tmp_path, 1), results_of(tmp_path, 2), strict=True):
        assert len(one.token_ids) == 24
        assert two.token_ids == one.token_ids
        error = (logprobs_of(two) - logprobs_of(one)).abs().max()
        assert float(error) < MAX_LOGPROB_ERROR
