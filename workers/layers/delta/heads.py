"""The heads of a gated delta rule, and which of them a rank has. Knows no tensor."""

from __future__ import annotations

from dataclasses import dataclass

from workers.layers.sharding import divide


@dataclass(frozen=True, slots=True)
class DeltaHeads:
    """value_heads are a multiple of key_heads: neighbours share a key. taps: of the convolution."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int

    def of_rank(self, tp_size: int) -> DeltaHeads:
        """As many as one rank has: whole key heads with all of their value heads. Raises
        ConfigError where they cannot be divided."""
        return DeltaHeads(
            divide(self.key_heads, tp_size, "linear_num_key_heads"),
            divide(self.value_heads, tp_size, "linear_num_value_heads"),
            self.key_dim,
            self.value_dim,
            self.taps,
        )

    @property
    def share(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads

    @property
    def keys(self) -> int:
        """Channels of all key heads."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """What the convolution takes: queries, keys and values."""
        return 2 * self.keys + self.values
