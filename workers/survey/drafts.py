"""Which methods of speculation a model takes. Knows no drafter."""

from collections.abc import Callable

from attention.memory.slot_states import StateEntry
from workers.loading.mtp_head import LAYERS
from workers.models.base import AttentionGeometry
from workers.models.features import BRIDGED, ModelCapability, ModelFeature
from workers.speculation.config import METHODS, METHODS_ON_CPU_ONLY, Method


def draft_methods(
    capability: ModelCapability,
    geometry: AttentionGeometry | None,
    state_entries: tuple[StateEntry, ...] | None,
    num_gpus: int,
) -> dict[str, str]:
    """Method -> why not, "" where it takes it. num_gpus: 0 for a CPU."""
    general = _general_obstacle(capability, geometry, state_entries)
    return {
        method: general
        or (
            _device_obstacle(method, num_gpus) or _OBSTACLES[method](capability, geometry)
            if method in _OBSTACLES
            else ""
        )
        for method in METHODS
    }


def _device_obstacle(method: Method, num_gpus: int) -> str:
    is_refused = num_gpus > 0 and method in METHODS_ON_CPU_ONLY
    return "drafters of blocks run on CPU only so far" if is_refused else ""


def _general_obstacle(
    capability: ModelCapability,
    geometry: AttentionGeometry | None,
    state_entries: tuple[StateEntry, ...] | None,
) -> str:
    stated = capability.why_not.get(ModelFeature.SPECULATION, "")
    if stated:
        return stated
    if state_entries:
        return "a recurrent state cannot forget a wrong draft"
    layers = () if geometry is None else geometry.layers
    if any(layer.sliding_window_size > 0 or layer.chunk_size > 0 for layer in layers):
        return "layers with windows or chunks take no drafts yet"
    return ""


def _draft_model_obstacle(capability: ModelCapability, geometry: AttentionGeometry | None) -> str:
    if geometry is not None and geometry.latent is not None:
        return "a draft model shares the pages of keys and values, not of latents"
    return ""


def _head_obstacle(capability: ModelCapability, geometry: AttentionGeometry | None) -> str:
    if capability in BRIDGED:
        return "transformers' code hands over no states of its layers"
    return ""


def _mtp_obstacle(capability: ModelCapability, geometry: AttentionGeometry | None) -> str:
    if capability.subject not in LAYERS:
        return "checkpoints of its kind have no layer for multi-token prediction that is read"
    return ""


_OBSTACLES: dict[str, Callable[[ModelCapability, AttentionGeometry | None], str]] = {
    "draft": _draft_model_obstacle,
    "eagle3": _head_obstacle,
    "mtp": _mtp_obstacle,
    "dflash": _head_obstacle,
}
