"""An engine of one rank in this process: of a decoder, or of a model that is an encoder alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.observer import OnStep
from workers.loading.encoder_only import encoder_only_class
from workers.loading.model_folder import read_hf_config, resolve_model_folder
from workers.loading.weights import OnProgress

if TYPE_CHECKING:
    from workers.encoder_only.engine import EncoderOnlyEngine


def build_engine(
    config: EngineConfig, on_step: OnStep, on_progress: OnProgress
) -> Engine | EncoderOnlyEngine:
    """Raises ConfigError, ModelLoadError and AttentionBackendError."""
    if encoder_only_class(read_hf_config(resolve_model_folder(config.model))) is not None:
        # Seconds of imports that decoders of our own do without.
        from workers.encoder_only.engine import EncoderOnlyEngine

        return EncoderOnlyEngine.from_config(config, on_step=on_step, on_progress=on_progress)
    return Engine.from_config(config, on_step=on_step, on_progress=on_progress)
