"""ModelSurvey: what a folder is, which code would run it as configured, and what it takes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedConfig

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
from workers.models.features import ENCODER, ModelCapability, native_capability
from workers.models.registry import (
    NATIVE_ARCHITECTURES,
    choose_implementation,
    may_have_stacks,
    why_not_native,
)
from workers.speculation.config import METHODS_READING_STATES
from workers.survey.drafts import draft_methods
from workers.survey.features import shown_features
from workers.survey.formats import StoredFormat
from workers.survey.headers import Headers, read_headers
from workers.survey.memory import AskedFit, Memory, memory_of
from workers.survey.meta_model import MetaModel, bridged_on_meta, is_fused_on_gpu, native_on_meta
from workers.survey.quiet import without_warnings_of_transformers

_TP_SIZES = (1, 2, 4, 8, 16)


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

    A GPU that is too small is in its memory. Raises ModelLoadError and ConfigError as a start would
    before it reads weights.
    """
    asked = None if gpu_memory_gib is None else AskedFit(gpu_memory_gib, request_tokens)
    with without_warnings_of_transformers():
        return _survey(config, asked)


def _survey(config: EngineConfig, asked: AskedFit | None) -> ModelSurvey:
    check_servable(config)
    subject = _subject_of(config)
    meta = _meta_model(subject, config)
    facts, ranks = subject.facts, _possible_ranks(subject)
    return ModelSurvey(
        model=facts.name,
        architecture=facts.architecture,
        runs=subject.runs,
        reason=_reason(subject),
        kind=subject.capability.subject,
        device=config.device,
        dtype=str(subject.dtype).removeprefix("torch."),
        stored_as=_stored_as(subject),
        checkpoint_bytes=None if subject.headers is None else subject.headers.num_bytes,
        formats=meta.formats,
        max_context_len=facts.max_context_len,
        ranks=ranks,
        features=_features(subject),
        drafts=_drafts(subject, meta),
        memory=_memory(subject, meta, ranks, asked),
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


def _features(subject: _Subject) -> dict[str, str]:
    facts, config = subject.facts, subject.config
    natively = None
    if facts.architecture in NATIVE_ARCHITECTURES and not facts.is_encoder_only:
        asking = replace(config, model_impl="native")
        if not _why_not_native(subject, asking):
            natively = native_capability(facts.architecture)
    is_fused = natively is not None and is_fused_on_gpu(facts, subject.hf_config, subject.dtype)
    on_gpu_unfused = config.device == "cuda" and not is_fused
    return shown_features(subject.capability, natively, config.model_impl, on_gpu_unfused)


def _memory(
    subject: _Subject,
    meta: MetaModel,
    ranks: Mapping[int, tuple[int, ...]],
    asked: AskedFit | None,
) -> Memory:
    def of(meta: MetaModel, config: EngineConfig) -> Memory:
        return memory_of(config, meta, subject.dtype, subject.facts.max_context_len, asked)

    memory = of(meta, subject.config)
    if not memory.why_no_fit:
        return memory
    others = [
        replace(subject.config, tp_size=tp_size, ep_size=_ep_size(subject.config, ep_sizes))
        for tp_size, ep_sizes in ranks.items()
        if tp_size > subject.config.tp_size
    ]
    fitting = (
        one.tp_size for one in others if not of(_meta_of_ranks(subject, one), one).why_no_fit
    )
    return replace(memory, fitting_tp_sizes=tuple(fitting))


def _ep_size(config: EngineConfig, possible: tuple[int, ...]) -> int:
    return config.ep_size if config.ep_size in possible else possible[0]


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
        _meta_of_ranks(subject, config)
    except (ConfigError, ModelLoadError):
        # What stands in the way of a size is what is looked for; the size asked for raised before.
        return False
    return True


def _meta_of_ranks(subject: _Subject, config: EngineConfig) -> MetaModel:
    """config: of other numbers of ranks, which other code may run."""
    runs = _chosen(config, subject.hf_config, subject.facts, subject.recipe)
    return _meta_model(replace(subject, runs=runs), config)


def _stored_as(subject: _Subject) -> tuple[str, ...]:
    if subject.recipe is not None and subject.config.quantization is None:
        return subject.recipe.titles
    return () if subject.headers is None else subject.headers.dtypes
