"""A ModelSurvey as lines for people."""

from collections.abc import Iterator

from workers.models.features import ModelFeature
from workers.survey.fit import Fit
from workers.survey.formats import StoredFormat
from workers.survey.memory import Memory
from workers.survey.survey import ModelSurvey
from workers.survey.words import size

_LABEL_WIDTH = 28
# Of what else there is, drafts and numbers of ranks say more than a yes.
_SHOWN = (ModelFeature.QUANTISED, ModelFeature.LORA)
_SHOWN_OF_GPUS = (ModelFeature.GRAPHS,)
_NATIVELY = "yes: a quantised checkpoint, or --quantization, has the native class run it"
_UNKNOWN = "unknown: they show when it is loaded"


def survey_lines(survey: ModelSurvey, tp_size: int, ep_size: int) -> Iterator[str]:
    yield _line("model", f"{survey.model} ({survey.architecture})")
    yield _line("runs", survey.runs + (f": {survey.reason}" if survey.reason else ""))
    stored = ", ".join(survey.stored_as) or "no weights are here yet"
    formats = "; ".join(map(_counted, survey.formats)) or stored
    yield _line("weights", f"{formats}; served as {survey.dtype}")
    yield _line("context", f"{survey.max_context_len:,} tokens")
    yield _line("TP (EP)", ", ".join(_sizes(tp, eps) for tp, eps in survey.ranks.items()))
    shown = (*_SHOWN, *(_SHOWN_OF_GPUS if survey.device == "cuda" else ()))
    for feature in shown:
        yield _line(feature.value, _feature(survey, feature))
    for name, obstacle in survey.drafts.items():
        yield _line(f"speculation, {name}", _answer(obstacle))
    yield f"A rank of TP {tp_size}, EP {ep_size} on {survey.device}:"
    yield from _memory_lines(survey.memory, survey.checkpoint_bytes)


def _memory_lines(memory: Memory, checkpoint_bytes: int | None) -> Iterator[str]:
    files = "" if checkpoint_bytes is None else f" (files: {size(checkpoint_bytes)})"
    yield _line("weights", size(memory.weight_bytes) + files)
    if memory.adapter_bytes:
        yield _line("slots of adapters", size(memory.adapter_bytes))
    for group in memory.groups:
        layers = f"{group.num_layers} layers, {group.kind} {group.entry}, see {group.seen}"
        yield _line("KV memory", f"{layers}: {group.bytes_a_token:,} bytes a token")
    yield from _state_lines(memory)
    if memory.kv_bytes_a_token is None or memory.kv_bytes_a_token_in_view is None:
        yield _line("KV memory", "shows when it is loaded")
    else:
        yield _line("a token", _token(memory.kv_bytes_a_token, memory.kv_bytes_a_token_in_view))
    if memory.fit is not None:
        yield from _fit_lines(memory.fit)
    if memory.why_no_fit:
        yield _line("does not fit", memory.why_no_fit)
        yield _line("would fit", _fitting(memory.fitting_tp_sizes))


def _state_lines(memory: Memory) -> Iterator[str]:
    states = memory.states
    if not memory.states_are_known:
        yield _line("states", _UNKNOWN)
    elif states is not None:
        a_request = f"{states.bytes_a_request:,} bytes a request"
        yield _line("states", f"{states.num_modules} modules: {a_request}")


def _token(kept_bytes: int, bytes_in_view: int) -> str:
    if kept_bytes == bytes_in_view:
        return f"{kept_bytes:,} bytes for as long as its request lives"
    later = f"{kept_bytes:,}" if kept_bytes else "nothing"
    return (
        f"{bytes_in_view:,} bytes while every layer sees it, then {later} for as long as its "
        "request lives"
    )


def _fit_lines(fit: Fit) -> Iterator[str]:
    yield f"On a GPU of {fit.gpu_memory_gib:g} GiB (activations and graphs not counted):"
    yield _line("KV memory", size(fit.kv_bytes) + _states_of_it(fit))
    tokens = "" if fit.state_bytes is not None else " at most: its states are not counted"
    yield _line("tokens", f"{fit.num_tokens:,}{tokens}")
    yield _line(f"requests of {fit.request_tokens:,}", f"{fit.num_requests:,}{tokens}")
    yield _line("requests of a whole context", f"{fit.num_longest:,}{tokens}")


def _states_of_it(fit: Fit) -> str:
    if fit.state_bytes is None:
        return ", states unknown"
    if not fit.state_bytes:
        return ""
    snapshots = f" with {fit.num_snapshots} snapshots for prefixes" if fit.num_snapshots else ""
    return f", states {size(fit.state_bytes)} of it{snapshots}"


def _fitting(tp_sizes: tuple[int, ...]) -> str:
    if not tp_sizes:
        return "no tp_size that the model can be divided into"
    return f"--tp {' or '.join(map(str, tp_sizes))}"


def _feature(survey: ModelSurvey, feature: ModelFeature) -> str:
    obstacle = survey.features[feature.value]
    is_by_others = feature is ModelFeature.QUANTISED and survey.runs != "native"
    return _NATIVELY if is_by_others and not obstacle else _answer(obstacle)


def _counted(one: StoredFormat) -> str:
    kept = f"{one.num_kept} layers as stored (Hopper, from sm90 on)"
    dequantised = f"{one.num_dequantised} dequantised"
    counts = [kept] if one.num_kept else []
    counts += [dequantised if counts else f"{one.num_dequantised} layers dequantised"]
    return f"{one.title}: {', '.join(counts)}"


def _answer(obstacle: str) -> str:
    return f"no: {obstacle}" if obstacle else "yes"


def _sizes(tp_size: int, ep_sizes: tuple[int, ...]) -> str:
    return str(tp_size) if ep_sizes == (1,) else f"{tp_size} ({', '.join(map(str, ep_sizes))})"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"
