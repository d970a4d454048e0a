"""A model folder's recipe: from quantization_config in config.json, or ModelOpt's own file.

Knows no model and reads no weights.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.recipe import EVERY_MODULE, FormatRule, WeightRecipe
from workers.layers.formats.scaled import RoundedToFp8
from workers.loading.quantization import compressed_tensors, fp8, integers, modelopt, mxfp4

_MODELOPT_FILE = "hf_quant_config.json"
_READERS: Mapping[str, Callable[[Mapping[str, Any]], WeightRecipe]] = {
    compressed_tensors.NAME: compressed_tensors.recipe_of,
    fp8.NAME: fp8.recipe_of,
    modelopt.NAME: modelopt.recipe_of,
    mxfp4.NAME: mxfp4.recipe_of,
    integers.AWQ: integers.awq_recipe_of,
    integers.GPTQ: integers.gptq_recipe_of,
}
# Keys of quantization_config that speak of weights (compressed-tensors; ModelOpt; most others).
_OF_WEIGHTS = ("config_groups", "quant_algo", "bits", "weight_block_size", "load_in_8bit")
_KV_SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "dynamic": False}
_ROUNDED = WeightRecipe("fp8, rounded", (FormatRule((EVERY_MODULE,), RoundedToFp8()),))


def read_recipe(folder: Path) -> WeightRecipe | None:
    """None where the weights are unquantised. Raises ModelLoadError, by name, for a recipe that is
    not known, and for a KV cache that is quantised in another way than by static FP8 scales."""
    stated = _stated(folder)
    if stated is None:
        return None
    scheme = stated.get("kv_cache_scheme")
    if scheme is not None:
        _check_kv_scheme(folder, scheme)
        if not any(map(stated.get, _OF_WEIGHTS)):
            return None
    method = str(stated.get("quant_method"))
    if method not in _READERS:
        raise ModelLoadError(
            f"{folder} is quantised by {method!r}, which is not supported; supported are "
            f"{', '.join(_READERS)}"
        )
    try:
        return _READERS[method](stated)
    except ModelLoadError as error:
        raise ModelLoadError(f"{folder} cannot be used: {error}") from error


def weight_recipe(folder: Path, quantization: str | None) -> WeightRecipe | None:
    """What the folder says, or what is asked for (EngineConfig.quantization) of one that is not
    quantised. Raises ConfigError where both say something, and as read_recipe does."""
    if quantization is None:
        return read_recipe(folder)
    return rounding_recipe(folder, f"quantization={quantization!r}")


def rounding_recipe(folder: Path, setting: str) -> WeightRecipe:
    """All linear layers of an unquantised folder in FP8, with a scale a row. setting: that asks for
    it. Raises ConfigError, which names it, where the folder is quantised, and as read_recipe."""
    stored = read_recipe(folder)
    if stored is not None:
        raise ConfigError(
            f"{setting} rounds unquantised weights, but {folder} is quantised by {stored.name}; "
            "leave it out to serve them as they are"
        )
    return _ROUNDED


def _stated(folder: Path) -> Mapping[str, Any] | None:
    """quantization_config of the model or of its text model, with a quant_method."""
    config = _json(folder / "config.json")
    text = config.get("text_config")
    inner = text.get("quantization_config") if isinstance(text, dict) else None
    stated = config.get("quantization_config") or inner
    if stated is not None:
        if not isinstance(stated, dict):
            raise ModelLoadError(f"{folder}: quantization_config is no JSON object")
        return stated
    path = folder / _MODELOPT_FILE
    if not path.is_file():
        return None
    own = _json(path).get("quantization")
    if not isinstance(own, dict):
        raise ModelLoadError(f"{path} has no object 'quantization'")
    if own.get("quant_algo") is None:
        return None
    return {"quant_method": modelopt.NAME, **own}


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} is no JSON object")
    return value


def _check_kv_scheme(folder: Path, scheme: Any) -> None:
    """The scales are tensors of the checkpoint and whether to use them is the engine's setting."""
    if not isinstance(scheme, dict) or not all(
        # Keys that are not there have the value that makes it so.
        scheme.get(key, value) == value
        for key, value in _KV_SCHEME.items()
    ):
        raise ModelLoadError(
            f"{folder} is quantised with kv_cache_scheme {scheme!r}; of KV cache schemes, only "
            "static per-tensor FP8 is supported"
        )
