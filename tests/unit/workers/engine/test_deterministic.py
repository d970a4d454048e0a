"""Deterministic mode on a CPU: one request among random neighbours has one answer, to the last bit.

Real engines: chunks of any length, prefix hits and misses, retractions, floats of both widths.
"""

import pytest

from benchmarks.company import CompanySpec, answers_in_company
from tests.fakes.tiny_models import LATENT, NATIVE, THROUGH_TRANSFORMERS, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.errors import ConfigError
from workers.sampling.params import SamplingParams

PROMPT = tuple(3 + 7 * i % 120 for i in range(37))
SAMPLING = SamplingParams(
    temperature=0.8, top_p=0.9, seed=5, max_tokens=9, ignore_eos=True, logprobs=3
)
ALONE = CompanySpec(PROMPT, SAMPLING, 1, 1, 60, 12, 120)
AMONG_OTHERS = CompanySpec(PROMPT, SAMPLING, 4, 16, 20, 40, 120, seed=1)
WAYS = {
    "retracted": {"num_pages": 34, "max_step_tokens": 32},
    "uncached_in_short_chunks": {
        "max_step_tokens": 13,
        "page_size": 8,
        "enable_prefix_cache": False,
        "enable_mixed_batches": False,
    },
}


def answers(folder, spec, **changes):
    """And how often a request was retracted."""
    settings = {"page_size": 4, "num_pages": 400, "deterministic": True, **changes}
    engine = Engine.from_config(EngineConfig(model=str(folder), device="cpu", **settings))
    try:
        found = answers_in_company(engine, spec)
        engine.check_integrity()
        return found, engine.stats().num_preemptions
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("name", "dtype", "ways"),
    [
        ("llama3", "float32", WAYS),
        ("gemma3", "bfloat16", ["retracted"]),
        ("deepseek_v2", "float32", ["retracted"]),
    ],
)
def test_one_request_has_one_answer_in_any_company(name, dtype, ways, tmp_path):
    folder = save_tiny_model({**NATIVE, **LATENT}[name], tmp_path)
    (alone,), _ = answers(folder, ALONE, dtype=dtype)
    for way in ways:
        found, num_retractions = answers(folder, AMONG_OTHERS, dtype=dtype, **WAYS[way])
        assert list(found) == [alone], way
        assert found.total() == AMONG_OTHERS.num_repeats
        assert num_retractions > 0 or way != "retracted"


def test_without_it_the_last_bits_depend_on_the_company(tmp_path):
    """Else the test above would prove nothing."""
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    found, _ = answers(folder, AMONG_OTHERS, max_step_tokens=64, deterministic=False)
    assert len(found) > 1


def test_what_cannot_be_deterministic_is_refused_with_the_reason(tmp_path):
    folder = save_tiny_model(THROUGH_TRANSFORMERS["olmo2"], tmp_path)
    with pytest.raises(ConfigError, match="Olmo2ForCausalLM runs through transformers"):
        answers(folder, ALONE)
    with pytest.raises(ConfigError, match="deterministic and speculative='ngram'"):
        EngineConfig(deterministic=True, speculative="ngram")
