"""A ModelSurvey as lines for people."""

from collections.abc import Iterator

from workers.models.features import ModelFeature
from workers.survey.fit import GIB, Fit
from workers.survey.formats import StoredFormat
from workers.survey.survey import Memory, ModelSurvey

_LABEL_WIDTH = 28
# Of what else there is, drafts and numbers of ranks say more than a yes.
_SHOWN = (ModelFeature.QUANTISED, ModelFeature.LORA)
_SHOWN_OF_GPUS = (ModelFeature.GRAPHS,)


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
        yield _line(feature.value, _answer(survey.features[feature.value]))
    for name, obstacle in survey.drafts.items():
        yield _line(f"speculation, {name}", _answer(obstacle))
    yield f"A rank of TP {tp_size}, EP {ep_size} on {survey.device}:"
    yield from _memory_lines(survey.memory, survey.checkpoint_bytes)


def _memory_lines(memory: Memory, checkpoint_bytes: int | None) -> Iterator[str]:
    files = "" if checkpoint_bytes is None else f" (files: {_gib(checkpoint_bytes)})"
    yield _line("weights", _gib(memory.weight_bytes) + files)
    for group in memory.groups:
        layers = f"{group.num_layers} layers, {group.kind} {group.entry}, see {group.seen}"
        yield _line("KV memory", f"{layers}: {group.bytes_a_token:,} bytes a token")
    if memory.states is not None:
        states = memory.states
        yield _line(
            "states", f"{states.num_modules} modules: {states.bytes_a_request:,} bytes a request"
        )
    if memory.kv_bytes_a_token is None:
        yield _line("KV memory", "shows when it is loaded")
    else:
        long_lived = f"{memory.kv_bytes_a_token:,} for as long as its request lives"
        yield _line("a token", f"{memory.kv_bytes_a_token_in_view:,} bytes, {long_lived}")
    if memory.fit is not None:
        yield from _fit_lines(memory.fit)


def _fit_lines(fit: Fit) -> Iterator[str]:
    yield f"On a GPU of {fit.gpu_memory_gib:g} GiB (activations and graphs not counted):"
    yield _line("KV memory", f"{_gib(fit.kv_bytes)}, states {_gib(fit.state_bytes)} of it")
    yield _line("tokens", f"{fit.num_tokens:,}")
    yield _line(f"requests of {fit.request_tokens:,}", f"{fit.num_requests:,}")
    yield _line("requests of a whole context", f"{fit.num_longest:,}")


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


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL_WIDTH}}{text}"
