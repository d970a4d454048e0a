"""What sentence-transformers would do to a folder's model beside running it: its modules in order,
and the prompt that it puts before every text. Reads small files only.
"""

import json
from pathlib import Path
from typing import Any

from workers.errors import ModelLoadError

MODULES_FILE = "modules.json"
PROMPTS_FILE = "config_sentence_transformers.json"
SENTENCE_FILE = "sentence_bert_config.json"
POOLING_FOLDER = "1_Pooling"

_SERVED = ("Transformer", "Pooling", "Normalize")


def read_json_object(path: Path) -> dict[str, Any]:
    """Empty where there is no such file. Raises ModelLoadError for one that is no JSON object."""
    if not path.is_file():
        return {}
    try:
        stated = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} is not JSON: {error}") from error
    if not isinstance(stated, dict):
        raise ModelLoadError(f"{path} is not a JSON object")
    return stated


def check_modules(folder: Path) -> None:
    """Raise ModelLoadError, by its name, for what is not applied: vectors without it would be
    others."""
    path = folder / MODULES_FILE
    if path.is_file():
        listed = _read_list(path)
        odd = [kind for kind, _ in listed if kind not in _SERVED]
        if odd:
            raise ModelLoadError(
                f"{path} asks for {', '.join(odd)}; {', '.join(_SERVED)} are served"
            )
        places = [place for kind, place in listed if kind == "Pooling"]
        if places not in ([], [POOLING_FOLDER]):
            raise ModelLoadError(
                f"{path} has Pooling in {' and '.join(places)}; it is read from {POOLING_FOLDER}"
            )
    if read_json_object(folder / SENTENCE_FILE).get("do_lower_case"):
        raise ModelLoadError(
            f"{folder / SENTENCE_FILE} asks for do_lower_case, which is not served: "
            "the tokenizer's own normaliser says what becomes of capitals"
        )
    pooling = folder / POOLING_FOLDER / "config.json"
    if read_prompt(folder) and read_json_object(pooling).get("include_prompt") is False:
        raise ModelLoadError(
            f"{pooling} asks for include_prompt: false with the prompt that {PROMPTS_FILE} puts "
            "before every text, which is not served"
        )


def read_prompt(folder: Path) -> str:
    """What default_prompt_name puts before every text; "" for nothing. Raises ModelLoadError for a
    name that prompts does not have."""
    path = folder / PROMPTS_FILE
    stated = read_json_object(path)
    name = stated.get("default_prompt_name")
    if name is None:
        return ""
    prompts = stated.get("prompts")
    prompt = prompts.get(name) if isinstance(prompts, dict) else None
    if not isinstance(prompt, str):
        raise ModelLoadError(f"{path} has no prompt {name!r}, which its default_prompt_name names")
    return prompt


def _read_list(path: Path) -> list[tuple[str, str]]:
    """Kind and folder of each module."""
    try:
        listed = json.loads(path.read_text(encoding="utf-8"))
        return [
            (str(one["type"]).rpartition(".")[2], str(one.get("path", POOLING_FOLDER)))
            for one in listed
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelLoadError(f"{path} is no list of modules: {error}") from error
