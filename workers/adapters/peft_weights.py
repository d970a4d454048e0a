"""adapter_model.safetensors, as PEFT writes it: two matrices for each module that an adapter
changes. Of a file headers alone are read, without torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from safetensors import SafetensorError, safe_open

from workers.adapters.peft_config import PeftConfig
from workers.adapters.ref import AdapterInfo
from workers.errors import AdapterError
from workers.loading.names import unwrapped

WEIGHTS_FILE = "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")
_FLOATS = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class ModulePair:
    """y += scale * B A x of one checkpoint module. a_shape (rank, in_features), b_shape
    (out_features, rank), as the file has them; a_name, b_name: there."""

    a_name: str
    b_name: str
    a_shape: tuple[int, ...]
    b_shape: tuple[int, ...]
    scale: float

    @property
    def rank(self) -> int:
        return self.a_shape[0]


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
    for module, pair in pairs.items():
        if module not in info.modules:
            raise AdapterError(
                f"it changes {module}; served are the model's projections of attention (q, k, v, "
                "o) and of dense feed-forward blocks (gate, up, down)"
            )
        in_features, out_features = info.modules[module]
        if (pair.a_shape[1], pair.b_shape[0]) != (in_features, out_features):
            raise AdapterError(
                f"{module} has {pair.a_shape[1]} inputs and {pair.b_shape[0]} outputs there, the "
                f"model's {in_features} and {out_features}"
            )


def check_ranks(pairs: Mapping[str, ModulePair], max_rank: int) -> None:
    """What can be told without the model. Raises AdapterError."""
    if not pairs:
        raise AdapterError(f"{WEIGHTS_FILE} changes nothing")
    for module, pair in pairs.items():
        if pair.rank > max_rank:
            raise AdapterError(f"{module} has rank {pair.rank}, max_lora_rank is {max_rank}")


def _pairs(headers: TensorHeaders, config: PeftConfig) -> Iterator[tuple[str, ModulePair]]:
    names: dict[str, dict[str, str]] = {}
    for name in headers.keys():  # noqa: SIM118 - no mapping
        found = _NAME.fullmatch(name)
        if found is None:
            raise AdapterError(f"{WEIGHTS_FILE} has {name}, which is not served")
        names.setdefault(found[1], {})[found[2]] = name
    seen: set[str] = set()
    for stated, of_module in sorted(names.items()):
        module = unwrapped(stated)
        if module in seen:
            raise AdapterError(f"{WEIGHTS_FILE} has {module} by two names")
        seen.add(module)
        if len(of_module) < 2:
            raise AdapterError(f"{WEIGHTS_FILE}: {module} lacks one of lora_A and lora_B")
        a_shape, b_shape = (_checked_shape(headers, of_module[part]) for part in "AB")
        # Patterns are of names as the adapter's own model had them.
        rank = config.rank_of(stated)
        if a_shape[0] != rank or b_shape[1] != rank:
            raise AdapterError(
                f"{module} has matrices {a_shape} and {b_shape}, and rank {rank} in the config"
            )
        scale = config.scale_of(stated)
        yield module, ModulePair(of_module["A"], of_module["B"], a_shape, b_shape, scale)


def _checked_shape(headers: TensorHeaders, name: str) -> tuple[int, ...]:
    header = headers.get_slice(name)
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if dtype not in _FLOATS:
        raise AdapterError(f"{name} has dtype {dtype}; served are {', '.join(_FLOATS)}")
    if len(shape) != 2 or not math.prod(shape):
        raise AdapterError(f"{name} has shape {shape} and is no matrix")
    return shape
