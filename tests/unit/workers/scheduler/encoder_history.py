"""What encoders made, as history_runner.py keeps it: values by page, found by a slot's table."""

import numpy as np

from workers.engine.encoder_input import EncoderInput, SourceTokens
from workers.scheduler.config import SchedulerConfig
from workers.scheduler.encoder_plan import EncoderGrant, EncoderPlan

NOTHING = np.zeros(0, dtype=np.uint64)


def encoded(source: EncoderInput | None) -> np.ndarray:
    """What an encoder makes of an input, uint64 (n,)."""
    if not isinstance(source, SourceTokens):
        return NOTHING
    rng = np.random.default_rng(int(source.digest, 16))
    return rng.integers(0, 2**63, len(source.token_ids), dtype=np.uint64)


class EncoderHistory:
    """num_encoded: inputs that were read."""

    def __init__(self, config: SchedulerConfig) -> None:
        self._page_size = config.page_size
        num_pages = 0 if config.encoder is None else config.encoder.num_pages
        rng = np.random.default_rng(2)
        self._pool = rng.integers(0, 2**63, num_pages * config.page_size, dtype=np.uint64)
        self._table: dict[int, np.ndarray] = {}
        self.num_encoded = 0

    def forget(self, slot: int) -> None:
        """Somebody else has the slot."""
        self._table.pop(slot, None)

    def apply(self, plan: EncoderPlan) -> None:
        self._pool[plan.cleared] = 0
        for grant in plan.grants:
            self._grant(grant)

    def _grant(self, grant: EncoderGrant) -> None:
        assert grant.pages.dtype == np.int32
        assert grant.pages.min() >= 1, "page 0 is for padding"
        offsets = np.arange(self._page_size, dtype=np.int32)
        indices = (grant.pages[:, None] * np.int32(self._page_size) + offsets).ravel()
        self._table[grant.slot] = indices[: grant.num_tokens]
        if grant.source is not None:
            self.num_encoded += 1
            self._pool[self._table[grant.slot]] = encoded(grant.source)

    def values(self, slot: int) -> np.ndarray:
        """What the slot's encoder made, uint64 (n,)."""
        return self._pool[self._table[slot]] if len(self._pool) else NOTHING

    def spoil(self, plan: EncoderPlan, slot: int) -> None:
        """Nobody knows how far the slot's encoder came, if it was to read in this plan."""
        for grant in plan.grants:
            if grant.slot == slot and grant.source is not None:
                self._pool[self._table[slot]] ^= np.uint64((1 << 64) - 1)
