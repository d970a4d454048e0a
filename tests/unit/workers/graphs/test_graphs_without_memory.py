"""Steps whose sampling runs out of memory behind their replay, on a CPU."""

import pytest
import torch

from tests.fakes.tiny_models import NATIVE, save_tiny_model
from tests.unit.workers.graphs.test_decode_graphs import (
    CPU,
    RANDOM,
    GraphedCpuRunner,
    config_of,
    generate,
    prompts_of,
)
from workers.parallel.group import SingleRank
from workers.runner.model_runner import ModelRunner
from workers.sampling.state import SamplingState


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(save_tiny_model(NATIVE["llama3"], tmp_path_factory.mktemp("graphs")))


def test_sampling_that_lacks_memory_behind_a_replay_is_repeated_from_the_same_tokens(
    folder, monkeypatch
) -> None:
    """The graph has already put greedy tokens in the place of what its slots sampled last."""
    config = config_of(folder)
    prompts = prompts_of(3)
    eager = generate(config, ModelRunner(config, SingleRank(), CPU, print), prompts, RANDOM)
    runner = GraphedCpuRunner(config, SingleRank(), CPU, print)
    runner.use_graphs([4])
    runner.graphs.capture(4)
    sample, num_refused = SamplingState.sample, []

    def one_row(self, logits, slots, seq_lens, drafts=None):
        if len(slots) > 1:
            num_refused.append(runner.capturer.num_replays)
            raise torch.OutOfMemoryError("injected")
        return sample(self, logits, slots, seq_lens, drafts)

    monkeypatch.setattr(SamplingState, "sample", one_row)
    graphed = generate(config, runner, prompts, RANDOM)
    assert [r.token_ids for r in graphed] == [r.token_ids for r in eager]
    assert max(num_refused) > RANDOM.max_tokens
