"""What a model is called and where its small files are, without loading torch for it."""

import re
from pathlib import Path

from workers.builtin import builtin_draft_path, builtin_model_path

BUILTIN_FOLDERS = {"builtin": builtin_model_path, "builtin-draft": builtin_draft_path}
# As the hub's own rule: an owner and a name, or, for a few old models, a name alone.
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}(/[A-Za-z0-9][A-Za-z0-9._-]{0,95})?")


def is_hub_id(model: str) -> bool:
    """Whether an EngineConfig.model can only be an id of the hub: a folder of that name wins."""
    if model in BUILTIN_FOLDERS or not _HUB_ID.fullmatch(model) or ".." in model or "--" in model:
        return False
    return not Path(model).is_dir()


def model_folder(model: str) -> Path:
    """Where the tokenizer of an EngineConfig.model is that is no id of the hub."""
    return BUILTIN_FOLDERS[model]() if model in BUILTIN_FOLDERS else Path(model).expanduser()


def model_name(model: str) -> str:
    """What clients call it unless it is told another name: the built-in's own, the id at the hub,
    or the folder's name."""
    if model in BUILTIN_FOLDERS or is_hub_id(model):
        return model
    return model_folder(model).resolve().name
