"""FlashInfer's wrappers in plain torch, written from their documentation, for machines without it.

Parameters stand in the package's order (tests/gpu holds them against it). A wrapper computes from
exactly what it was given and refuses what the real one would: a kernel that was not compiled, a
plan that another one has overwritten, lengths that the kernel does not read.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import torch

from attention.kernels.flash_infer import FlashInfer
from attention.kernels.page_lists import PageLists

_PLAN_NUMBERS = count(1)


@dataclass
class FakeModule:
    name: str
    package: FakePackage
    sources: tuple = ()
    build_dir: Path = Path("/nowhere")

    @property
    def is_compiled(self):
        return self.name in self.package.compiled

    def build(self, verbose):
        self.package.built.append(self.name)
        self.package.compiled.add(self.name)


@dataclass
class FakePackage:
    """compiled: names of modules. built: of those that were compiled now, in order."""

    compiled: set[str] = field(default_factory=set)
    built: list[str] = field(default_factory=list)

    def kernels(self) -> FlashInfer:
        def module(kind):
            return lambda *arguments: FakeModule(_module_name(kind, *arguments), self)

        def wrapper(fake):
            return lambda *given, **named: fake(*given, **named, compiled=self.compiled)

        return FlashInfer(
            decode=wrapper(FakeDecode),
            prefill=wrapper(FakePrefill),
            latent=wrapper(FakeLatent),
            decode_module=module("decode"),
            prefill_module=module("prefill"),
            latent_module=module("latent"),
        )


def _module_name(*arguments):
    return "_".join(map(str, arguments))


class _Wrapper:
    """What all have: a plan is uploaded from page-locked memory to the workspace, where runs find
    it until another plan takes its place."""

    def _start(self, float_workspace_buffer, compiled):
        assert not float_workspace_buffer[:4096].any(), "zero before its first use"
        self._compiled = compiled
        self._int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._pin_memory_int_workspace_buffer = torch.zeros(8, dtype=torch.uint8)
        self._plan_number = 0

    def _planned(self, module, *host_tensors):
        assert module in self._compiled, f"{module} would be compiled in a step"
        for tensor in host_tensors:
            assert tensor.dtype == torch.int32
            assert tensor.device.type == "cpu"
        self._plan_number = next(_PLAN_NUMBERS)
        self._pin_memory_int_workspace_buffer[:8] = _as_bytes(self._plan_number)
        self._int_workspace_buffer[:8] = self._pin_memory_int_workspace_buffer[:8]

    def _check_plan(self):
        held = self._int_workspace_buffer[:8]
        assert torch.equal(held, _as_bytes(self._plan_number)), "another plan took its place"


class _PagedWrapper(_Wrapper):
    def _take_lists(self, indptr, indices, last_page_len, page_size):
        assert int(last_page_len.min()) > 0
        self._kv_lens = _lengths(indptr, last_page_len, page_size)
        if not self._use_cuda_graph:
            self._paged_kv_indptr_buf = indptr.clone()
            self._paged_kv_indices_buf = indices
            self._paged_kv_last_page_len_buf = last_page_len.clone()
            return
        assert len(last_page_len) == len(self._paged_kv_last_page_len_buf)
        assert len(indices) <= len(self._paged_kv_indices_buf)
        self._paged_kv_indptr_buf.copy_(indptr)
        self._paged_kv_last_page_len_buf.copy_(last_page_len)
        self._paged_kv_indices_buf[: len(indices)].copy_(indices)

    def _check_run(self, q, paged_kv_cache, out, enable_pdl):
        self._check_plan()
        k_pages, v_pages = paged_kv_cache
        assert enable_pdl is False
        assert (q.dtype, k_pages.dtype) == self._dtypes
        assert k_pages.shape[1:] == (self._page_size, self._kv_heads, self._head_dim)
        assert k_pages.stride() == v_pages.stride()
        assert q.shape[1:] == (self._q_heads, self._head_dim)
        assert q.stride(-1) == 1
        assert out.shape == q.shape
        assert out.is_contiguous()
        assert out.dtype == q.dtype
        return k_pages, v_pages

    def _rows(self, k_pages, v_pages):
        """Of each row its K and V, by the device's lists."""
        indptr = self._paged_kv_indptr_buf.tolist()
        lengths = _lengths(
            self._paged_kv_indptr_buf, self._paged_kv_last_page_len_buf, self._page_size
        )
        for row, length in enumerate(lengths.tolist()):
            pages = self._paged_kv_indices_buf[indptr[row] : indptr[row + 1]].long()
            yield tuple(all_pages[pages].flatten(0, 1)[:length] for all_pages in (k_pages, v_pages))


class FakeDecode(_PagedWrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
        *,
        compiled,
    ):
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self._start(float_workspace_buffer, compiled)
        self._use_cuda_graph = use_cuda_graph
        self._use_tensor_cores = use_tensor_cores
        self._paged_kv_indptr_buf = paged_kv_indptr_buffer
        self._paged_kv_indices_buf = paged_kv_indices_buffer
        self._paged_kv_last_page_len_buf = paged_kv_last_page_len_buffer

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        pos_encoding_mode="NONE",
        window_left=-1,
        logits_soft_cap=None,
        q_data_type="float16",
        kv_data_type=None,
        o_data_type=None,
        data_type=None,
        sm_scale=None,
    ):
        self._take_lists(indptr, indices, last_page_len, page_size)
        kind, extra = ("prefill_fa2", (False,)) if self._use_tensor_cores else ("decode", ())
        assert self._use_tensor_cores or num_qo_heads // num_kv_heads in (1, 2, 3, 4, 8)
        dtypes, dims = (q_data_type, kv_data_type, q_data_type, torch.int32), (head_dim, head_dim)
        variant = (window_left != -1, logits_soft_cap > 0)
        module = _module_name(kind, *dtypes, *dims, 0, *variant, *extra)
        self._planned(module, indptr, last_page_len)
        self._dtypes = (q_data_type, kv_data_type)
        self._q_heads, self._kv_heads, self._head_dim = num_qo_heads, num_kv_heads, head_dim
        self._page_size = page_size
        self._scoring = (window_left, logits_soft_cap, sm_scale)

    def run(self, q, paged_kv_cache, *, q_scale, out, enable_pdl, k_scale=1.0, v_scale=1.0):
        k_pages, v_pages = self._check_run(q, paged_kv_cache, out, enable_pdl)
        assert len(q) == len(self._paged_kv_last_page_len_buf)
        for row, (k, v) in enumerate(self._rows(k_pages, v_pages)):
            assert len(k) == self._kv_lens[row], "parts of keys are found by both lengths"
            window_left, cap, factor = self._scoring
            seen = torch.arange(len(k)) >= len(k) - 1 - window_left if window_left >= 0 else None
            out[row : row + 1] = _attend(
                q[row : row + 1], k, v, factor * q_scale * k_scale, cap, seen
            )
        return out.mul_(v_scale)


class FakePrefill(_PagedWrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto", compiled):
        assert kv_layout == "NHD"
        assert backend == "fa2"
        self._start(float_workspace_buffer, compiled)
        self._use_cuda_graph = False

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        head_dim_vo=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        q_data_type="float16",
        kv_data_type=None,
    ):
        self._take_lists(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)
        dtypes = (q_data_type, kv_data_type, q_data_type, torch.int32)
        variant = (window_left >= 0, logits_soft_cap > 0, False)
        dims = (head_dim_qk, head_dim_qk)
        module = _module_name("prefill", "fa2", *dtypes, *dims, 0, *variant)
        self._planned(module, qo_indptr, paged_kv_indptr, paged_kv_last_page_len)
        self._qo_indptr = qo_indptr.tolist()
        self._dtypes = (q_data_type, kv_data_type)
        self._q_heads, self._kv_heads, self._head_dim = num_qo_heads, num_kv_heads, head_dim_qk
        self._page_size = page_size
        self._scoring = (window_left, logits_soft_cap, sm_scale)
        self._causal, self._packed, self._mask_indptr_buf = causal, packed_custom_mask, None
        assert causal or packed_custom_mask is not None

    def run(self, q, paged_kv_cache, *, q_scale, out, enable_pdl, k_scale=1.0, v_scale=1.0):
        k_pages, v_pages = self._check_run(q, paged_kv_cache, out, enable_pdl)
        assert len(q) == self._qo_indptr[-1]
        window_left, cap, factor = self._scoring
        for row, (k, v) in enumerate(self._rows(k_pages, v_pages)):
            own = slice(self._qo_indptr[row], self._qo_indptr[row + 1])
            if own.start == own.stop:
                continue
            assert len(k) == self._kv_lens[row], "parts of keys are found by both lengths"
            places = torch.arange(len(k) - (own.stop - own.start), len(k)).unsqueeze(1)
            seen = self._seen(row, places, len(k))
            if window_left >= 0:
                seen = seen & (torch.arange(len(k)) >= places - window_left)
            out[own] = _attend(q[own], k, v, factor * q_scale * k_scale, cap, seen)
        return out.mul_(v_scale)

    def _seen(self, row, places, num_keys):
        if self._packed is None:
            return torch.arange(num_keys) <= places
        first = int(self._mask_indptr_buf[row])
        num_cells = len(places) * num_keys
        packed = self._packed[first : first + -(-num_cells // 8)]
        bits = (packed.unsqueeze(1) >> torch.arange(8, dtype=torch.uint8)) & 1
        return bits.flatten()[:num_cells].view(-1, num_keys).bool()


class FakeLatent(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        use_cuda_graph=False,
        qo_indptr=None,
        kv_indptr=None,
        kv_indices=None,
        kv_len_arr=None,
        backend="auto",
        *,
        compiled,
    ):
        self._start(float_workspace_buffer, compiled)
        self._backend = backend
        self._static = (qo_indptr, kv_indptr, kv_len_arr) if use_cuda_graph else None
        self._kv_indices_buf = kv_indices

    def plan(
        self,
        qo_indptr,
        kv_indptr,
        kv_indices,
        kv_len_arr,
        num_heads,
        head_dim_ckv,
        head_dim_kpe,
        page_size,
        causal,
        sm_scale,
        q_data_type,
        kv_data_type,
    ):
        assert causal
        host = (qo_indptr, kv_indptr, kv_len_arr)
        dtypes = (q_data_type, kv_data_type, q_data_type, torch.int32)
        dims = (head_dim_ckv, head_dim_kpe)
        module = _module_name("latent", self._backend, *dtypes, *dims, False)
        self._planned(module, *host)
        if self._static is None:
            self._kv_indices_buf = kv_indices
        else:
            for static, new in zip(self._static, host, strict=True):
                static.copy_(new)
            self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices)
        self._plan = [tensor.tolist() for tensor in host]
        self._page_size, self._dims, self._heads = page_size, dims, num_heads
        self._sm_scale = sm_scale

    def run(self, q_nope, q_pe, ckv_cache, kpe_cache):
        self._check_plan()
        assert (q_nope.shape[-1], q_pe.shape[-1]) == self._dims
        assert q_nope.shape[1] == self._heads
        assert ckv_cache.shape[1] == kpe_cache.shape[1] == self._page_size
        out = torch.empty_like(q_nope)
        qo_indptr, kv_indptr, kv_lens = self._plan
        for row, num_keys in enumerate(kv_lens):
            own = slice(qo_indptr[row], qo_indptr[row + 1])
            pages = self._kv_indices_buf[kv_indptr[row] : kv_indptr[row + 1]].long()
            latent = ckv_cache[pages].flatten(0, 1)[:num_keys].unsqueeze(1)
            rope = kpe_cache[pages].flatten(0, 1)[:num_keys].unsqueeze(1)
            q, k = torch.cat((q_nope[own], q_pe[own]), -1), torch.cat((latent, rope), -1)
            places = torch.arange(num_keys - len(q), num_keys).unsqueeze(1)
            seen = torch.arange(num_keys) <= places
            out[own] = _attend(q, k, latent, self._sm_scale, 0.0, seen)
        return out


def _attend(q, k, v, factor, cap, seen):
    """q (n, heads, dim), k, v (keys, kv_heads, dim); seen: bool (n, keys) or (keys,), None for
    all."""
    group = q.shape[1] // k.shape[1]
    k, v = (kv.double().repeat_interleave(group, dim=1) for kv in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) * factor
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    if seen is not None:
        scores = scores.masked_fill(~seen, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(q.dtype)


def _lengths(indptr, last_page_len, page_size):
    return (indptr[1:] - indptr[:-1] - 1) * page_size + last_page_len


def _as_bytes(number):
    return torch.tensor([number], dtype=torch.int64).view(torch.uint8)


def fill_page_lists(
    req_to_token: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    extend_seq_lens: torch.Tensor,
    lists: PageLists,
    page_size: int,
    max_seq_len: int,
    window: int,
) -> None:
    """attention.kernels.triton_page_lists."""
    begin = 0
    lists.indptr[0] = 0
    lengths = zip(slots.tolist(), seq_lens.tolist(), extend_seq_lens.tolist(), strict=True)
    for row, (slot, length, num_new) in enumerate(lengths):
        assert length <= max_seq_len
        pages = req_to_token[slot, : max(length, 1) : page_size] // page_size
        if length == 0:
            pages[:] = 0
        if window:
            pages[: max(length - max(num_new, 1) - window + 1, 0) // page_size] = 0
        lists.indices[begin : begin + len(pages)] = pages
        begin += len(pages)
        lists.indptr[row + 1] = begin
        lists.last_page_lens[row] = (max(length, 1) - 1) % page_size + 1
