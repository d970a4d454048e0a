"""What a plan says of encoders: whose input is read before the step, and where its tokens stand."""

import msgspec

from workers.engine.encoder_input import EncoderInput
from workers.kv_cache.radix_node import EMPTY, IntArray


class EncoderGrant(msgspec.Struct, frozen=True):
    """A slot sees num_tokens encoder tokens on pages int32 (n,), in order, from this step on.

    source: what the encoder makes them of before the step; None where the pages hold them already.
    """

    slot: int
    num_tokens: int
    pages: IntArray
    source: EncoderInput | None


class EncoderPlan(msgspec.Struct, frozen=True):
    """cleared: cache indices int32 (n,) of the encoder's account, as StepPlan.cleared. They become
    zeros first; then grants take effect, in their order."""

    cleared: IntArray = EMPTY
    grants: tuple[EncoderGrant, ...] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each input that is read."""
        return [grant.num_tokens for grant in self.grants if grant.source is not None]

    def of_slots(self, slots: IntArray) -> "EncoderPlan":
        """Its grants to these alone, int32 (n,); what is cleared stays."""
        chosen = set(slots.tolist())
        return EncoderPlan(self.cleared, tuple(one for one in self.grants if one.slot in chosen))
