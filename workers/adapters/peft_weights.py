"""adapter_model.safetensors, as PEFT writes it: two matrices for each module that an adapter
changes, or for a tensor of all experts of a layer. Of a file headers alone are read, without torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open

from workers.adapters.expert_modules import ExpertModules, StackFit, StackKind
from workers.adapters.peft_config import CONFIG_FILE, PeftConfig
from workers.adapters.ref import AdapterInfo
from workers.errors import AdapterError
from workers.loading.names import unwrapped

WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_(?:([AB])\.weight|embedding_([AB]))")
_STACK = re.compile(r"(.+\.experts)(?:\.base_layer)?")
"""Two adapted tensors of one module are two wrappers around each other."""
_NEVER_SWAPPED = 0, 19, 1
_EMBEDDING_BASE = re.compile(r"base_model\.model\.(.+)\.base_layer\.weight")
"""Of an adapted embedding PEFT saves what it was, too."""
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class ModulePair:
    """y += scale * B A x of one checkpoint module. a_shape (rank, in_features), b_shape
    (out_features, rank), as the file has them; a_name, b_name: there. Of an embedding x is one of
    the vocabulary's unit vectors."""

    a_name: str
    b_name: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    scale: float
    rank: int


@dataclass(frozen=True, slots=True)
class StackedPair(ModulePair):
    """The same of all experts of a layer, whose tensors are at path in transformers' model: A
    (experts * rank, inputs), an expert's ranks together, B (outputs, rank * experts), a rank's
    experts together. The config may have a rank and a scale for each kind, which only a model can
    tell: rank is the lowest. is_never_swapped: as StackFit says, by the version that wrote it."""

    path: str
    ranks: Mapping[StackKind, int]
    scales: Mapping[StackKind, float]
    is_never_swapped: bool

    def of_kind(self, kind: StackKind) -> ModulePair:
        names, shapes = (self.a_name, self.b_name), (self.a_shape, self.b_shape)
        return ModulePair(*names, *shapes, self.scales[kind], self.ranks[kind])


@dataclass(frozen=True, slots=True)
class FoundStack:
    """A StackedPair in a model. pair: of its kind."""

    experts: ExpertModules
    fit: StackFit
    pair: ModulePair


class TensorHeader(Protocol):
    """As safetensors tells it."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class TensorHeaders(Protocol):
    """Of a file, or of one in memory."""

    def keys(self) -> Iterable[str]: ...

    def get_slice(self, name: str) -> TensorHeader: ...


def pairs_of(config: PeftConfig, headers: TensorHeaders) -> dict[str, ModulePair]:
    """By module. Raises AdapterError for names, types and shapes that are not served."""
    return dict(_pairs(headers, config))


def read_pairs(folder: Path) -> dict[str, ModulePair]:
    """Raises AdapterError where config or weights cannot be served."""
    config, path = PeftConfig.read(folder), folder / WEIGHTS_FILE
    with reading_weights():
        if not path.is_file():
            raise AdapterError(f"there is no {WEIGHTS_FILE}; pickled weights are not read")
        with safe_open(path, framework="np", device="cpu") as file:
            return pairs_of(config, file)


@contextmanager
def reading_weights() -> Iterator[None]:
    """What goes wrong meanwhile is an AdapterError."""
    try:
        yield
    except (SafetensorError, OSError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise AdapterError(f"{WEIGHTS_FILE} cannot be read: {reason}") from error


def check_fits(pairs: Mapping[str, ModulePair], info: AdapterInfo) -> None:
    """Raise AdapterError unless a model that takes such adapters takes this one."""
    check_ranks(pairs, info.max_rank)
    _check_stacks(pairs, info)
    for module, pair in pairs.items():
        if isinstance(pair, StackedPair):
            continue
        shape = info.shape_of(module)
        if shape is None:
            raise _unserved(module)
        if (pair.a_shape[1], pair.b_shape[0]) != shape:
            raise AdapterError(
                f"{module} has {pair.a_shape[1]} inputs and {pair.b_shape[0]} outputs there, the "
                f"model's {shape[0]} and {shape[1]}"
            )


def _check_stacks(pairs: Mapping[str, ModulePair], info: AdapterInfo) -> None:
    stated = [pair for pair in pairs.values() if isinstance(pair, StackedPair)]
    stacks = [stack_in(info, pair) for pair in stated]
    for stack in stacks:
        _check_rank(stack.experts.stack_path, stack.pair, info.max_rank)
    added = [(stack.experts.path, stack.fit.kind) for stack in stacks]
    if stacks:
        of_path = {experts.path: experts for experts in info.experts}
        found = ((of_path.get(module.rsplit(".", 2)[0]), module) for module in pairs)
        added += {(one.path, one.kind_of(module)) for one, module in found if one is not None}
    twice = next((one for one in added if added.count(one) > 1), None)
    if twice is not None:
        raise AdapterError(f"{WEIGHTS_FILE} adds to {twice[1].value} of {twice[0]} in two ways")


def stack_in(info: AdapterInfo, stated: StackedPair) -> FoundStack:
    """Whose experts they are, and which of their tensors. Raises AdapterError."""
    experts = info.experts_at(stated.path)
    if experts is None:
        raise _unserved(stated.path)
    fit = experts.fit_of(stated.a_shape, stated.b_shape, stated.is_never_swapped)
    if fit is None:
        raise AdapterError(
            f"{stated.path} has matrices {stated.a_shape} and {stated.b_shape}: of neither tensor "
            f"of experts {experts.width} wide, or it cannot be told what are inputs"
        )
    pair = stated.of_kind(fit.kind)
    if pair.a_shape[0] != pair.rank * experts.num_experts:
        raise AdapterError(
            f"{stated.path} has {pair.a_shape[0]} ranks, which are not {pair.rank}, as the config "
            f"has it, for each of {experts.num_experts} experts"
        )
    return FoundStack(experts, fit, pair)


def _unserved(module: str) -> AdapterError:
    return AdapterError(
        f"it changes {module}; served are the model's projections of attention (q, k, v, o) and of "
        "dense feed-forward blocks (gate, up, down), with engine.lora_embeddings its embedding and "
        "with engine.lora_experts its experts"
    )


def check_ranks(pairs: Mapping[str, ModulePair], max_rank: int) -> None:
    """What can be told without the model. Raises AdapterError."""
    if not pairs:
        raise AdapterError(f"{WEIGHTS_FILE} changes nothing")
    for module, pair in pairs.items():
        _check_rank(module, pair, max_rank)


def _check_rank(module: str, pair: ModulePair, max_rank: int) -> None:
    if pair.rank > max_rank:
        raise AdapterError(f"{module} has rank {pair.rank}, max_lora_rank is {max_rank}")


def _pairs(headers: TensorHeaders, config: PeftConfig) -> Iterator[tuple[str, ModulePair]]:
    seen: set[str] = set()
    for stated, names in sorted(_names(headers).items()):
        module = unwrapped(stated)
        if module in seen:
            raise AdapterError(f"{WEIGHTS_FILE} has {module} by two names")
        seen.add(module)
        if len(names) < 2:
            raise AdapterError(f"{WEIGHTS_FILE}: {module} lacks one of lora_A and lora_B")
        is_embedding = names["A"].endswith("lora_embedding_A")
        if is_embedding != module.endswith("embed_tokens"):
            raise AdapterError(f"{WEIGHTS_FILE} has {names['A']}, which is not served")
        if is_embedding and config.ties_weights:
            raise AdapterError(f"{CONFIG_FILE}: ensure_weight_tying with {module} is not served")
        yield module, _pair(headers, config, stated, names)


def _names(headers: TensorHeaders) -> dict[str, dict[str, str]]:
    """By module as the file calls it, "A" and "B". Raises AdapterError for other tensors."""
    found: dict[str, dict[str, str]] = {}
    bases: list[str] = []
    for name in headers.keys():  # noqa: SIM118 - no mapping
        match = _NAME.fullmatch(name)
        if match is not None:
            names, part = found.setdefault(match[1], {}), match[2] or match[3]
            if part in names:
                raise AdapterError(f"{WEIGHTS_FILE} has {match[1]} by two names")
            names[part] = name
        else:
            bases.append(name)
    for name in bases:
        base = _EMBEDDING_BASE.fullmatch(name)
        names = found.get(base[1], {}) if base else {}
        if not names.get("A", "").endswith("lora_embedding_A"):
            raise AdapterError(f"{WEIGHTS_FILE} has {name}, which is not served")
    return found


def _pair(
    headers: TensorHeaders, config: PeftConfig, stated: str, names: Mapping[str, str]
) -> ModulePair:
    a_shape, b_shape = (_checked_shape(headers, names[part]) for part in "AB")
    stack = _STACK.fullmatch(stated)
    # Patterns are of names as the adapter's own model had them.
    rank, scale = config.rank_of(stated), config.scale_of(stated)
    if a_shape[0] != b_shape[1] or (stack is None and a_shape[0] != rank):
        raise AdapterError(
            f"{stated} has matrices {a_shape} and {b_shape}, and rank {rank} in the config"
        )
    pair = ModulePair(names["A"], names["B"], a_shape, b_shape, scale, rank)
    return pair if stack is None else _stacked(pair, config, stack[1])


def _stacked(pair: ModulePair, config: PeftConfig, path: str) -> StackedPair:
    ranks = {kind: config.rank_of(f"{path}.{kind.value}") for kind in StackKind}
    scales = {kind: config.scale_of(f"{path}.{kind.value}") for kind in StackKind}
    return StackedPair(
        pair.a_name,
        pair.b_name,
        pair.a_shape,
        pair.b_shape,
        pair.scale,
        min(ranks.values()),
        unwrapped(path),
        ranks,
        scales,
        config.peft_version >= _NEVER_SWAPPED,
    )


def _checked_shape(headers: TensorHeaders, name: str) -> tuple[int, ...]:
    header = headers.get_slice(name)
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if dtype not in _FLOATS:
        raise AdapterError(f"{name} has dtype {dtype}; served are {', '.join(_FLOATS)}")
    if len(shape) != 2 or not math.prod(shape):
        raise AdapterError(f"{name} has shape {shape} and is no matrix")
    return shape
