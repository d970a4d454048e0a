"""Recipes of NVIDIA's ModelOpt, from hf_quant_config.json or config.json."""

from collections.abc import Mapping
from typing import Any

from workers.layers.formats.format import WeightFormat
from workers.layers.formats.plain import PLAIN
from workers.layers.formats.recipe import EVERY_MODULE, FormatRule, WeightRecipe
from workers.layers.formats.scaled import FP8, Scaled
from workers.layers.formats.scaling import PerBlock, PerChannel, PerTensor
from workers.loading.quantization.patterns import by_glob
from workers.loading.quantization.stated import one_of, strings

NAME = "modelopt"
_FORMATS: Mapping[str, WeightFormat] = {
    "FP8": Scaled(FP8, PerTensor()),
    "FP8_PER_CHANNEL_PER_TOKEN": Scaled(FP8, PerChannel()),
    "FP8_PB_WO": Scaled(FP8, PerBlock(128, 128)),
}
SUPPORTED = ", ".join(_FORMATS)


def recipe_of(stated: Mapping[str, Any]) -> WeightRecipe:
    """stated: with quant_algo. Raises ModelLoadError for what is not known."""
    algorithm = one_of(stated, "quant_algo", _FORMATS, NAME)
    ignored = [
        name for key in ("exclude_modules", "ignore") for name in strings(stated.get(key), key)
    ]
    rules = (
        FormatRule(by_glob(ignored), PLAIN),
        FormatRule((EVERY_MODULE,), _FORMATS[algorithm]),
    )
    return WeightRecipe(NAME, rules)
