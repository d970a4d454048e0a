"""From an EngineConfig to a runner of an encoder-only model, and what the service is told of it."""

import logging
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from workers.config import EngineConfig
from workers.encoder_only.runner import TextRunner
from workers.engine.protocol import ModelInfo
from workers.errors import ModelLoadError
from workers.loading.encoder_only import check_encoder_settings, encoder_only_class
from workers.loading.loader import lease_weights, resolve_dtype
from workers.loading.model_folder import ModelFacts, model_facts, read_hf_config
from workers.loading.weights import OnProgress
from workers.loading.weights_cache import WeightsLease
from workers.models.encoder_only import (
    EncoderOnlyModel,
    check_positions,
    load_encoder_only,
    random_encoder_only,
)
from workers.pooling.params import EmbeddingInfo, Pooling
from workers.runner.cpu_threads import limit_cpu_threads
from workers.runner.sizing import resolve_device

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    runner: TextRunner
    info: ModelInfo
    embedding: EmbeddingInfo


def load_runner(config: EngineConfig, on_progress: OnProgress) -> LoadedRunner:
    """Raises ModelLoadError for a folder that cannot be served, ConfigError for a configuration
    that does not fit the model."""
    check_encoder_settings(config)
    device = resolve_device(config)
    limit_cpu_threads(config, device)
    facts = model_facts(config)
    embedding = facts.embedding
    if embedding is None:
        raise ModelLoadError(f"{facts.architecture} gives neither vectors nor scores")
    dtype = resolve_dtype(config, device)
    logger.info("loading %s (%s) as %s on %s", facts.name, facts.architecture, dtype, device)
    runner = _make_runner(config, facts, embedding.pooling, dtype, on_progress)
    info = ModelInfo(
        name=config.served_model_name or facts.name,
        vocab_size=facts.vocab_size,
        max_context_len=facts.max_context_len,
        eos_token_ids=(),
        attention_backend=runner.attention,
        page_size=0,
        num_pages=0,
        tp_size=1,
        dtype=str(dtype).removeprefix("torch."),
        max_request_len=facts.max_context_len,
        sleep_obstacle="encoders alone do not sleep",
        has_prefix_cache=False,
        embedding=embedding,
        is_encoder_only=True,
    )
    return LoadedRunner(runner, info, embedding)


def _make_runner(
    config: EngineConfig,
    facts: ModelFacts,
    pooling: Pooling,
    dtype: torch.dtype,
    on_progress: OnProgress,
) -> TextRunner:
    hf_config, device = read_hf_config(facts.folder), resolve_device(config)
    model_class = encoder_only_class(hf_config)
    if config.load_format == "dummy":
        lease = WeightsLease.of_source(facts.folder)
        model = random_encoder_only(hf_config, model_class, dtype, config.dummy_weights_seed)
    else:
        lease = lease_weights(config, facts.folder, on_progress)
        model = load_encoder_only(lease.folder, hf_config, model_class, dtype)
    check_positions(model, facts.max_context_len)
    on_device: PreTrainedModel = model.to(device)  # type: ignore[arg-type]
    return TextRunner(EncoderOnlyModel(on_device), pooling, lease)
