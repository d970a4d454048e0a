"""Pages that a request without numbers leaves behind, under kernels that load whole pages."""

import pytest
import torch

from tests.fakes.tiny_models import TinyModel, random_prompt, save_tiny_model
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason, GenerateRequest
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner
from workers.sampling.params import SamplingParams

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

BAD_TOKEN = 2
PAGE_SIZE = 128
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
GOOD = random_prompt(45)  # more packed queries than a tile: FA3 loads its page whole
BAD = [BAD_TOKEN, *random_prompt(119, seed=1)]


@pytest.fixture(params=["fa3", "fa3_triton", "torch_native"])
def bad_engine(request, tmp_path):
    """(engine, its runner): BAD_TOKEN's embedding is NaN; there is one page."""
    folder = save_tiny_model(TinyModel("llama", {"head_dim": 64}), tmp_path)
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        attention_backend=request.param,
        num_pages=1,
        page_size=PAGE_SIZE,
        max_step_tokens=64,
        enable_cuda_graphs=False,  # equal text then means equal kernels
    )
    device = torch.device("cuda", 0)
    runner = make_model_runner(config, SingleRank(), device, lambda done, total: None)
    runner._model.get_parameter("model.embed_tokens.weight").data[BAD_TOKEN] = torch.nan
    engine = Engine.of_runner(config, runner)
    yield engine, runner
    engine.close()


def page_has_nan(runner) -> bool:
    pool = runner._backend.token_to_kv_pool
    buffers = [buffer for i in range(pool.num_layers) for buffer in pool.get_kv_buffer(i)]
    return any(bool(buffer[1].isnan().any()) for buffer in buffers)


def test_a_page_with_nan_in_it_serves_the_next_request_clean(bad_engine):
    engine, runner = bad_engine
    (before,) = engine.generate([GOOD], GREEDY)
    (failed,) = engine.generate([BAD], GREEDY)
    assert failed.finish_reason is FinishReason.ERROR
    assert page_has_nan(runner)
    (after,) = engine.generate([GOOD], GREEDY)
    assert (after.finish_reason, after.token_ids) == (FinishReason.LENGTH, before.token_ids)
    assert not page_has_nan(runner)


def test_a_page_of_an_aborted_prefill_serves_the_next_request_clean(bad_engine):
    engine, runner = bad_engine
    (before,) = engine.generate([GOOD], GREEDY)
    engine.submit(GenerateRequest("bad", BAD, GREEDY))
    engine.step()
    engine.abort("bad")
    while engine.has_work:
        engine.step()
    assert page_has_nan(runner)
    (after,) = engine.generate([GOOD], GREEDY)
    assert (after.finish_reason, after.token_ids) == (FinishReason.LENGTH, before.token_ids)
    assert not page_has_nan(runner)
