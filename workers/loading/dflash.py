"""A DFlash drafter of a checkpoint, beside its target.

Reads safetensors strictly: what is missing, unknown, of another shape or for another target is an
error that names it. Knows no KV memory.
"""

from dataclasses import dataclass
from pathlib import Path

import torch

from attention import AttentionConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.embedding import VocabParallelEmbedding
from workers.layers.formats.layer import unquantised
from workers.layers.sharding import ShardContext
from workers.loading.checkpoint import SafetensorsCheckpoint
from workers.loading.dflash_config import read_dflash_config
from workers.loading.loader import LoadedModel
from workers.loading.weights import check_shapes, fill_with_noise, shown
from workers.models.dflash import Borrowed, DFlashModel, DFlashSpec


@dataclass(frozen=True, slots=True)
class LoadedBlockDrafter:
    """In eval mode with its weights, on one rank. num_taps: how many states of each of the target's
    tokens it reads."""

    model: DFlashModel
    max_context_len: int
    dtype: torch.dtype
    device: torch.device
    num_taps: int

    def attention_config(self, page_size: int, kv_dtype: torch.dtype) -> AttentionConfig:
        """As LoadedModel.attention_config."""
        return self.model.geometry.attention_config(
            self.max_context_len, page_size, self.dtype, kv_dtype, self.device
        )


def load_dflash(
    folder: Path,
    target: LoadedModel,
    shard: ShardContext,
    max_draft_tokens: int,
    dummy_seed: int | None,
) -> LoadedBlockDrafter:
    """This rank's share of the drafter, for the target, which hands over its states from here on.

    max_draft_tokens: of a step. dummy_seed: of noise in place of the checkpoint's weights, None for
    the checkpoint's. Raises ModelLoadError for a folder without such a drafter, ConfigError for one
    that is not the target's or has blocks of fewer drafts.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{str(folder)!r} is no folder with a DFlash drafter")
    embedding = target.model.input_embedding()
    spec = read_dflash_config(folder, target.model.geometry.num_layers)
    _check_target(folder, spec, target, embedding.shape[1])
    if max_draft_tokens >= spec.block_size:
        raise ConfigError(
            f"max_draft_tokens={max_draft_tokens}: a block of {folder} has {spec.block_size} "
            f"tokens, {spec.block_size - 1} of them drafts"
        )
    try:
        target.model.tap_layers(spec.tap_layers)
    except ValueError as error:
        raise ConfigError(f"{folder} and {target.facts.name}: {error}") from error
    own = spec.layers
    embed_tokens = VocabParallelEmbedding(own.vocab_size, own.hidden_size, shard)
    embed_tokens.weight = embedding
    borrowed = Borrowed(embed_tokens, target.model.compute_logits)
    model = DFlashModel(spec, target.facts.max_context_len, borrowed, shard)
    if dummy_seed is None:
        _fill(folder, model)
    else:
        fill_with_noise(unquantised(model), shard, dummy_seed, lambda done, total: None)
    return LoadedBlockDrafter(
        model.eval(),
        target.facts.max_context_len,
        shard.dtype,
        shard.device,
        len(spec.tap_layers),
    )


def _check_target(folder: Path, spec: DFlashSpec, target: LoadedModel, hidden_size: int) -> None:
    for what, own, others in (
        ("vocabulary", spec.layers.vocab_size, target.facts.vocab_size),
        ("hidden size", spec.layers.hidden_size, hidden_size),
    ):
        if own != others:
            raise ConfigError(f"{folder} is for a target with a {what} of {own}, not of {others}")


def _fill(folder: Path, model: DFlashModel) -> None:
    checkpoint = SafetensorsCheckpoint(folder, keeps_names=True)
    slots = unquantised(model).slots
    missing, unknown = set(slots) - checkpoint.names, checkpoint.names - set(slots)
    if missing:
        raise ModelLoadError(f"{folder} lacks {len(missing)} tensors: {shown(missing)}")
    if unknown:
        raise ModelLoadError(
            f"{folder} has {len(unknown)} tensors that no DFlash drafter has: {shown(unknown)}"
        )
    with checkpoint.opened(slots) as tensors:
        check_shapes(slots, tensors)
        for name, slot in slots.items():
            slot.load(tensors[name])
