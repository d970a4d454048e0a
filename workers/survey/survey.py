"""ModelSurvey: what a folder is, which code would run it as configured, and what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

from attention.config import AttentionConfig
from workers.config import EngineConfig
from workers.errors import ConfigError, ModelLoadError
from workers.layers.formats.recipe import WeightRecipe
from workers.loading.encoder_only import encoder_only_class
from workers.loading.loader import check_servable, resolve_dtype
from workers.loading.model_folder import (
    ModelFacts,
    model_facts,
    read_hf_config,
    resolve_model_folder,
)
from workers.loading.quantization.read import weight_recipe
from workers.loading.stacked_experts import has_stacked_experts
from workers.models.features import ENCODER, ModelCapability, ModelFeature, native_capability
from workers.models.registry import choose_implementation, may_have_stacks, why_not_native
from workers.runner.kv_memory import resolve_kv_dtype
from workers.speculation.config import METHODS_READING_STATES
from workers.survey.drafts import draft_methods
from workers.survey.fit import Fit, fit_on_gpu
from workers.survey.formats import StoredFormat
from workers.survey.headers import Headers, read_headers
from workers.survey.kept import KeptGroup, KeptStates, kept_groups, kept_states
from workers.survey.meta_model import MetaModel, bridged_on_meta, native_on_meta

PAGE_SIZE = 64
"""Tokens a page where the configuration names none: what it is in the end, the backend says."""
_TP_SIZES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Memory:
    """Of one of tp_size ranks. kv_bytes_a_token: of account 0 and of all accounts; both None where
    only a run shows it."""

    weight_bytes: int
    kv_bytes_a_token: int | None
    kv_bytes_a_token_in_view: int | None
    groups: tuple[KeptGroup, ...]
    states: KeptStates | None
    fit: Fit | None


@dataclass(frozen=True, slots=True)
class ModelSurvey:
    """runs: "native" or "transformers". reason: why not natively, or "". kind: whose features these
    are. stored_as: formats or dtypes of the checkpoint's weights, which are served as dtype;
    checkpoint_bytes: of its files; nothing and None where there are none yet. formats:
    of quantised layers, how many stay as stored, on a GPU from sm90 on. ranks:
    tp_size -> the ep_sizes that it may have. features: -> why not, "" where it has it; drafts: of
    each method of speculation, the same."""

    model: str
    architecture: str
    runs: str
    reason: str
    kind: str
    device: str
    dtype: str
    stored_as: tuple[str, ...]
    checkpoint_bytes: int | None
    formats: tuple[StoredFormat, ...]
    max_context_len: int
    ranks: Mapping[int, tuple[int, ...]]
    features: Mapping[str, str]
    drafts: Mapping[str, str]
    memory: Memory


@dataclass(frozen=True, slots=True)
class _Subject:
    """What every part of a survey looks at."""

    config: EngineConfig
    hf_config: PreTrainedConfig
    facts: ModelFacts
    dtype: torch.dtype
    recipe: WeightRecipe | None
    headers: Headers | None
    capability: ModelCapability
    runs: str


def survey_model(
    config: EngineConfig, gpu_memory_gib: float | None = None, request_tokens: int = 2048
) -> ModelSurvey:
    """Of config.model on config.device, "cuda" or "cpu", which need not be there.

    Raises ModelLoadError and ConfigError as a start would before it reads weights.
    """
    check_servable(config)
    subject = _subject_of(config)
    meta = _meta_model(subject, config)
    facts, capability = subject.facts, subject.capability
    return ModelSurvey(
        model=facts.name,
        architecture=facts.architecture,
        runs=subject.runs,
        reason=_reason(subject),
        kind=capability.subject,
        device=config.device,
        dtype=str(subject.dtype).removeprefix("torch."),
        stored_as=_stored_as(subject),
        checkpoint_bytes=None if subject.headers is None else subject.headers.num_bytes,
        formats=meta.formats,
        max_context_len=facts.max_context_len,
        ranks=_possible_ranks(subject),
        features={one.value: capability.why_not.get(one, "") for one in ModelFeature},
        drafts=_drafts(subject, meta),
        memory=_memory(subject, meta, gpu_memory_gib, request_tokens),
    )


def _subject_of(config: EngineConfig) -> _Subject:
    folder = resolve_model_folder(config.model)
    hf_config, facts = read_hf_config(folder), model_facts(config)
    recipe = weight_recipe(folder, config.quantization)
    dtype, headers = resolve_dtype(config, torch.device(config.device)), read_headers(folder)
    if facts.is_encoder_only:
        return _Subject(config, hf_config, facts, dtype, recipe, headers, ENCODER, "transformers")
    runs = _chosen(config, hf_config, facts, recipe)
    if runs == "native":
        capability = native_capability(facts.architecture)
    else:
        # Seconds of imports that native models do without.
        from workers.survey.bridged import bridged_capability

        capability = bridged_capability(hf_config)
    return _Subject(config, hf_config, facts, dtype, recipe, headers, capability, runs)


def _chosen(
    config: EngineConfig,
    hf_config: PreTrainedConfig,
    facts: ModelFacts,
    recipe: WeightRecipe | None,
) -> str:
    return choose_implementation(
        hf_config,
        facts.architecture,
        config,
        config.device,
        is_quantised=recipe is not None,
        has_stacks=_has_stacks(facts),
    )


def _has_stacks(facts: ModelFacts) -> bool:
    return may_have_stacks(facts.architecture) and has_stacked_experts(facts.folder)


def _reason(subject: _Subject) -> str:
    if subject.runs == "native":
        return ""
    if encoder_only_class(subject.hf_config) is not None:
        return "encoders run in transformers' own classes"
    return _why_not_native(subject, subject.config)


def _why_not_native(subject: _Subject, config: EngineConfig) -> str:
    """config: the subject's, or of other drafts."""
    facts = subject.facts
    return why_not_native(
        subject.hf_config,
        facts.architecture,
        config,
        config.device,
        has_stacks=_has_stacks(facts),
    )


def _drafts(subject: _Subject, meta: MetaModel) -> dict[str, str]:
    """By method, of the code that would run the model with it."""
    config, facts = subject.config, subject.facts
    num_gpus = 0 if config.device == "cpu" else config.tp_size

    def of(capability: ModelCapability, meta: MetaModel) -> dict[str, str]:
        return draft_methods(capability, meta.geometry, meta.state_entries, num_gpus)

    drafts = of(subject.capability, meta)
    reading = replace(
        config, speculative="mtp", draft_tree=(), draft_quantization=None, deterministic=False
    )
    if subject.runs == "native" or facts.is_encoder_only or _why_not_native(subject, reading):
        return drafts
    native = native_on_meta(config, facts, subject.hf_config, subject.dtype, subject.recipe)
    natively = of(native_capability(facts.architecture), native)
    return drafts | {method: natively[method] for method in METHODS_READING_STATES}


def _meta_model(subject: _Subject, config: EngineConfig) -> MetaModel:
    """config: the subject's, or of other numbers of ranks."""
    facts, hf_config, dtype = subject.facts, subject.hf_config, subject.dtype
    if subject.runs == "native":
        return native_on_meta(config, facts, hf_config, dtype, subject.recipe)
    if facts.is_encoder_only:
        num_elements = 0 if subject.headers is None else subject.headers.num_elements
        return MetaModel(num_elements * dtype.itemsize, None)
    return bridged_on_meta(config, facts, hf_config, dtype)


def _possible_ranks(subject: _Subject) -> dict[int, tuple[int, ...]]:
    """What a start would not refuse."""
    possible = {}
    for tp_size in _TP_SIZES:
        parts = [one for one in _TP_SIZES if tp_size % one == 0]
        taken = tuple(one for one in parts if _can_be_cut(subject, tp_size, one))
        if taken:
            possible[tp_size] = taken
    return possible


def _can_be_cut(subject: _Subject, tp_size: int, ep_size: int) -> bool:
    if subject.facts.is_encoder_only:
        return tp_size == ep_size == 1
    config = replace(subject.config, tp_size=tp_size, ep_size=ep_size)
    try:
        check_servable(config)
        runs = _chosen(config, subject.hf_config, subject.facts, subject.recipe)
        _meta_model(replace(subject, runs=runs), config)
    except (ConfigError, ModelLoadError):
        # What stands in the way of a size is what is looked for; the size asked for raised before.
        return False
    return True


def _stored_as(subject: _Subject) -> tuple[str, ...]:
    if subject.recipe is not None and subject.config.quantization is None:
        return subject.recipe.titles
    return () if subject.headers is None else subject.headers.dtypes


def _memory(
    subject: _Subject, meta: MetaModel, gpu_memory_gib: float | None, request_tokens: int
) -> Memory:
    states = kept_states(meta.state_entries)
    if meta.geometry is None:
        return Memory(meta.weight_bytes, None, None, (), states, None)
    config = subject.config
    kv_dtype = resolve_kv_dtype(config.kv_cache_dtype, subject.dtype)
    attention: AttentionConfig = replace(
        meta.geometry.attention_config(
            subject.facts.max_context_len,
            config.page_size or PAGE_SIZE,
            subject.dtype,
            kv_dtype,
            torch.device("meta"),
        ),
        has_bounded_accounts=True,
    )
    fit = None
    if gpu_memory_gib is not None:
        sizes = meta.weight_bytes, gpu_memory_gib, request_tokens
        fit = fit_on_gpu(config, attention, meta.state_entries, *sizes)
    return Memory(
        meta.weight_bytes,
        attention.kv_bytes_of_account(0),
        attention.kv_bytes_per_token,
        kept_groups(attention),
        states,
        fit,
    )
