"""What drafts, in FP8 though its checkpoint is not: drafts change no text, and are read from memory
in half the time.

Of an EAGLE-3 head all linear layers, its logits' too: each is a module that is called. A draft
model is loaded as a model is. Knows no product but by name.
"""

import logging
from pathlib import Path

import torch

from attention.kernels.providers import probe_triton
from workers.config import EngineConfig
from workers.layers.formats.layer import StoredTensors, stored_by
from workers.layers.formats.recipe import WeightRecipe
from workers.layers.sharding import ShardContext
from workers.loading.kept_formats import keeps_formats_on
from workers.loading.quantization.read import rounding_recipe
from workers.models.eagle_head import EagleHead

logger = logging.getLogger(__name__)


def draft_recipe(config: EngineConfig, folder: Path) -> WeightRecipe | None:
    """None where config.draft_quantization leaves the folder as it is. Raises as
    rounding_recipe."""
    if config.draft_quantization is None:
        return None
    return rounding_recipe(folder, f"draft_quantization={config.draft_quantization!r}")


def rounded(
    recipe: WeightRecipe, head: EagleHead, config: EngineConfig, shard: ShardContext
) -> StoredTensors:
    """Where the tensors of a head made with has_formats go, which it keeps rounded where products
    take them so."""
    keeps = keeps_formats_on(config, shard.dtype, shard.device) and not probe_triton().missing
    return stored_by(recipe, head, shard, head.layers_as_stored() if keeps else ())


def multiply_as_kept(head: EagleHead, device: torch.device) -> None:
    """Behind the last tensor."""
    layers = head.layers_as_stored()
    kept = [layer for layer in layers if layer.is_kept]
    logger.info(
        "%d of %d layers of the EAGLE-3 head keep their weights in FP8", len(kept), len(layers)
    )
    if kept:
        # Triton comes with torch for CUDA only.
        from workers.layers.quantised.whole_product import whole_product

        for layer in kept:
            layer.multiply_kept_by(whole_product)
    if device.type == "cuda":
        # What rounding needed beside the weights is the KV pool's.
        torch.cuda.empty_cache()
