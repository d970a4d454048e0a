"""A head that drafts, as it is loaded: what attention is chosen for. Knows no file."""

from dataclasses import dataclass

import torch

from attention import AttentionConfig
from workers.models.eagle_head import EagleHead
from workers.models.mtp_head import MtpHead


@dataclass(frozen=True, slots=True)
class LoadedHead:
    """In eval mode with its weights, on one rank. hidden_size: of a state. taps_final_states:
    whether it reads the target's final states, of every token, in place of ModelOutput.taps.
    num_taps: how many states of each token it reads."""

    model: EagleHead | MtpHead
    hidden_size: int
    max_context_len: int
    dtype: torch.dtype
    device: torch.device
    taps_final_states: bool = False
    num_taps: int = 1

    def attention_config(self, page_size: int, kv_dtype: torch.dtype) -> AttentionConfig:
        """As LoadedModel.attention_config."""
        return self.model.geometry.attention_config(
            self.max_context_len, page_size, self.dtype, kv_dtype, self.device
        )
