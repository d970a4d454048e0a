"""What a model is called and where its small files are, without loading torch for it."""

from pathlib import Path

from workers.builtin import builtin_draft_path, builtin_model_path

BUILTIN_FOLDERS = {"builtin": builtin_model_path, "builtin-draft": builtin_draft_path}


def model_folder(model: str) -> Path:
    """Where the tokenizer of EngineConfig.model is."""
    return BUILTIN_FOLDERS[model]() if model in BUILTIN_FOLDERS else Path(model).expanduser()


def model_name(model: str) -> str:
    """What clients call it unless it is told another name: the built-in's own or the folder's."""
    return model if model in BUILTIN_FOLDERS else model_folder(model).resolve().name
