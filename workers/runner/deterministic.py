"""What deterministic mode asks of a model, and why one cannot have it. Runs nothing."""

import torch

from attention.routes import AttentionRoutes
from workers.errors import ConfigError
from workers.loading.loader import LoadedModel


def check_deterministic(loaded: LoadedModel) -> None:
    """Raises ConfigError, with the reason, for a model that would give other bits in other company.

    On a CPU steps run token by token, so that a token's arithmetic is the same in every step; on a
    GPU the model's own products have to be.
    """
    obstacle = _obstacle(loaded)
    if obstacle is not None:
        raise ConfigError(
            f"deterministic: {loaded.facts.architecture} {obstacle}; leave deterministic out for it"
        )


def check_routes(routes: AttentionRoutes, device: torch.device) -> None:
    """Raises ConfigError where a token's attention depends on whether it came as one of a prompt,
    or where a backend is deterministic in steps of one token alone, which a GPU's are not."""
    if routes.extend != routes.decode:
        raise ConfigError(
            f"deterministic: {routes}: two backends do not give a token the same bits; name one "
            "attention_backend for prefill and decode"
        )
    plain = [name for name in routes.names if name.startswith("torch_native")]
    if device.type == "cuda" and plain:
        raise ConfigError(
            f"deterministic: {plain[0]} multiplies by whatever suits a batch on a GPU; take "
            "attention_backend fa3 or triton, or leave deterministic out"
        )


def _obstacle(loaded: LoadedModel) -> str | None:
    model = loaded.model
    if loaded.implementation != "native":
        return "runs through transformers' own code, which multiplies by whatever suits a batch"
    if model.state_entries:
        return "keeps states of requests, which are computed by chunks of a prompt"
    if loaded.device.type == "cuda" and not model.has_invariant_products:
        return "has products on GPUs that depend on the number of tokens in a step"
    return None
