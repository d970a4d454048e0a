"""adapter_config.json, as Hugging Face PEFT writes it for LoRA (Hu et al., 2021).

What changes a result and is not served is refused by its name, and so is what is not known here
and says anything. Knows no tensors.
"""

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from workers.errors import AdapterError
from workers.loading.quantization.patterns import BOUNDS, is_bounded

CONFIG_FILE = "adapter_config.json"

_MAX_SHOWN = 80
_MAX_BYTES = 1 << 20

_MAX_RANK = 1 << 16
_MAX_PATTERNS = 2000

T = TypeVar("T")
Patterns = Sequence[tuple[re.Pattern[str], T]]
"""The first whose expression a module's name is, or ends with behind a dot, says its value."""

# Read below, or without a meaning once an adapter is trained.
_FREE = frozenset(
    (
        "alpha_pattern",
        "arrow_config",
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",
        "ensure_weight_tying",
        "eva_config",
        "exclude_modules",
        "inference_mode",
        "layers_pattern",
        "layers_to_transform",
        "loftq_config",
        "lora_alpha",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "r",
        "rank_pattern",
        "revision",
        "target_modules",
        "target_parameters",
        "use_rslora",
    )
)
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
# Others changed the base's weights, which the model served here does not share.
_PLAIN_BEGINNINGS = (True, False, "gaussian", "orthogonal", "eva")
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none",),
    "task_type": (None, "CAUSAL_LM"),
    "init_lora_weights": _PLAIN_BEGINNINGS,
}


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """rank, alpha: of modules that the patterns do not name. is_rank_stabilised: alpha is divided
    by the rank's root (Kalajdzievski, 2023). ties_weights: what is added to an embedding is meant
    for a head that is tied to it, too. peft_version: of what wrote it, (0, 0, 0) if unsaid."""

    rank: int
    alpha: float
    is_rank_stabilised: bool
    rank_pattern: Patterns[int]
    alpha_pattern: Patterns[float]
    ties_weights: bool
    peft_version: tuple[int, int, int]

    def rank_of(self, module: str) -> int:
        return _found(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What the product of the module's two matrices is multiplied with."""
        rank = self.rank_of(module)
        alpha = _found(self.alpha_pattern, module, self.alpha)
        return float(alpha / (rank**0.5 if self.is_rank_stabilised else rank))

    @classmethod
    def read(cls, folder: Path) -> "PeftConfig":
        """Raises AdapterError, by the name of what is not served."""
        return cls.parse(read_config_bytes(folder))

    @classmethod
    def parse(cls, data: bytes) -> "PeftConfig":
        """data: of the file. Raises as read does."""
        stated = _object_of(data)
        _check_stated(stated)
        return cls(
            rank=_whole(stated.get("r", 8), "r"),
            alpha=_number(stated.get("lora_alpha", 8), "lora_alpha"),
            is_rank_stabilised=_truth(stated.get("use_rslora"), "use_rslora"),
            rank_pattern=_patterns(stated, "rank_pattern", _whole),
            alpha_pattern=_patterns(stated, "alpha_pattern", _number),
            ties_weights=_truth(stated.get("ensure_weight_tying"), "ensure_weight_tying"),
            peft_version=_version(stated.get("peft_version")),
        )


def read_config_bytes(folder: Path) -> bytes:
    """Raises AdapterError where there is no such file, or none of a config's size."""
    file = folder / CONFIG_FILE
    try:
        if not file.is_file():
            raise AdapterError(f"there is no {CONFIG_FILE}")
        if file.stat().st_size > _MAX_BYTES:
            raise AdapterError(f"{CONFIG_FILE} has more than {_MAX_BYTES} bytes")
        return file.read_bytes()
    except OSError as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error.strerror}") from error


def _object_of(data: bytes) -> dict[str, Any]:
    try:
        stated = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{CONFIG_FILE} cannot be read: {error}") from error
    if not isinstance(stated, dict):
        raise AdapterError(f"{CONFIG_FILE} is no object")
    return stated


def _check_stated(stated: Mapping[str, Any]) -> None:
    if "peft_type" not in stated:
        raise AdapterError(f"{CONFIG_FILE} has no peft_type")
    for name, value in stated.items():
        if name in _FREE:
            continue
        # 0 and 1 are no booleans.
        allowed = _ALLOWED.get(name, _NOTHING)
        if not any(value == one and type(value) is type(one) for one in allowed):
            raise AdapterError(f"{CONFIG_FILE}: {_name(name)}={_shown(value)} is not served")


def _shown(value: Any) -> str:
    """Somebody else's words, of any length and of any characters."""
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def _name(name: str) -> str:
    return name if name.isidentifier() and len(name) <= _MAX_SHOWN else _shown(name)


def _whole(value: Any, name: str) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_RANK:
        raise AdapterError(f"{CONFIG_FILE}: {name}={_shown(value)} is no rank")
    return value


def _number(value: Any, name: str) -> float:
    # An integer may be larger than any float.
    if type(value) not in (int, float) or not abs(value) <= sys.float_info.max:
        raise AdapterError(f"{CONFIG_FILE}: {name}={_shown(value)} is no number")
    return float(value)


def _version(value: Any) -> tuple[int, int, int]:
    found = re.match(r"(\d{1,6})\.(\d{1,6})\.(\d{1,6})", value) if isinstance(value, str) else None
    return (0, 0, 0) if found is None else (int(found[1]), int(found[2]), int(found[3]))


def _truth(value: Any, name: str) -> bool:
    """Where nothing is said, it is not so."""
    if value is not None and type(value) is not bool:
        raise AdapterError(f"{CONFIG_FILE}: {name}={_shown(value)} is neither true nor false")
    return value is True


def _patterns(
    stated: Mapping[str, Any], name: str, read: Callable[[Any, str], T]
) -> list[tuple[re.Pattern[str], T]]:
    """read: of a value and what it is called, to the value as it is meant."""
    found = stated.get(name) or {}
    if not isinstance(found, dict):
        raise AdapterError(f"{CONFIG_FILE}: {name} is no object")
    if len(found) > _MAX_PATTERNS:
        raise AdapterError(f"{CONFIG_FILE}: {name} has more than {_MAX_PATTERNS} entries")
    return [
        (_compiled(expression, name), read(value, f"{name} of {_name(expression)}"))
        for expression, value in found.items()
    ]


def _compiled(expression: str, name: str) -> re.Pattern[str]:
    if not is_bounded(expression):
        raise AdapterError(
            f"{CONFIG_FILE}: {name} has {_shown(expression)}, which is too complex: {BOUNDS}"
        )
    try:
        # By itself first: what is whole only with what is put around it is none.
        re.compile(expression)
        return re.compile(rf"(?:.*\.)?(?:{expression})$")
    except (re.error, OverflowError) as error:
        raise AdapterError(f"{CONFIG_FILE}: {name} has {_shown(expression)}: {error}") from error


def _found(patterns: Patterns[T], module: str, otherwise: T) -> T:
    return next((value for pattern, value in patterns if pattern.match(module)), otherwise)
