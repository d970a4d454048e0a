"""The part of docs/attention-backends.md about the choice: the order, and what it comes to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from attention.memory.layout import LatentEntry
from attention.preferences import FIRST_IN_SGLANG, PREFERENCES, DeviceFacts
from attention.selection import AttentionNeeds, fitting_backends
from attention.visibility import VisibilityKind

_INTRODUCTION = """\
## How one is chosen

A backend asked for by name is taken, or fails with the reason and with what fits instead. Without a
name, the first of these that loads and that can do what is needed is taken and logged: for each
phase and for each kind of layers, so that layers that only one backend knows do not take the others
along. `attention_backend`, `prefill_attention_backend` and `decode_attention_backend` name one;
`auto-tuned` measures those that can and takes the fastest; `flex` and `torch_native`, made for what
others cannot do, only where nothing else can.
"""

_TAKEN = """\
What that order comes to in bfloat16, where every package loads; prefill and decode in one step.
"""

DEVICES = (
    DeviceFacts("cuda", "Hopper", (9, 0)),
    DeviceFacts("cuda", "Blackwell", (10, 0)),
    DeviceFacts("cuda", "Blackwell", (12, 0)),
    DeviceFacts("cuda", "Ampere", (8, 0)),
    DeviceFacts("cuda", "Turing", (7, 5)),
    DeviceFacts("cpu", "CPU", None),
)
_HALF = AttentionNeeds(
    torch.bfloat16, torch.bfloat16, needs_mixed_batches=True, head_dims=(128, 128)
)
_LATENTS = replace(_HALF, needs_mla=True, needs_unequal_head_dims=True, latent=LatentEntry(512, 64))
_CAUSAL = VisibilityKind.CAUSAL

NEEDS = {
    "MHA and GQA": _HALF,
    "MHA and GQA, pages of 1 token": replace(_HALF, page_size=1),
    "draft trees (speculation with several candidates)": replace(
        _HALF, visibilities=frozenset({_CAUSAL, VisibilityKind.TREE})
    ),
    "multi-item scoring": replace(_HALF, visibilities=frozenset({_CAUSAL, VisibilityKind.ITEMS})),
    "encoders": replace(_HALF, visibilities=frozenset({VisibilityKind.EVERYTHING})),
    "FP8 KV cache (e4m3)": replace(_HALF, kv_dtype=torch.float8_e4m3fn),
    "windows, caps and sinks": replace(
        _HALF, needs_sliding_window=True, needs_logit_cap=True, needs_sinks=True
    ),
    "chunks of 8,192": replace(_HALF, needs_chunked_attention=True, chunk_size=8192),
    "heads of 192 and 128": replace(_HALF, needs_unequal_head_dims=True, head_dims=(192, 128)),
    "heads of 80": replace(_HALF, head_dims=(80, 80)),
    "heads of 512": replace(_HALF, head_dims=(512, 512)),
    "cross-attention": replace(_HALF, needs_cross_attention=True),
    "layers that differ in heads": replace(_HALF, needs_unlike_layers=True),
    "deterministic mode": replace(_HALF, needs_deterministic=True),
    "MLA": _LATENTS,
    "MLA, pages of 64 tokens": replace(_LATENTS, page_size=64),
    "MLA, draft trees": replace(_LATENTS, visibilities=frozenset({_CAUSAL, VisibilityKind.TREE})),
    "MLA, latents of 256": replace(_LATENTS, latent=LatentEntry(256, 64)),
    "MLA, FP8 KV cache (e4m3)": replace(_LATENTS, kv_dtype=torch.float8_e4m3fn),
}


def choice_lines() -> list[str]:
    """As Markdown."""
    columns = ("Device", "MHA and GQA", "MLA", "SGLang begins with", "Why not so here")
    lines = [_INTRODUCTION, row(columns), row(["---"] * len(columns))]
    for generation, preference in PREFERENCES.items():
        cells = (
            generation,
            ", ".join(preference.mha),
            ", ".join(preference.mla),
            ", ".join(FIRST_IN_SGLANG[generation]),
            "; ".join(dict.fromkeys(filter(None, (preference.why_mha, preference.why_mla)))),
        )
        lines.append(row(cells))
    lines += ["", _TAKEN, row(["Model and steps", *map(str, DEVICES)])]
    lines.append(row(["---"] * (1 + len(DEVICES))))
    lines += [
        row([what, *(_first(device, needs) for device in DEVICES)]) for what, needs in NEEDS.items()
    ]
    return lines


def _first(device: DeviceFacts, needs: AttentionNeeds) -> str:
    """Whoever is in no order is taken by its name only."""
    order = PREFERENCES[device.generation].of(needs.needs_mla, needs.needs_deterministic)
    taken = [name for name in fitting_backends(device, needs) if name in order]
    return f"`{taken[0]}`" if taken else "none"


def row(cells: Sequence[str]) -> str:
    """Of a table in Markdown."""
    return "| " + " | ".join(cells) + " |"
