"""Tiny models through an engine on a GPU, beside transformers' own code on the same GPU."""

from dataclasses import dataclass

import numpy as np
import torch

from tests.gpu.engines import CUDA
from tests.gpu.no_waiting import no_waiting
from workers.engine.engine import Engine
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner


@dataclass(frozen=True)
class Comparison:
    """Of all chosen tokens. gaps: how far each one's logit is below the likeliest one's in a pass
    of transformers without a cache. errors: of its log probability, where the engine told it."""

    gaps: np.ndarray
    errors: np.ndarray

    def __str__(self):
        errors = f", errors up to {self.errors.max():.2e}" if len(self.errors) else ""
        return (
            f"{len(self.gaps)} tokens, likeliest {(self.gaps == 0).mean():.3f}, "
            f"gaps up to {self.gaps.max():.3f}{errors}"
        )


@torch.inference_mode()
def compare(logits_of, prompts, results):
    """logits_of: (index of the prompt, token ids) -> logits (len, vocabulary) of transformers."""
    gaps, errors = [], []
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        assert result.error is None, result.error
        text = [*prompt, *result.token_ids]
        logits = logits_of(index, text)[len(prompt) - 1 : -1].float()
        chosen = torch.tensor(result.token_ids, device=logits.device)[:, None]
        of_chosen = logits.gather(1, chosen)[:, 0]
        gaps.append((logits.max(dim=-1).values - of_chosen).cpu().numpy())
        if result.logprobs and result.logprobs[0] is not None:
            ours = np.array([entry.logprob for entry in result.logprobs])
            theirs = logits.log_softmax(-1).gather(1, chosen)[:, 0].cpu().numpy()
            errors.append(np.abs(ours - theirs))
    return Comparison(np.concatenate(gaps), np.concatenate(errors) if errors else np.empty(0))


@torch.inference_mode()
def largest_differences(logits_of, others_of, prompts, results):
    """Between two ways to compute the logits that each token was chosen from."""
    found = []
    for index, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
        text = [*prompt, *result.token_ids]
        differences = (logits_of(index, text).float() - others_of(index, text).float()).abs()
        found.append(differences.amax(dim=-1)[len(prompt) - 1 : -1].cpu().numpy())
    return np.concatenate(found)


class GpuEngine:
    """An engine whose graphs are captured beforehand; counts replays and eager steps."""

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

    def generate(self, prompts, sampling, *rest):
        results = self.engine.generate(prompts, sampling, *rest)
        self.engine.check_integrity()
        return results

    def launch_strictly(self, is_strict=lambda plan: True):
        """From here on a launch of such a plan that waits for the device is an error."""
        launch = self.runner.launch

        def launch_strictly(plan):
            if not is_strict(plan):
                return launch(plan)
            with no_waiting():
                return launch(plan)

        self.engine._executor._launch = launch_strictly

    def close(self):
        self.engine.close()
