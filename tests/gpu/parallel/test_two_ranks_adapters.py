"""Two ranks with adapters on GPUs, over peer memory and NCCL, in graphs: merged models' tokens."""

import pytest

from tests.fakes.adapters import ATTENTION, EVERY, merged_reference, save_adapter
from tests.fakes.tiny_models import eager_reference, save_tiny_model
from tests.gpu.engines import CUDA
from tests.gpu.needs import NEEDS_GPU, NEEDS_TWO_GPUS
from tests.gpu.parallel.cases import GREEDY
from tests.gpu.parallel.running_engine import running
from tests.gpu.workers.test_adapters_cuda import MODEL, PROMPTS, gaps
from tests.gpu.workers.test_deepseek_cuda import MAX_SHARE, NEAR_TIE

pytestmark = [*NEEDS_GPU, NEEDS_TWO_GPUS]


@pytest.mark.parametrize("has_peers", [True, False], ids=["peer", "nccl"])
def test_tokens_of_two_ranks_are_likeliest_of_merged_models(has_peers, tmp_path) -> None:
    """Every request is by turns with both adapters and with none; then all of them without."""
    folder = save_tiny_model(MODEL, tmp_path / "model")
    base = eager_reference(folder).eval()
    adapters = [
        save_adapter(tmp_path / "0", base, 0, rank=8, targets=EVERY, lora_alpha=8),
        save_adapter(tmp_path / "1", base, 1, rank=32, targets=ATTENTION, lora_alpha=16),
    ]
    references = [base, *(merged_reference(folder, adapter) for adapter in adapters)]
    worn = [one for one in (None, *map(str, adapters)) for _ in PROMPTS]
    config = {"model": str(folder), "dtype": "bfloat16", "max_loras": 2, "num_pages": 400}
    config |= {"tp_size": 2, "enable_peer_memory": has_peers, "max_running_requests": 16}
    with running(config) as engine:
        sampling, prompts = [GREEDY] * len(worn), PROMPTS * len(references)
        rounds = engine.generate(prompts, sampling, 3, adapters=worn)
        replays = engine.counts()["decode_replays"]
        (bare,) = engine.generate(PROMPTS, [GREEDY] * len(PROMPTS))
        engine.end()
    assert replays >= GREEDY["max_tokens"]
    for index, reference in enumerate([*references, base]):
        own = [*rounds[-1], *bare][index * len(PROMPTS) : (index + 1) * len(PROMPTS)]
        found = gaps(reference.to(CUDA), own)
        assert (found > NEAR_TIE).float().mean() < MAX_SHARE, (index, found)
