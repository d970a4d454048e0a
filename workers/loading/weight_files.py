"""Names of the safetensors files that make a checkpoint. Opens its index only; no torch here."""

from pathlib import Path

import msgspec

from workers.errors import ModelLoadError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class _Index(msgspec.Struct):
    """weight_map: tensor -> file."""

    weight_map: dict[str, str]


def weight_file_names(folder: Path) -> list[str]:
    """Names of the safetensors files that make a folder's checkpoint, none of them opened.

    Raises ModelLoadError when there are none, when weights are pickled, or for a broken index.
    """
    if (folder / INDEX_FILE).is_file():
        return sorted(indexed_file_names(folder / INDEX_FILE))
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE]
    pickled = sorted(p.name for p in folder.iterdir() if p.suffix in _PICKLE_SUFFIXES)
    if pickled:
        raise ModelLoadError(
            f"{folder} has pickled weights ({', '.join(pickled[:3])}), which can run code when "
            f"read and are refused; convert them to safetensors ({SINGLE_FILE})"
        )
    raise ModelLoadError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}")


def indexed_file_names(index_path: Path) -> dict[str, list[str]]:
    """File -> names of its tensors, as a sharded checkpoint's index says."""
    try:
        index = msgspec.json.decode(index_path.read_bytes(), type=_Index)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{index_path} is not a safetensors index: {error!r}") from error
    names_of: dict[str, list[str]] = {}
    for name, file in index.weight_map.items():
        names_of.setdefault(file, []).append(name)
    for file in names_of:
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise ModelLoadError(f"{index_path} names {file!r}, not a safetensors file beside it")
    return names_of
