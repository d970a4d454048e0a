"""Who would attend for a model on this machine, without its weights and without an engine."""

from dataclasses import replace

from workers.config import EngineConfig
from workers.loading.loader import load_model, resolve_dtype
from workers.parallel.group import SingleRank
from workers.runner.sizing import AttentionChoice, choose_attention, resolve_device


def try_attention(config: EngineConfig) -> AttentionChoice:
    """What an engine of config, of one rank, chooses or measures at its start.

    Builds the model with random weights. Raises ConfigError, ModelLoadError and
    AttentionBackendError as an engine does.
    """
    config = replace(config, load_format="dummy", tp_size=1)
    device, alone = resolve_device(config), SingleRank()
    loaded = load_model(config, alone, device, resolve_dtype(config, device))
    return choose_attention(config, loaded, alone)
