"""A step's results on their way from the device to the host."""

from dataclasses import dataclass

import msgspec
import torch

from workers.pooling.states import PooledStates
from workers.sampling.logprobs import LogprobTensors, pack_logprobs
from workers.sampling.state import SampledTokens
from workers.scheduler.plan import PromptLogprobRow, StepResult


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A step's results on their way to the host; readable once the device has passed.

    chunk_has_nan: bool (num rows that sample nothing,), None where every row samples. pooled: None
    where no row is.
    """

    sampled: SampledTokens
    prompt_logprobs: tuple[tuple[PromptLogprobRow, LogprobTensors], ...] = ()
    chunk_has_nan: torch.Tensor | None = None
    pooled: PooledStates | None = None

    def read(self) -> StepResult:
        return msgspec.structs.replace(
            self.sampled.read(),
            prompt_logprobs={
                row.row: pack_logprobs(tensors) for row, tensors in self.prompt_logprobs
            },
            chunk_has_nan=() if self.chunk_has_nan is None else tuple(self.chunk_has_nan.tolist()),
            pooled=() if self.pooled is None else self.pooled.read(),
        )
