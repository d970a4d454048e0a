"""The triton backend for results that do not depend on what shares a step (deterministic mode).

One kernel of one shape for prompts and decode alike, so that a token's bits are those of its own
keys: in any batch, cut into any chunks, computed anew after a retraction. Knows no request.
"""

from __future__ import annotations

from dataclasses import replace

from attention.backends.triton_decoder import TritonDecoder
from attention.backends.triton_paged import TritonBackend
from attention.capability import BackendCapability
from attention.features import Feature
from attention.kernels.paged_extend import InvariantExtend, PagedExtend
from attention.registration import register_attention_backend
from attention.visibility import CAUSAL_ONLY


@register_attention_backend("triton_deterministic")
class DeterministicTritonBackend(TritonBackend):
    """triton without the kernels that choose tiles and splits by the step. Slower where few rows
    have many keys."""

    capability: BackendCapability = replace(
        TritonBackend.capability,
        name="triton_deterministic",
        has_mla=False,
        visibilities=CAUSAL_ONLY,
        is_deterministic=True,
        why_not={
            **TritonBackend.capability.why_not,
            Feature.MLA: "it attends over heads; triton reads latents",
            Feature.TREE: "how many drafts there are would choose its tiles; triton has them",
            Feature.ITEMS: "its tiles are those of prompts; triton has them",
            Feature.EVERYTHING: "its tiles are those of prompts; triton has it",
            Feature.FP8_KV: "it reads a pool of the model's dtype",
        },
    )

    def _make_extend(self) -> PagedExtend:
        return InvariantExtend(self._geometry(), self._limits)

    def _make_decoder(self) -> TritonDecoder | None:
        return None
