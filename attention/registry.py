"""Every attention backend there is, by name. A new backend is a new file and one line here."""

from attention.backends import (
    aiter,
    cutlass_mla,
    flash_attention,
    flash_attention_4,
    flash_attention_chunks,
    flash_attention_fp8,
    flash_attention_latent,
    flash_attention_triton,
    flash_infer,
    flash_infer_fp8,
    flash_infer_latent,
    flash_mla,
    flex,
    torch_native,
    torch_native_fp8,
    torch_native_latent,
    triton_deterministic,
    triton_fp8,
    triton_latent,
    triton_paged,
    trtllm_mha,
    trtllm_mla,
)
from attention.backends.base import AttentionBackend
from attention.capability import AttentionBackendError
from attention.config import AttentionConfig
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import (
    ATTENTION_BACKENDS,
    LATENT_BACKENDS,
    BackendRegistry,
    register_attention_backend,
)

BACKEND_MODULES = (
    aiter,
    cutlass_mla,
    flash_attention,
    flash_attention_4,
    flash_attention_chunks,
    flash_attention_fp8,
    flash_attention_latent,
    flash_attention_triton,
    flash_infer,
    flash_infer_fp8,
    flash_infer_latent,
    flash_mla,
    flex,
    torch_native,
    torch_native_fp8,
    torch_native_latent,
    triton_deterministic,
    triton_fp8,
    triton_latent,
    triton_paged,
    trtllm_mha,
    trtllm_mla,
)

__all__ = [
    "ATTENTION_BACKENDS",
    "BACKEND_MODULES",
    "LATENT_BACKENDS",
    "BackendRegistry",
    "create_attention_backend",
    "register_attention_backend",
    "registered_backends",
]


def registered_backends() -> tuple[type[AttentionBackend], ...]:
    """By name: which module was imported first says nothing."""
    return tuple(sorted(ATTENTION_BACKENDS, key=lambda backend: backend.capability.name))


def create_attention_backend(
    name: str,
    config: AttentionConfig,
    req_to_token_pool: ReqToTokenPool,
    token_to_kv_pool: TokenToKVPool,
) -> AttentionBackend:
    """Build the named backend for what config's pool holds, heads or latents.

    AttentionBackendError when there is none of that name for it or it cannot load here.
    """
    registry = ATTENTION_BACKENDS if config.latent is None else LATENT_BACKENDS
    backend_class = registry.get(name)
    probe = backend_class.probe()
    if not probe.is_available:
        raise AttentionBackendError(
            f"attention backend {name!r} cannot load: {probe.missing}. "
            f"To install: {backend_class.capability.install_hint}"
        )
    return backend_class(config, req_to_token_pool, token_to_kv_pool)
