"""Which architectures of the installed transformers decode graphs can hold: a trial of each."""

import re
from collections import defaultdict
from multiprocessing import get_context

import pytest
import torch

from tests.fakes.architecture_trial import architectures
from tests.fakes.tiny_configs import MAX_POSITIONS
from tests.fakes.tiny_reference import NotBuiltError, config_of
from workers.errors import ConfigError, ModelLoadError
from workers.layers.sharding import ShardContext
from workers.models.transformers_bridge import bridged
from workers.models.transformers_model import TransformersCausalLM, random_transformers_model
from workers.parallel.group import SingleRank

TASKS_PER_PROCESS = 100
TIMEOUT_S = 120.0
# Its experts take turns on the host, or it makes tensors of Python values in every step.
KNOWN = {"chameleon", "dbrx", "gemma3n_text", "jetmoe", "kimi_k25", "longcat_flash"}
KNOWN |= {"muse_glimmer", "muse_spark", "step3p7"}


def obstacle_of(architecture: tuple[str, str]) -> str | None:
    """None where the model cannot be built, or runs in another way than as one flat batch without
    states."""
    torch.set_num_threads(1)
    shard = ShardContext(SingleRank(), torch.float32, torch.device("cpu"))
    try:
        config = config_of(*architecture, {})
        model = bridged(random_transformers_model(config, shard, 0), MAX_POSITIONS)
    except (NotBuiltError, ModelLoadError, ConfigError):
        return None
    is_flat = isinstance(model, TransformersCausalLM) and not model.state_entries
    return model.capture_obstacle(MAX_POSITIONS) if is_flat else None


@pytest.mark.timeout(1800)
def test_nearly_all_flat_models_are_captured_and_the_rest_named() -> None:
    names, found = architectures(), defaultdict(list)
    with get_context("spawn").Pool(1, maxtasksperchild=TASKS_PER_PROCESS) as pool:
        obstacles = pool.imap(obstacle_of, names)
        for model_type, _ in names:
            found[obstacles.next(TIMEOUT_S)].append(model_type)
    found.pop(None)
    captured = found.pop("")
    assert len(captured) >= 150
    assert {name for refused in found.values() for name in refused} <= KNOWN
    assert all(re.search(r"\(modeling_\w+\.py:\d+, \w+\)$", obstacle) for obstacle in found)
