"""Which drafter beside a model a method stands for, loaded."""

from pathlib import Path

from workers.builtin import builtin_head_path
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.sharding import ShardContext
from workers.loading.dflash import load_dflash
from workers.loading.eagle_head import load_head
from workers.loading.loader import LoadedModel
from workers.loading.mtp_head import load_mtp_head
from workers.loading.weights import OnProgress
from workers.parallel.group import TPGroup
from workers.runner.block_drafter import PagedBlockDrafter
from workers.runner.draft_model import DraftModel, check_pages
from workers.runner.head_drafter import HeadDrafter
from workers.runner.paged_drafter import PagedDrafter

BUILTIN_HEAD = "builtin-head"
"""Of `eagle3:`, the head of the built-in model that ships."""


def load_drafter(
    config: EngineConfig, target: LoadedModel, tp: TPGroup, on_progress: OnProgress
) -> PagedDrafter:
    """Of config.speculation. Raises ConfigError where it does not fit its target, beside what
    load_model, load_head, load_mtp_head and load_dflash raise."""
    speculation = config.speculation
    if speculation is None:
        raise ConfigError("a runner of a drafter beside the model needs to know which one")
    if speculation.method == "draft":
        return DraftModel(config, str(speculation.model), target, tp, on_progress)
    check_pages(target, "hand over states to what drafts")
    shard = ShardContext(tp, target.dtype, target.device)
    if speculation.method == "mtp":
        return HeadDrafter(config, load_mtp_head(config, target, shard), tp)
    name = str(speculation.model)
    if speculation.method == "dflash":
        folder, most = Path(name).expanduser(), speculation.max_draft_tokens
        seed = config.dummy_weights_seed if config.load_format == "dummy" else None
        return PagedBlockDrafter(config, load_dflash(folder, target, shard, most, seed))
    return HeadDrafter(config, load_head(config, _head_folder(name), target, shard), tp)


def _head_folder(name: str) -> Path:
    if name != BUILTIN_HEAD:
        return Path(name).expanduser()
    try:
        return builtin_head_path()
    except FileNotFoundError as error:
        raise ModelLoadError(str(error)) from error
