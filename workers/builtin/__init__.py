"""The model that ships with Tessera: where its files are.

A Llama of about 7 M parameters and a draft of about 1 M, trained by `workers.builtin.train` on the
Python standard library, and an EAGLE-3 head of the Llama's, by `workers.builtin.train_eagle`. Knows
paths only: loading is `workers.loading`'s affair.
"""

from importlib.resources import files
from pathlib import Path

_REQUIRED_FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)

_HEAD_FILES = ("config.json", "model.safetensors")

__all__ = ["builtin_draft_path", "builtin_head_path", "builtin_model_path"]


def builtin_model_path() -> Path:
    """The folder of the target model, in Hugging Face layout.

    Raises FileNotFoundError, naming what is missing, when the package is incomplete.
    """
    return _model_folder("target")


def builtin_draft_path() -> Path:
    """The folder of the draft model: the same tokenizer, about a seventh of the parameters.

    Raises FileNotFoundError, naming what is missing, when the package is incomplete.
    """
    return _model_folder("draft")


def builtin_head_path() -> Path:
    """The folder of the target's EAGLE-3 head, in SpecForge's layout.

    Raises FileNotFoundError, naming what is missing, when the package is incomplete.
    """
    return _whole_folder("head", "head", _HEAD_FILES, "train_eagle")


def _model_folder(name: str) -> Path:
    return _whole_folder(name, f"{name} model", _REQUIRED_FILES, "train")


def _whole_folder(name: str, meaning: str, required: tuple[str, ...], trainer: str) -> Path:
    folder = Path(str(files(__name__) / name))
    missing = [file for file in required if not (folder / file).is_file()]
    if missing:
        raise FileNotFoundError(
            f"the built-in {meaning} is incomplete: {', '.join(missing)} missing from {folder};"
            f" reinstall Tessera, or train it with `python -m workers.builtin.{trainer}`"
        )
    return folder
