"""What experts got in earlier runs, kept in a file, by which a start copies the busiest.

{"tokens": [[...], ...]}: of every mixture in the order of the layers, tokens of each expert.
Whoever writes last is believed: replicas of one model get the same kind of text.
"""

import json
import uuid
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from workers.errors import ConfigError
from workers.layers.moe.mixture import MixtureOfExperts
from workers.parallel.group import TPGroup

_MOST = 2**63 - 1
"""Of int64."""


def write_expert_loads(path: Path, tokens: Sequence[Sequence[int]]) -> None:
    """Whole or not at all. Raises OSError."""
    # Processes in containers of their own, which share the folder, may have one number.
    new = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        new.write_text(json.dumps({"tokens": [list(row) for row in tokens]}), encoding="utf-8")
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read_expert_loads(path: Path, num_mixtures: int, num_experts: int) -> list[list[int]]:
    """Zeros where there is no file yet. Raises ConfigError for one of another model."""
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        tokens = [[_count(count) for count in row] for row in stored["tokens"]]
    except FileNotFoundError:
        return [[0] * num_experts for _ in range(num_mixtures)]
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"{path} holds no loads of experts: {error}") from error
    if [len(row) for row in tokens] != [num_experts] * num_mixtures:
        raise ConfigError(
            f"{path} is not of {num_mixtures} mixtures of {num_experts} experts: another model's"
        )
    return tokens


def _count(value: object) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError(f"{value!r} is no number of tokens")
    return value


def copy_busiest_experts(model: nn.Module, path: Path, tp: TPGroup, device: torch.device) -> None:
    """Before weights are loaded. All ranks call it and go by what rank 0 reads: the file may
    change meanwhile. Raises ConfigError."""
    mixtures = [module for module in model.modules() if isinstance(module, MixtureOfExperts)]
    if not mixtures:
        raise ConfigError("num_redundant_experts copies experts, and this model has none")
    num_experts = mixtures[0].experts.spec.num_experts
    loads = torch.zeros((len(mixtures), num_experts), dtype=torch.int64, device=device)
    if tp.rank == 0:
        loads.copy_(torch.tensor(read_expert_loads(path, len(mixtures), num_experts)))
    tp.broadcast(loads, 0)
    for mixture, of_layer in zip(mixtures, loads.tolist(), strict=True):
        mixture.experts.keep_copies(of_layer)
