"""How many layers of a model without memory stay in the format that a checkpoint has them in."""

from collections import Counter
from dataclasses import dataclass

from workers.layers.formats.layer import (
    FormatSlot,
    FormattedLayer,
    LinearLayer,
    StoredLayer,
    StoredTensors,
)
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.stored import StoredSlot


@dataclass(frozen=True, slots=True)
class StoredFormat:
    """title: as WeightFormat.title; of a layer of several, joined by " + ". A layer: a matrix, or
    all experts of a mixture."""

    title: str
    num_kept: int
    num_dequantised: int


def settle_formats(stored: StoredTensors) -> tuple[StoredFormat, ...]:
    """Gives every layer of a model on the meta device the weight that it will have."""
    titles: dict[LinearLayer | FormattedLayer, dict[str, None]] = {}
    for slot in stored.slots.values():
        if isinstance(slot, StoredSlot) and isinstance(slot.layer, LinearLayer | FormattedLayer):
            titles.setdefault(slot.layer, {})[slot.format_title] = None
    for layer in _stored_layers(stored):
        layer.settle_unread()
    kept: Counter[str] = Counter()
    dequantised: Counter[str] = Counter()
    for one, formats in titles.items():
        names = " + ".join(title for title in formats if title != PLAIN.title)
        (kept if one.is_kept else dequantised)[names] += 1
    names_in_order = dict.fromkeys((*kept, *dequantised))
    return tuple(StoredFormat(name, kept[name], dequantised[name]) for name in names_in_order)


def _stored_layers(stored: StoredTensors) -> dict[StoredLayer, None]:
    """Each once: a layer has several slots."""
    slots = (slot for slot in stored.slots.values() if isinstance(slot, FormatSlot))
    return {slot.stored: None for slot in slots if isinstance(slot.stored, StoredLayer)}
