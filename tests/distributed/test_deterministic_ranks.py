"""Deterministic mode over two ranks on a CPU: one answer of one request in any company."""

from benchmarks.company import CompanySpec, answers_in_company
from tests.fakes.tiny_models import NATIVE, save_tiny_model
from workers.config import EngineConfig
from workers.parallel.local_engine import build_local_engine
from workers.sampling.params import SamplingParams

PROMPT = tuple(3 + 7 * i % 120 for i in range(20))
SAMPLING = SamplingParams(temperature=0.8, seed=5, max_tokens=6, ignore_eos=True, logprobs=3)
ALONE = CompanySpec(PROMPT, SAMPLING, 1, 1, 20, 30, 120)
AMONG_OTHERS = CompanySpec(PROMPT, SAMPLING, 2, 6, 20, 16, 120, seed=1)


def answers(folder, spec, **changes):
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        tp_size=2,
        num_cpu_threads=1,
        page_size=4,
        deterministic=True,
        **changes,
    )
    engine = build_local_engine(config, lambda done, total: None)
    try:
        found = answers_in_company(engine, spec)
        engine.check_integrity()
        return found
    finally:
        engine.close()


def test_two_ranks_give_one_request_one_answer(tmp_path):
    folder = save_tiny_model(NATIVE["llama3"], tmp_path)
    (alone,) = answers(folder, ALONE, num_pages=200)
    found = answers(folder, AMONG_OTHERS, num_pages=30, max_step_tokens=17)
    assert list(found) == [alone]
    assert found.total() == AMONG_OTHERS.num_repeats
