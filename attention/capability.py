"""What a backend declares about itself. Knows no backend and chooses none."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from attention.features import Feature
from attention.visibility import CAUSAL_ONLY, VisibilityKind

ComputeCapability = tuple[int, int]

_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class AttentionBackendError(RuntimeError):
    """An attention backend that cannot be had: unknown, not loadable here, or unfit for the model.

    The message says what is missing and how to get it.
    """


@dataclass(frozen=True, slots=True)
class BackendProbe:
    """Whether a backend's kernels can be loaded here. missing names the exact package if not."""

    is_available: bool
    missing: str = ""


@dataclass(frozen=True, slots=True)
class BackendCapability:
    """What a backend can do, stated without loading its kernels.

    device_types: torch device types. min_compute_capability, max_compute_capability: inclusive
    bounds on a CUDA device, None where there is no bound. kv_dtypes: what the pool may hold.
    default_page_size: tokens a page, the backend's own best. has_unequal_head_dims: V heads of
    another size than K heads. has_mixed_batches: one-token rows and longer rows in one EXTEND step.
    has_chunked_attention: queries that see their own chunk of positions only.
    has_chunks_of_any_size: not only of whole pages. has_unlike_layers: layers with heads of their
    own. has_shared_kv: layers that read the K and V of earlier ones. has_bounded_accounts: layers
    whose tokens stand in a page table of their own while they can be seen, and no longer.
    has_cross_attention: layers that see an encoder's tokens. latent_dims, latent_rope_dims: sizes
    of latents and of their rotated parts that kernels are built for, None for any. head_dims:
    elements of K and of V heads that kernels are built for, None for any. unequal_head_dims: the
    pairs of them that may differ, empty for any. has_heads: models that keep K and V of heads.
    visibilities: what a step's new tokens may see.
    is_deterministic: a row's bits are the same whatever shares its batch, in every kind of step.
    is_fallback: made for what others cannot do rather than to be fast.
    is_built: False of a name that only says what it would take.
    why_not: by what is not there, a short sentence for whoever needs it; what is there may have
    one too, of the backend that this one is made from. install_hint: a command or a sentence for
    the operator.
    """

    name: str
    device_types: tuple[str, ...]
    min_compute_capability: ComputeCapability | None
    max_compute_capability: ComputeCapability | None
    dtypes: tuple[torch.dtype, ...]
    kv_dtypes: tuple[torch.dtype, ...]
    page_sizes: Sequence[int]
    default_page_size: int
    has_sliding_window: bool
    has_logit_cap: bool
    has_sinks: bool
    has_unequal_head_dims: bool
    has_mixed_batches: bool
    has_mla: bool
    install_hint: str
    has_chunked_attention: bool = False
    has_chunks_of_any_size: bool = True
    has_unlike_layers: bool = False
    has_shared_kv: bool = False
    has_bounded_accounts: bool = False
    has_cross_attention: bool = False
    latent_dims: range | None = None
    latent_rope_dims: range | None = None
    head_dims: Sequence[int] | None = None
    unequal_head_dims: tuple[tuple[range, range], ...] = ()
    has_heads: bool = True
    visibilities: frozenset[VisibilityKind] = CAUSAL_ONLY
    is_deterministic: bool = False
    is_fallback: bool = False
    is_built: bool = True
    why_not: Mapping[Feature, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.default_page_size not in self.page_sizes:
            raise ValueError(
                f"{self.name}: default_page_size={self.default_page_size} is not in page_sizes"
            )

    @property
    def features(self) -> frozenset[Feature]:
        """All but CUDA graphs, which a class has or has not."""
        declared = {
            Feature.HEADS: self.has_heads,
            Feature.MLA: self.has_mla,
            Feature.EXTEND: self.is_built,
            Feature.DECODE: self.is_built,
            Feature.MIXED: self.has_mixed_batches,
            Feature.VERIFY: self.is_built,
            Feature.WINDOW: self.has_sliding_window,
            Feature.CHUNKS: self.has_chunked_attention,
            Feature.CAP: self.has_logit_cap,
            Feature.SINKS: self.has_sinks,
            Feature.UNEQUAL_HEAD_DIMS: self.has_unequal_head_dims,
            Feature.UNLIKE_LAYERS: self.has_unlike_layers,
            Feature.SHARED_KV: self.has_shared_kv,
            Feature.BOUNDED_ACCOUNTS: self.has_bounded_accounts,
            Feature.CROSS: self.has_cross_attention,
            Feature.FP8_KV: any(dtype in _FP8 for dtype in self.kv_dtypes),
            Feature.DETERMINISTIC: self.is_deterministic,
        }
        kinds = self.visibilities if self.is_built else ()
        seen = (Feature(kind.value) for kind in kinds)
        return frozenset((*(what for what, is_there in declared.items() if is_there), *seen))
