"""Steps whose new tokens see other keys than those before them: draft trees, items, encoders."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from attention.visibility import Everything, Items, Tree, Visibility
from tests.unit.attention.cases import AttentionCase, CaseSpec, build_case

Make = Callable[[CaseSpec, np.random.Generator], tuple[Visibility, list[np.ndarray]]]
"""A visibility of the spec's rows, and the positions of each row's new tokens."""


def tree(spec: CaseSpec, random: np.random.Generator) -> tuple[Visibility, list[np.ndarray]]:
    """Random trees; a draft stands as far behind the prefix as it has ancestors."""
    parents = [
        np.array([-1, *(random.integers(0, max(token, 1)) for token in range(1, row.num_new))])[
            : row.num_new
        ].astype(np.int32)
        for row in spec.rows
    ]
    positions = []
    for row, own in zip(spec.rows, parents, strict=True):
        depths: list[int] = []
        for parent in own.tolist():
            depths.append(0 if parent < 0 else depths[parent] + 1)
        positions.append(row.prefix_len + np.array(depths, dtype=np.int64))
    return Tree.of_parents(parents, spec.device), positions


def items(spec: CaseSpec, random: np.random.Generator) -> tuple[Visibility, list[np.ndarray]]:
    """Up to five items a row, some of which begin among its cached tokens; each item's tokens stand
    behind the shared prefix. A row of one token in all has none."""
    starts, positions = [], []
    for row in spec.rows:
        first = row.seq_len // 3
        borders = (
            {first, *random.integers(first, row.seq_len, 4).tolist()} if row.seq_len > 1 else ()
        )
        own = sorted(borders)
        starts.append(own)
        places = np.arange(row.prefix_len, row.seq_len)
        if own:
            item = np.searchsorted(np.array(own), places, side="right")
            begun = np.array([0, *own])[item]
            places = np.where(item > 0, first + places - begun, places)
        positions.append(places)
    prefix = np.array([row.prefix_len for row in spec.rows], dtype=np.int32)
    new = np.array([row.num_new for row in spec.rows], dtype=np.int32)
    return Items.of_starts(starts, prefix, new, spec.device), positions


def everything(spec: CaseSpec, random: np.random.Generator) -> tuple[Visibility, list[np.ndarray]]:
    return Everything(), [np.arange(row.prefix_len, row.seq_len) for row in spec.rows]


KINDS: dict[str, Make] = {"tree": tree, "items": items, "everything": everything}


def build_visible(spec: CaseSpec, make: Make, seed: int = 0) -> AttentionCase:
    """build_case with what its new tokens see."""
    case = build_case(spec)
    visibility, positions = make(spec, np.random.default_rng(seed))
    return replace(case, batch=replace(case.batch, **fields_of(spec, visibility, positions)))


def fields_of(
    spec: CaseSpec, visibility: Visibility, positions: list[np.ndarray]
) -> dict[str, object]:
    """Of a batch of the spec's rows."""
    flat = np.concatenate([np.zeros(0, dtype=np.int64), *positions]).astype(np.int64)
    return {"visibility": visibility, "positions": torch.from_numpy(flat).to(spec.device)}
