"""Every native architecture on two GPUs, its experts cut or divided: transformers' own text but for
near ties."""

import pytest

from tests.fakes.tiny_models import VOCAB_SIZE, one_of_each
from tests.gpu.engines import prompts_of
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import GREEDY
from tests.gpu.parallel.running_engine import running
from tests.gpu.wide_models import save_wide_model
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE, gaps, rounded_gaps
from tests.proofs.served import serves
from workers.loading.expert_load_file import write_expert_loads
from workers.models.features import ModelFeature, native_capability

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS, NEEDS_FA3]


def having(feature):
    return [
        name
        for architecture, name in one_of_each().items()
        if feature in native_capability(architecture).features
    ]


def check_text(name, folder, **parts):
    settings = {"model_impl": "native", "dtype": "bfloat16", "num_pages": 200, "tp_size": 2}
    model, prompts = str(save_wide_model(name, folder)), prompts_of(8, VOCAB_SIZE, longest=150)
    with running({**settings, **parts, "model": model}) as engine:
        (outputs,) = engine.generate(prompts, [GREEDY] * len(prompts))
    rounded = (rounded_gaps(folder, prompts, outputs) > NEAR_TIE).float().mean()
    found = (gaps(folder, prompts, outputs) > NEAR_TIE).float().mean()
    assert found < max(MAX_SHARE, 1.25 * rounded)


@serves(ModelFeature.TENSOR_PARALLEL_GPU)
@pytest.mark.parametrize("name", having(ModelFeature.TENSOR_PARALLEL_GPU))
def test_text_of_two_ranks_is_transformers_own(name, tmp_path) -> None:
    check_text(name, tmp_path)


@serves(ModelFeature.EXPERT_PARALLEL_GPU)
@pytest.mark.parametrize("name", having(ModelFeature.EXPERT_PARALLEL_GPU))
def test_text_of_two_ranks_with_experts_of_their_own_is(name, tmp_path) -> None:
    check_text(name, tmp_path, ep_size=2)


def test_text_with_copies_of_busy_experts_is(tmp_path) -> None:
    """Of the one layer that has experts; what they get is counted meanwhile, and kept."""
    loads = tmp_path / "loads.json"
    write_expert_loads(loads, [[9, 1, 0, 0, 0, 0, 0, 5]])
    copies = {"num_redundant_experts": 4, "expert_load_file": str(loads)}
    check_text("qwen3_moe", tmp_path / "model", ep_size=2, expert_load_interval_steps=4, **copies)
