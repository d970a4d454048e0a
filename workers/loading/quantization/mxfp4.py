"""Recipe "mxfp4": gpt-oss's, of experts that are stored in stacks of blocks and scales."""

from collections.abc import Mapping
from typing import Any

from workers.layers.formats.mxfp4 import Mxfp4
from workers.layers.formats.recipe import FormatRule, WeightRecipe
from workers.loading.quantization.patterns import compiled

NAME = "mxfp4"
_STACKS = compiled(r".*\.experts\.(gate_up|down)_proj")


def recipe_of(stated: Mapping[str, Any]) -> WeightRecipe:
    """Whatever modules_to_not_convert says: it names all linear modules but the experts."""
    return WeightRecipe(NAME, (FormatRule((_STACKS,), Mxfp4()),))
