"""What a backend may be able to do, one name each: cells of the matrix, needs of a model, proofs.

Knows no backend. The value is the feature's name in messages ("has no sliding windows") and, with
a capital, in docs/attention-backends.md, in whose order they stand here.
"""

from __future__ import annotations

from enum import StrEnum

from attention.visibility import VisibilityKind


class Feature(StrEnum):
    """EXTEND: rows of many new tokens behind cached ones. MIXED: such rows beside rows of one.
    VERIFY: rows of a few drafts behind cached tokens, seen causally; trees are TREE."""

    HEADS = "K and V of heads"
    MLA = "multi-head latent attention"
    EXTEND = "prefill"
    DECODE = "decode"
    MIXED = "prefill and decode in one step"
    VERIFY = "verification of drafts"
    GRAPHS = "CUDA graphs"
    WINDOW = "sliding windows"
    CHUNKS = "attention in chunks"
    CAP = "logit caps"
    SINKS = "attention sinks"
    UNEQUAL_HEAD_DIMS = "V heads of another size than K heads"
    UNLIKE_LAYERS = "layers that differ in heads or head size"
    SHARED_KV = "layers that read the KV cache of others"
    BOUNDED_ACCOUNTS = "windows and chunks in memory of their own"
    CROSS = "cross-attention"
    CAUSAL = VisibilityKind.CAUSAL.value
    TREE = VisibilityKind.TREE.value
    ITEMS = VisibilityKind.ITEMS.value
    EVERYTHING = VisibilityKind.EVERYTHING.value
    FP8_KV = "FP8 KV cache"
    DETERMINISTIC = "results that do not depend on what shares the batch (deterministic mode)"

    @property
    def label(self) -> str:
        """At the beginning of a row of a table."""
        return self.value[0].upper() + self.value[1:]
