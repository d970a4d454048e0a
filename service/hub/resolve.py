"""From what an operator calls a model to a folder on this machine, fetched if it must be."""

import dataclasses
import logging
from pathlib import Path

from service.hub.ids import HubModel
from service.hub.progress import OnBytes, SteadyProgress
from service.model_names import is_hub_id, model_folder, model_name
from workers.config import EngineConfig

_log = logging.getLogger(__name__)


def text_folder(model: str, revision: str | None) -> Path:
    """Where config, tokenizer and chat template are. Blocks. Raises ModelLoadError."""
    if not is_hub_id(model):
        return model_folder(model)
    # A quarter of a second of imports, which models that are folders do without.
    from service.hub.store import HubStore

    return HubStore().fetch_text(HubModel(model, revision))


def resolve_engine(config: EngineConfig, revision: str | None, on_bytes: OnBytes) -> EngineConfig:
    """The same engine with a folder for a model, and the name that the operator gave it.

    Fetches weights unless they are dummies, once the architecture is known to be served. Blocks.
    Raises ModelLoadError, or ConfigError for settings that do not fit the model.
    """
    if not is_hub_id(config.model):
        return config
    from service.hub.store import HubStore
    from workers.loading.loader import check_servable

    name = config.served_model_name or model_name(config.model)
    named = dataclasses.replace(config, served_model_name=name)
    model = HubModel(config.model, revision)

    def check(folder: Path) -> None:
        check_servable(dataclasses.replace(named, model=str(folder)))

    if config.load_format == "dummy":
        folder = HubStore().fetch_text(model)
        check(folder)
    else:
        _log.info("looking for %s in the hub's cache and at the hub", model)
        folder = HubStore().fetch(model, check, SteadyProgress(on_bytes))
    return dataclasses.replace(named, model=str(folder))
