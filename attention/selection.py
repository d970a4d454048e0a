"""Which backend for this device, this model and these flags, and why, as text and as data.

An asked-for backend that cannot work is an error, never a silent second choice. The automatic
choice walks an order of preference (attention/preferences.py). Knows no engine flags and no model
files.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from attention.backends.base import AttentionBackend
from attention.capability import (
    AttentionBackendError,
    BackendCapability,
)
from attention.features import Feature
from attention.memory.layout import LatentEntry
from attention.preferences import DETERMINISTIC_FORMS, PREFERENCES, DeviceFacts
from attention.registry import ATTENTION_BACKENDS, BackendRegistry
from attention.visibility import CAUSAL_ONLY, VisibilityKind

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AttentionNeeds:
    """What the model and the flags ask of a backend. page_size: None leaves it to the backend.
    head_dims: elements of a K and of a V head, None where they do not matter. chunk_size: of
    needs_chunked_attention, 0 where it does not matter. latent: what a model with
    needs_mla keeps; None where its sizes do not matter. visibilities: that its steps have."""

    dtype: torch.dtype
    kv_dtype: torch.dtype
    page_size: int | None = None
    needs_sliding_window: bool = False
    needs_logit_cap: bool = False
    needs_sinks: bool = False
    needs_unequal_head_dims: bool = False
    needs_mla: bool = False
    needs_chunked_attention: bool = False
    needs_unlike_layers: bool = False
    needs_shared_kv: bool = False
    needs_cross_attention: bool = False
    needs_mixed_batches: bool = False
    needs_deterministic: bool = False
    head_dims: tuple[int, int] | None = None
    chunk_size: int = 0
    latent: LatentEntry | None = None
    visibilities: frozenset[VisibilityKind] = CAUSAL_ONLY

    @property
    def features(self) -> tuple[Feature, ...]:
        """What is needed, in the order in which a backend is asked for it."""
        needed = (
            (Feature.WINDOW, self.needs_sliding_window),
            (Feature.CAP, self.needs_logit_cap),
            (Feature.SINKS, self.needs_sinks),
            (Feature.UNEQUAL_HEAD_DIMS, self.needs_unequal_head_dims),
            (Feature.MLA, self.needs_mla),
            (Feature.HEADS, not self.needs_mla),
            (Feature.CHUNKS, self.needs_chunked_attention),
            (Feature.UNLIKE_LAYERS, self.needs_unlike_layers),
            (Feature.SHARED_KV, self.needs_shared_kv),
            (Feature.CROSS, self.needs_cross_attention),
            (Feature.MIXED, self.needs_mixed_batches),
            (Feature.DETERMINISTIC, self.needs_deterministic),
            *((Feature(kind.value), kind in self.visibilities) for kind in VisibilityKind),
        )
        return tuple(feature for feature, is_needed in needed if is_needed)


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """The backend to build and the page size to build its pool with.

    rejected: (name, why) of every backend that stood before the chosen one, in order.
    has_bounded_accounts: as BackendCapability.
    """

    name: str
    page_size: int
    reason: str
    rejected: tuple[tuple[str, str], ...]
    has_bounded_accounts: bool = False

    def __str__(self) -> str:
        lines = [f"attention backend {self.name}, page size {self.page_size}: {self.reason}"]
        lines += [f"  not {name}: {why}" for name, why in self.rejected]
        return "\n".join(lines)


def detect_device(device: torch.device) -> DeviceFacts:
    """Ask torch about a device. Initialises CUDA if device is a CUDA device."""
    if device.type != "cuda":
        return DeviceFacts(device.type, device.type.upper(), None)
    if torch.version.hip is not None:
        return DeviceFacts("rocm", torch.cuda.get_device_name(device), None)
    major, minor = torch.cuda.get_device_capability(device)
    return DeviceFacts("cuda", torch.cuda.get_device_name(device), (major, minor))


def why_unfit(
    capability: BackendCapability, device: DeviceFacts, needs: AttentionNeeds
) -> str | None:
    """The first thing the backend cannot do, or None. Loads no kernel."""
    if not capability.is_built:
        return f"is a name only: {capability.install_hint}"
    return unfit_device(capability, device) or _unfit_model(capability, needs)


def fitting_backends(
    device: DeviceFacts, needs: AttentionNeeds, registry: BackendRegistry = ATTENTION_BACKENDS
) -> tuple[str, ...]:
    """Names of all that can do it, if their packages load: first those of the order of preference,
    in that order. Loads no kernel."""
    names = [backend.capability.name for backend in registry]
    order = PREFERENCES[device.generation].of(needs.needs_mla, needs.needs_deterministic)
    fit = [n for n in names if why_unfit(registry.get(n).capability, device, needs) is None]
    return tuple(sorted(fit, key=lambda name: order.index(name) if name in order else len(order)))


def select_attention_backend(
    requested: str | None,
    device: DeviceFacts,
    needs: AttentionNeeds,
    registry: BackendRegistry = ATTENTION_BACKENDS,
) -> BackendChoice:
    """Choose a backend; requested None chooses automatically and logs the choice.

    Raises AttentionBackendError, with what is missing and how to install it, when the requested
    backend cannot work here or, in automatic choice, when none can.
    """
    if requested is not None:
        return _requested(_needed_form(requested, needs, registry), device, needs, registry)
    names = PREFERENCES[device.generation].of(needs.needs_mla, needs.needs_deterministic)
    rejected: list[tuple[str, str]] = []
    for name in names:
        backend = registry.get(name)
        obstacle = _obstacle(backend, device, needs)
        if obstacle is None:
            kind = "MLA" if needs.needs_mla else "MHA and GQA"
            reason = f"the first that works on {device} of the order for {kind}: {', '.join(names)}"
            page_size = _page_size(backend.capability, needs)
            has_accounts = backend.capability.has_bounded_accounts
            choice = BackendChoice(name, page_size, reason, tuple(rejected), has_accounts)
            logger.info("%s", choice)
            return choice
        rejected.append((name, obstacle))
    tried = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise AttentionBackendError(f"no attention backend works on {device}: {tried}")


def _needed_form(
    name: str, needs: AttentionNeeds, registry: BackendRegistry
) -> type[AttentionBackend]:
    """The backend of that name, or its deterministic form where that is needed and there is one."""
    return registry.get(DETERMINISTIC_FORMS.get(name, name) if needs.needs_deterministic else name)


def _requested(
    backend: type[AttentionBackend],
    device: DeviceFacts,
    needs: AttentionNeeds,
    registry: BackendRegistry,
) -> BackendChoice:
    capability = backend.capability
    obstacle = _obstacle(backend, device, needs)
    if obstacle is not None:
        raise AttentionBackendError(
            f"attention backend {capability.name!r} was asked for but {obstacle}; "
            f"{_instead(device, needs, registry)}"
        )
    page_size, has_accounts = _page_size(capability, needs), capability.has_bounded_accounts
    return BackendChoice(capability.name, page_size, "asked for", (), has_accounts)


def _instead(device: DeviceFacts, needs: AttentionNeeds, registry: BackendRegistry) -> str:
    """What else may be asked for. Loads no kernel."""
    fit = fitting_backends(device, needs, registry)
    if not fit:
        return "no other backend fits this model on this device either"
    return f"what fits this model on {device}: {', '.join(fit)} (without a name one is chosen)"


def _obstacle(
    backend: type[AttentionBackend], device: DeviceFacts, needs: AttentionNeeds
) -> str | None:
    """Why the backend cannot be used; probes its kernels only when nothing else speaks against."""
    capability = backend.capability
    unfit = why_unfit(capability, device, needs)
    if unfit is not None:
        return unfit
    probe = backend.probe()
    if probe.is_available:
        return None
    return f"cannot load: {probe.missing}; to install: {capability.install_hint}"


def _page_size(capability: BackendCapability, needs: AttentionNeeds) -> int:
    return capability.default_page_size if needs.page_size is None else needs.page_size


def unfit_device(capability: BackendCapability, device: DeviceFacts) -> str | None:
    """Why the backend has no kernels for the device, or None. Loads none."""
    if device.device_type not in capability.device_types:
        return f"runs on {', '.join(capability.device_types)}, not on {device}"
    if device.compute_capability is None:
        return None
    lowest, highest = capability.min_compute_capability, capability.max_compute_capability
    if lowest is not None and device.compute_capability < lowest:
        return f"needs sm{lowest[0]}{lowest[1]} or newer, this is {device}"
    if highest is not None and device.compute_capability > highest:
        return f"has no kernels beyond sm{highest[0]}{highest[1]}, this is {device}"
    return None


def _unfit_model(capability: BackendCapability, needs: AttentionNeeds) -> str | None:
    if needs.dtype not in capability.dtypes:
        return f"does not compute in {needs.dtype}, only in {_listed(capability.dtypes)}"
    if needs.kv_dtype not in capability.kv_dtypes:
        known = _listed(capability.kv_dtypes)
        return f"does not read a KV cache in {needs.kv_dtype}, only in {known}"
    if needs.page_size is not None and needs.page_size not in capability.page_sizes:
        known = page_sizes_text(capability.page_sizes)
        return f"does not work with page size {needs.page_size}, only with {known}"
    for feature in needs.features:
        if feature not in capability.features:
            why = capability.why_not.get(feature)
            return f"has no {feature}, which this model needs" + (f": {why}" if why else "")
    return (
        _unfit_chunks(capability, needs)
        or _unfit_latent(capability, needs.latent)
        or _unfit_heads(capability, needs)
    )


def page_sizes_text(sizes: Sequence[int]) -> str:
    """As "1 to 256" or "32, 64"."""
    if len(sizes) > 2 and list(sizes) == list(range(sizes[0], sizes[-1] + 1)):
        return f"{sizes[0]} to {sizes[-1]}"
    return _listed(sizes)


def _listed(what: Iterable[object]) -> str:
    return ", ".join(map(str, what))


def _unfit_heads(capability: BackendCapability, needs: AttentionNeeds) -> str | None:
    """Of models that keep K and V of heads."""
    if needs.head_dims is None or needs.needs_mla:
        return None
    k_dim, v_dim = needs.head_dims
    known = capability.head_dims
    if known is not None and not (k_dim in known and v_dim in known):
        steps = f" in steps of {known.step}" if isinstance(known, range) else ""
        sizes = f"{known[0]} to {known[-1]}" if isinstance(known, range) else _listed(known)
        return (
            f"has kernels for heads of {sizes} elements{steps}, this model's have {k_dim} and "
            f"{v_dim}"
        )
    pairs = capability.unequal_head_dims
    if k_dim == v_dim or not pairs or any(k_dim in ks and v_dim in vs for ks, vs in pairs):
        return None
    known_pairs = " or ".join(f"{ks[0]} to {ks[-1]} beside {vs[0]} to {vs[-1]}" for ks, vs in pairs)
    return (
        f"has kernels for K and V heads of unlike sizes where they have {known_pairs} elements, "
        f"this model's have {k_dim} and {v_dim}"
    )


def _unfit_chunks(capability: BackendCapability, needs: AttentionNeeds) -> str | None:
    page_size = _page_size(capability, needs)
    if capability.has_chunks_of_any_size or needs.chunk_size % page_size == 0:
        return None
    return (
        f"has chunks of whole pages only, this model's {needs.chunk_size} tokens are none of "
        f"{page_size}"
    )


def _unfit_latent(capability: BackendCapability, latent: LatentEntry | None) -> str | None:
    if latent is None:
        return None
    sizes = (
        ("latents", latent.latent_dim, capability.latent_dims),
        ("rotated key parts", latent.rope_dim, capability.latent_rope_dims),
    )
    for what, size, known in sizes:
        if known is not None and size not in known:
            return (
                f"has kernels for {what} of {known[0]} to {known[-1]} elements in steps of "
                f"{known.step}, this model has {size}"
            )
    return None
