"""What a target's pass hands over to who proposes drafts, beside what was sampled."""

import numpy as np
import torch

from workers.scheduler.plan import IntArray


class StepTaps:
    """What the target's pass of the step under way handed over. states: ModelOutput.taps. num_new:
    host int32 (bs,), how many of its tokens are of each row."""

    def __init__(self) -> None:
        self.states: tuple[torch.Tensor, ...] = ()
        self.num_new: IntArray = np.zeros(0, dtype=np.int32)

    def put(self, states: tuple[torch.Tensor, ...], num_new: IntArray) -> None:
        self.states, self.num_new = states, num_new
