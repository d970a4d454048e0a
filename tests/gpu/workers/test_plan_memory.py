"""What plans change in memory and vouch for, on a GPU: page ids in tables, chunks of a prefill."""

import numpy as np
import pytest
import torch

from attention.memory.req_to_token_pool import ReqToTokenPool
from tests.fakes.tiny_models import TinyModel, random_prompt, save_tiny_model
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from tests.unit.workers.runner.test_step_inputs import PagesOnly, plan_of
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import GenerateRequest
from workers.runner.step_inputs import StepInputBuilder
from workers.sampling.params import SamplingParams
from workers.scheduler.plan import TableWrite

pytestmark = NEEDS_GPU

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


@pytest.mark.parametrize("page_size", [1, 7, 128, 256])
def test_tables_are_those_of_the_cpu(page_size: int) -> None:
    rng = np.random.default_rng(page_size)
    num_columns = 8192 // page_size
    writes = [
        TableWrite(
            rng.permutation(64)[: rng.integers(1, 40)].astype(np.int32),
            first_page,
            rng.integers(1, 10_000, num_columns - first_page, dtype=np.int32),
        )
        for first_page in (0, num_columns // 3, num_columns - 1)
    ]
    tables = []
    for device in (torch.device("cpu"), torch.device("cuda", 0)):
        pool = ReqToTokenPool(64, 8192, device)
        builder = StepInputBuilder(pool, PagesOnly(page_size), device)
        builder.apply_memory_writes(plan_of(writes))
        tables.append(pool.req_to_token.cpu())
    assert torch.equal(*tables)


@pytest.mark.parametrize("backend", [pytest.param("fa3_triton", marks=NEEDS_FA3), "torch_native"])
@pytest.mark.parametrize("enable_cuda_graphs", [False, True])
def test_chunks_of_an_aborted_prefill_are_found_again(tmp_path, backend, enable_cuda_graphs):
    folder = save_tiny_model(TinyModel("llama", {"head_dim": 64}), tmp_path)
    config = EngineConfig(
        model=str(folder),
        dtype="bfloat16",
        device="cuda",
        attention_backend=backend,
        num_pages=40,
        page_size=16,
        max_step_tokens=64,
        enable_cuda_graphs=enable_cuda_graphs,
    )
    prompt = random_prompt(200)
    engine = Engine.from_config(config)
    try:
        engine.submit(GenerateRequest("half", prompt, GREEDY))
        for _ in range(3):
            engine.step()
        engine.abort("half")
        while engine.has_work:
            engine.step()
        (again,) = engine.generate([prompt], GREEDY)
        engine.check_integrity()
    finally:
        engine.close()
    assert again.num_cached_tokens == 128
    assert len(again.token_ids) == 8
