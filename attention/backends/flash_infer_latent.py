"""FlashInfer over a pool of latents: multi-head latent attention, absorbed.

W_UK goes into the query, all heads share the latents, which are K and V at once, and what comes out
goes through W_UV (DeepSeek-V2, arXiv:2405.04434, section 2.1.2). One kernel for rows of any number
of new tokens, which reads the lengths of the host's plan. Knows its geometry and two pools, no
request.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from attention.backends.base import LatentAttentionBackend
from attention.backends.flash_infer import FlashInferBackend
from attention.backends.flash_infer_steps import FlashInferSteps, LayerKind
from attention.backends.flash_infer_workspace import FlashInferWorkspace
from attention.capability import AttentionBackendError, BackendCapability, BackendProbe
from attention.config import AttentionConfig
from attention.forward_batch import ForwardBatch
from attention.kernels.flash_infer import (
    FlashInfer,
    KernelModule,
    compile_modules,
    load_flash_infer,
    score_by,
    uncompiled,
)
from attention.kernels.gpu_limits import gpu_limits
from attention.kernels.page_lists import HostRows, PageLists
from attention.kernels.providers import load_page_lists
from attention.kernels.torch_latent import project_values
from attention.latent_inputs import LatentLayer, LatentTokens, UpProjections
from attention.memory.latent_kv_pool import LatentTokenToKVPool
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import TokenToKVPool
from attention.registration import register_latent_backend
from attention.visibility import CAUSAL_ONLY

_EVERY_LAYER = LayerKind(window=-1, logit_cap=0.0)
_WORKSPACE_BYTES = 128 << 20  # what the package recommends
_HOPPER_MAJOR = 9
_UNSCALED = 1.0


@register_latent_backend("flashinfer")
class FlashInferLatentBackend(LatentAttentionBackend, FlashInferSteps):
    """flashinfer for models that keep latents. No masks: the package has none here."""

    capability: BackendCapability = replace(FlashInferBackend.capability, visibilities=CAUSAL_ONLY)

    @classmethod
    def probe(cls) -> BackendProbe:
        return FlashInferBackend.probe()

    @classmethod
    def compiles_first(cls, config: AttentionConfig) -> str:
        return uncompiled(partial(latent_modules, config, load_flash_infer()))

    def __init__(
        self,
        config: AttentionConfig,
        req_to_token_pool: ReqToTokenPool,
        token_to_kv_pool: TokenToKVPool,
    ) -> None:
        super().__init__(config, req_to_token_pool, token_to_kv_pool)
        if not isinstance(token_to_kv_pool, LatentTokenToKVPool):
            name = type(token_to_kv_pool).__name__
            raise AttentionBackendError(f"latent attention reads a LatentTokenToKVPool, not {name}")
        if config.kv_dtype != config.dtype:
            raise AttentionBackendError(
                f"flashinfer reads latents of the model's dtype {config.dtype}, not "
                f"{config.kv_dtype}"
            )
        self._pool = token_to_kv_pool
        self._entry = token_to_kv_pool.entry
        self._kernels = load_flash_infer()
        self._fill_page_lists = load_page_lists()
        self._kernel_set = _kernel_set(config)
        compile_modules(partial(latent_modules, config, self._kernels))
        self._workspace = FlashInferWorkspace(1, _WORKSPACE_BYTES, config.device)
        self._decode = self._extend = {_EVERY_LAYER: self._new_wrapper()}

    def _new_wrapper(self, **buffers: Any) -> Any:
        wrapper = self._kernels.latent(self._workspace.buffer, backend=self._kernel_set, **buffers)
        return self._workspace.adopt(wrapper, 0)

    def _new_graphed(self, kind: LayerKind, lists: PageLists) -> Any:
        """Of its buffers kernels read the pages only; the others are where plans are copied to."""
        num_rows = lists.max_bs
        scratch = torch.zeros(3 * num_rows + 2, dtype=torch.int32, device=self.config.device)
        qo_indptr, kv_indptr, kv_lens = torch.split(scratch, [num_rows + 1, num_rows + 1, num_rows])
        return self._new_wrapper(
            use_cuda_graph=True,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=lists.indices,
            kv_len_arr=kv_lens,
        )

    def _graph_bytes(self, max_bs: int) -> int:
        """A plan takes as much for any rows."""
        return _WORKSPACE_BYTES

    def _plan_decode(
        self, wrapper: Any, kind: LayerKind, rows: HostRows, indices: torch.Tensor
    ) -> None:
        self._plan(wrapper, rows, indices)

    def _plan_extend(
        self,
        wrapper: Any,
        kind: LayerKind,
        rows: HostRows,
        indices: torch.Tensor,
        forward_batch: ForwardBatch,
    ) -> None:
        self._plan(wrapper, rows, indices)

    def _plan(self, wrapper: Any, rows: HostRows, indices: torch.Tensor) -> None:
        self._workspace.plan(
            wrapper,
            rows.qo_indptr,
            rows.kv_indptr,
            indices,
            rows.kv_lens,
            self.config.tp_q_head_num,
            self._entry.latent_dim,
            self._entry.rope_dim,
            self._pool.page_size,
            True,
            _UNSCALED,
            self.config.dtype,
            self.config.kv_dtype,
        )

    def forward_latent(
        self,
        tokens: LatentTokens,
        up: UpProjections,
        layer: LatentLayer,
        forward_batch: ForwardBatch,
    ) -> torch.Tensor:
        """Tokens of rows without any key (padding) come out as anything."""
        if not tokens.is_saved:
            self._pool.set_latent(
                layer.layer_id, forward_batch.out_cache_loc, tokens.latent, tokens.k_rope
            )
        if len(tokens.q_nope) == 0:
            return tokens.q_nope.new_empty((0, layer.tp_q_head_num, layer.v_head_dim))
        q_latent = torch.bmm(tokens.q_nope.transpose(0, 1), up.w_uk).transpose(0, 1)
        latents = self._pool.get_latent(layer.layer_id)
        dims = [self._entry.latent_dim, self._entry.rope_dim]
        latent, k_rope = torch.split(latents, dims, dim=-1)
        wrapper = self._wrapper_of(_EVERY_LAYER)
        score_by(wrapper, layer.scaling)
        attended = wrapper.run(q_latent, tokens.q_rope, latent, k_rope)
        return project_values(attended, up, tokens.q_nope.dtype)


def latent_modules(config: AttentionConfig, kernels: FlashInfer) -> list[KernelModule]:
    """The one that rows of a config with latents run. ValueError where it has none."""
    if config.latent is None:
        raise ValueError("the config's layers keep K and V of heads")
    dtypes = (config.dtype, config.kv_dtype, config.dtype, torch.int32)
    dims = (config.latent.latent_dim, config.latent.rope_dim)
    return [kernels.latent_module(_kernel_set(config), *dtypes, *dims, False)]


def _kernel_set(config: AttentionConfig) -> str:
    """The package has one for Hopper and one for every GPU."""
    is_hopper = gpu_limits(config.device).compute_capability[0] == _HOPPER_MAJOR
    return "fa3" if is_hopper else "fa2"
