"""What a model folder says about its text: tokenizer.json, chat template, named special tokens.

Reads JSON and Jinja sources only. Nothing of a model folder is executed, imported or unpickled;
folders that carry a tokenizer in another form (sentencepiece, tiktoken, Python code) are refused.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workers.errors import ModelLoadError

_NAMED_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_SLOW_FILES = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "tiktoken.model")


@dataclass(frozen=True, slots=True)
class TokenizerFiles:
    """tokenizer_json: the serialised tokenizer. named_tokens: bos_token and the like, as text."""

    tokenizer_json: str
    chat_template: str | None
    named_tokens: dict[str, str]


def read_tokenizer_files(folder: Path) -> TokenizerFiles:
    """Read a folder in Hugging Face layout. Raises ModelLoadError, saying what to do about it."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ModelLoadError(_missing_message(folder))
    config = _read_json(folder / "tokenizer_config.json")
    return TokenizerFiles(
        tokenizer_json=path.read_text(encoding="utf-8"),
        chat_template=_read_chat_template(folder, config),
        named_tokens=_read_named_tokens(folder, config),
    )


def _missing_message(folder: Path) -> str:
    found = [name for name in _SLOW_FILES if (folder / name).is_file()]
    hint = (
        f"it only has {', '.join(found)}, the form of a slow tokenizer"
        if found
        else "it has no tokenizer at all"
    )
    return (
        f"{folder.name} has no tokenizer.json: {hint}. Tessera needs the fast form; where "
        "transformers can convert it, AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
        " writes one"
    )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ModelLoadError(f"{path.name} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path.name} must hold a JSON object")
    return value


def _read_chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """chat_template.jinja wins over chat_template.json, which wins over tokenizer_config.json."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text(encoding="utf-8")
    template = _read_json(folder / "chat_template.json").get("chat_template")
    if template is None:
        template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ModelLoadError("chat_template must be a string or a list with a default template")
    return template


def _read_named_tokens(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    values = {**_read_json(folder / "special_tokens_map.json"), **config}
    named: dict[str, str] = {}
    for name in _NAMED_TOKENS:
        value = values.get(name)
        if isinstance(value, dict):
            value = value.get("content")
        if isinstance(value, str):
            named[name] = value
    return named
