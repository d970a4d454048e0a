"""A checkpoint's generation_config.json, as far as it recommends how to sample."""

import json
from pathlib import Path
from typing import Any

import msgspec

from service.handler.defaults import SamplingDefaults
from workers.errors import ModelLoadError, RequestRejectedError
from workers.sampling.params import SamplingParams

_NAMES = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_HINT = "set engine.generation_config to none to leave it alone"


def read_sampling_defaults(folder: Path) -> SamplingDefaults:
    """Empty where there is no such file. Raises ModelLoadError where that makes no sense."""
    path = folder / "generation_config.json"
    if not path.is_file():
        return SamplingDefaults()
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        given = {name: document[name] for name in _NAMES if document.get(name) is not None}
        max_tokens = document.get("max_new_tokens")
    except (ValueError, AttributeError) as error:
        raise ModelLoadError(f"{path.name} is not a JSON object: {error}") from error
    values = _checked(given, path.name)
    if max_tokens is not None and not (isinstance(max_tokens, int) and max_tokens >= 1):
        raise ModelLoadError(f"{path.name}: max_new_tokens must be at least 1; {_HINT}")
    return SamplingDefaults(values, max_tokens)


def _checked(given: dict[str, Any], name: str) -> dict[str, Any]:
    """In the types of SamplingParams."""
    try:
        sampling = msgspec.convert(given, SamplingParams)
        sampling.validate(vocab_size=1)
    except (msgspec.ValidationError, RequestRejectedError) as error:
        raise ModelLoadError(f"{name}: {error}; {_HINT}") from error
    return {field: getattr(sampling, field) for field in given}
