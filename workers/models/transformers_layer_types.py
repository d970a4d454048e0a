"""What a config's layer_types say of the calls that the probe saw. Knows no tensor and no weights.

transformers tells attention of a sliding window with every call, of chunks only by the mask, which
is never built here.
"""

from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Any

from workers.errors import ModelLoadError
from workers.models.transformers_attention import SHARED_LAYER, CallKey, LayerCall

Calls = Mapping[CallKey, LayerCall]


# Layers that keep nothing of a token.
PLAIN_LAYER_TYPES = frozenset(("mlp", "moe"))


def check_layers(config: Any, calls: Calls, state_layers: Set[int]) -> None:
    """Raises ModelLoadError unless each layer attends, keeps a state or needs neither, or as many
    calls are made as the config counts layers, which some models run several times."""
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    needed = {i for i, kind in enumerate(kinds[:num_layers]) if kind not in PLAIN_LAYER_TYPES}
    layers = {key.layer_idx for key in calls} | state_layers
    if not needed <= layers and len(calls) != num_layers:
        raise ModelLoadError(
            f"{len(needed & layers)} of {len(needed)} layers attend through transformers' "
            "attention interface or keep a state in its cache; the others cannot be served"
        )


def check_windows(config: Any, calls: Calls) -> None:
    """Raises ModelLoadError for a model whose sliding windows exist in its mask only."""
    kinds = getattr(config, "layer_types", None)
    windows = {key: call.config.sliding_window_size for key, call in calls.items()}
    if kinds is None:
        is_windowed = getattr(config, "sliding_window", None) is not None
        if is_windowed and all(window == -1 for window in windows.values()):
            raise ModelLoadError("the model does not tell attention of its sliding window")
        return
    for key, window in windows.items():
        kind = "shared" if key.layer_idx == SHARED_LAYER else kinds[key.layer_idx]
        if (kind in ("sliding_attention", "hybrid_sliding")) != (window != -1):
            raise ModelLoadError(
                f"layer {key.layer_idx} is {kind}, but attends with window {window}"
            )


def with_chunks(config: Any, calls: Calls) -> dict[CallKey, LayerCall]:
    """The calls, those of layers that attend in chunks with config.attention_chunk_size.

    Raises ModelLoadError where that is missing.
    """
    kinds = getattr(config, "layer_types", None)
    if kinds is None or "chunked_attention" not in kinds:
        return dict(calls)
    chunk_size = getattr(config, "attention_chunk_size", None)
    if not isinstance(chunk_size, int) or chunk_size < 1:
        raise ModelLoadError(f"chunked attention needs an attention_chunk_size, not {chunk_size}")
    return {
        key: replace(call, config=replace(call.config, chunk_size=chunk_size))
        if kinds[key.layer_idx] == "chunked_attention"
        else call
        for key, call in calls.items()
    }
