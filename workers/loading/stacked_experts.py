"""Whether a checkpoint has a layer's experts in one tensor. Reads names of tensors only."""

from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from workers.loading.weight_files import INDEX_FILE, SINGLE_FILE, indexed_file_names

_STACK = ".experts.gate_up_proj"
"""What transformers calls one of its two tensors, and saves it as where it is asked to."""


def has_stacked_experts(folder: Path) -> bool:
    """False where there are no weights yet or their names cannot be read, which loading says.
    Raises ModelLoadError for a broken index."""
    return any(name.endswith(_STACK) for name in _names_in(folder))


def _names_in(folder: Path) -> Iterable[str]:
    if (folder / INDEX_FILE).is_file():
        names_of = indexed_file_names(folder / INDEX_FILE)
        return [name for names in names_of.values() for name in names]
    if not (folder / SINGLE_FILE).is_file():
        return ()
    try:
        with safe_open(folder / SINGLE_FILE, framework="pt") as tensors:
            return list(tensors.keys())
    except (OSError, SafetensorError):
        return ()
