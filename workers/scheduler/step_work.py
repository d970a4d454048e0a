"""What a step has to do, in the few numbers that its duration depends on."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workers.scheduler.plan import StepPlan

Features = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepWork:
    """num_prompt_keys: pairs of a new prompt token and a key that it attends to. What encoders
    compute, of images too, counts as prompts whose tokens see each other. num_decode_rows: of a
    run, a row for each token. num_decode_keys: keys that all decode rows together read."""

    num_prompt_tokens: int
    num_prompt_keys: float
    num_decode_rows: int
    num_decode_keys: int

    @classmethod
    def of(cls, plan: StepPlan) -> "StepWork":
        new, prefix = plan.num_new_tokens, plan.prefix_lens
        is_decode = plan.decode_rows
        num_decode = int(new.sum(where=is_decode))
        keys = int((prefix * new).sum(where=is_decode, dtype=np.int64)) + num_decode
        encoded = [*plan.encoder.lengths, *plan.media.lengths]
        if is_decode.all() and not encoded:
            return cls(0, 0.0, num_decode, keys)
        tokens, before = new[~is_decode].astype(np.float64), prefix[~is_decode]
        pairs = float((tokens * (before + 0.5 * tokens)).sum())
        pairs += float(sum(length * length for length in encoded))
        return cls(int(tokens.sum()) + sum(encoded), pairs, num_decode, keys)

    @property
    def features(self) -> Features:
        """float64 (5,): a constant, prompt tokens and keys, decode rows and keys."""
        return np.array(
            (
                1.0,
                self.num_prompt_tokens,
                self.num_prompt_keys,
                self.num_decode_rows,
                self.num_decode_keys,
            )
        )
