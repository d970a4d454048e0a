"""Where kernel packages come from. Loading is explicit and loud: what is missing, and its install.

Nothing here runs a kernel or knows a batch. Modules that need a package call a loader when they
are built, so that they import, and are listed, on machines without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch

from attention.capability import AttentionBackendError, BackendProbe

FLASH_ATTENTION_3_INSTALL = (
    "pip install 'tessera[cuda]' (sglang-kernel 0.4.3 for torch 2.11), "
    "or build flash_attn_interface from the hopper folder of the flash-attention project"
)
FLASH_ATTENTION_4_INSTALL = (
    "pip install 'flash-attn-4[cu13]==4.0.0b15' 'nvidia-cutlass-dsl[cu13]==4.5.2' "
    "quack-kernels==0.5.0 (releases that work together)"
)
FLASH_MLA_INSTALL = "pip install 'tessera[cuda]' (sglang-kernel 0.4.3 for torch 2.11)"
TRITON_INSTALL = "pip install triton (part of CUDA builds of torch)"
GLUON_TRITON = "3.6."
"""Gluon is no stable language: the kernel is for the releases it was tested with."""


@dataclass(frozen=True, slots=True)
class FlashAttention3:
    """The entry points of FlashAttention-3 that serving needs, as one package offers them.

    attend: flash_attn_with_kvcache. plan: get_scheduler_metadata, which settles on the device how
    a step's rows are split, once instead of once per attend. has_sinks: attend takes `sinks`,
    bfloat16 (tp_q_head_num,). takes_out: attend takes `out`, the tensor that it fills and returns.
    attend_flat: flash_attn_varlen_func, over keys that lie in no pages: the
    output and the log-sum-exp of its scores, float32 (heads, n). takes_qv: attend takes
    `qv`, queries of the values: a score is q . k + qv . v, as latent attention needs it.
    """

    package: str
    attend: Callable[..., torch.Tensor]
    plan: Callable[..., torch.Tensor]
    has_sinks: bool
    takes_out: bool
    attend_flat: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    takes_qv: bool


@dataclass(frozen=True, slots=True)
class FlashAttention4:
    """attend: flash_attn_varlen_func, the output and, if asked for, the log-sum-exp."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]


FLASH_ATTENTION_4_ARGUMENTS = frozenset(
    {
        "cu_seqlens_q",
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "page_table",
        "softmax_scale",
        "causal",
        "window_size",
        "softcap",
        "learnable_sink",
    }
)
"""What a paged step hands over by name; betas of the package differ."""


@dataclass(frozen=True, slots=True)
class FlashMLA:
    """FlashMLA's dense decode kernel. attend: flash_mla_with_kvcache. plan: get_mla_metadata, how a
    step's rows are split over multiprocessors, from lengths on the device."""

    attend: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    plan: Callable[..., tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class TritonKernels:
    """This repository's own Triton kernels; each one's module says what it does."""

    fill_step_tables: Callable[..., None]
    copy_kv: Callable[..., None]
    quantise_kv: Callable[..., None]
    quantise_queries: Callable[..., torch.Tensor]
    line_up: Callable[..., None]


@dataclass(frozen=True, slots=True)
class DecodeKernels:
    """The kernels of a decode step, to be launched as kernel[grid](...)."""

    plan_chunks: Any
    attend_chunk: Any
    attend_projected: Any


@dataclass(frozen=True, slots=True)
class ExtendKernels:
    """The kernels of rows with any number of new tokens, to be launched as kernel[grid](...)."""

    attend_extend: Any
    join_splits: Any


@dataclass(frozen=True, slots=True)
class GluonExtend:
    """attend: the kernel of warpgroups, to be launched as kernel[grid](...). describe: K or V of a
    layer, and how many tokens a copy brings, as it takes them."""

    attend: Any
    describe: Callable[[torch.Tensor, int], Any]


@dataclass(frozen=True, slots=True)
class FlashAttention3Package:
    """A distribution and the module in it that holds the kernels."""

    distribution: str
    top_module: str
    kernel_module: str


FLASH_ATTENTION_3_PACKAGES = (
    FlashAttention3Package("sglang-kernel", "sgl_kernel", "sgl_kernel.flash_attn"),
    FlashAttention3Package("flash_attn_interface", "flash_attn_interface", "flash_attn_interface"),
)


def load_flash_attention_3(
    packages: tuple[FlashAttention3Package, ...] = FLASH_ATTENTION_3_PACKAGES,
) -> FlashAttention3:
    """The first of the packages that is installed.

    Raises AttentionBackendError when none is, or when the one that is does not load: a broken
    installation is reported, never passed over for the next.
    """
    for package in packages:
        if importlib.util.find_spec(package.top_module) is not None:
            return _open(package, _import(package.kernel_module, FLASH_ATTENTION_3_INSTALL))
    names = " nor ".join(package.distribution for package in packages)
    raise AttentionBackendError(
        f"no FlashAttention-3 kernels: neither {names} is installed. "
        f"To install: {FLASH_ATTENTION_3_INSTALL}"
    )


def probe_flash_attention_3() -> BackendProbe:
    """Whether FlashAttention-3 and Triton load here; missing says what does not."""
    try:
        load_flash_attention_3()
        load_triton_kernels()
    except AttentionBackendError as error:
        return BackendProbe(is_available=False, missing=str(error))
    return BackendProbe(is_available=True)


def load_flash_attention_4() -> FlashAttention4:
    """Raises AttentionBackendError when flash-attn-4 or what it compiles with does not load, or its
    varlen function lacks an argument. Compiles nothing yet."""
    attend = _import("flash_attn.cute", FLASH_ATTENTION_4_INSTALL).flash_attn_varlen_func
    lacking = FLASH_ATTENTION_4_ARGUMENTS - inspect.signature(attend).parameters.keys()
    if lacking:
        raise AttentionBackendError(
            f"this flash-attn-4 has no {', '.join(sorted(lacking))} in its varlen function. "
            f"To install one that has: {FLASH_ATTENTION_4_INSTALL}"
        )
    return FlashAttention4(attend)


def probe_flash_attention_4() -> BackendProbe:
    """Whether FlashAttention-4 and Triton load here; missing says what does not."""
    try:
        load_flash_attention_4()
        load_triton_kernels()
    except AttentionBackendError as error:
        return BackendProbe(is_available=False, missing=str(error))
    return BackendProbe(is_available=True)


def load_flash_mla() -> FlashMLA:
    """Raises AttentionBackendError when sglang-kernel is missing or its extension does not load."""
    _import("sgl_kernel.flashmla_ops", FLASH_MLA_INSTALL)
    module = _import("sgl_kernel.flash_mla", FLASH_MLA_INSTALL)
    return FlashMLA(attend=module.flash_mla_with_kvcache, plan=module.get_mla_metadata)


def probe_flash_mla() -> BackendProbe:
    """Whether FlashMLA loads here, and FlashAttention-3, which computes prompts for it."""
    try:
        load_flash_mla()
    except AttentionBackendError as error:
        return BackendProbe(is_available=False, missing=str(error))
    return probe_flash_attention_3()


def load_triton_kernels() -> TritonKernels:
    """Raises AttentionBackendError when Triton does not import. Compiles nothing yet."""
    _import("triton", TRITON_INSTALL)
    kv_write = importlib.import_module("attention.kernels.triton_kv_write")
    kv_lines = importlib.import_module("attention.kernels.triton_kv_lines")
    step_tables = importlib.import_module("attention.kernels.triton_step_tables")
    return TritonKernels(
        fill_step_tables=step_tables.fill_step_tables,
        copy_kv=kv_write.copy_kv,
        quantise_kv=kv_write.quantise_kv,
        quantise_queries=kv_write.quantise_queries,
        line_up=kv_lines.line_up,
    )


def load_page_lists() -> Callable[..., None]:
    """fill_page_lists. Raises AttentionBackendError when Triton does not import."""
    _import("triton", TRITON_INSTALL)
    page_lists = importlib.import_module("attention.kernels.triton_page_lists")
    fill: Callable[..., None] = page_lists.fill_page_lists
    return fill


def load_decode_kernels() -> DecodeKernels:
    """Raises AttentionBackendError when Triton does not import. Compiles nothing yet."""
    _import("triton", TRITON_INSTALL)
    plan = importlib.import_module("attention.kernels.triton_decode_plan")
    decode = importlib.import_module("attention.kernels.triton_decode")
    return DecodeKernels(
        plan_chunks=plan.plan_chunks_kernel,
        attend_chunk=decode.attend_chunk_kernel,
        attend_projected=decode.attend_projected_kernel,
    )


def load_extend_kernels() -> ExtendKernels:
    """Raises AttentionBackendError when Triton does not import. Compiles nothing yet."""
    _import("triton", TRITON_INSTALL)
    extend = importlib.import_module("attention.kernels.triton_extend")
    return ExtendKernels(
        attend_extend=extend.attend_extend_kernel, join_splits=extend.join_splits_kernel
    )


def probe_gluon() -> BackendProbe:
    """Whether Triton is a release that the Gluon kernel is for. Needs Triton."""
    version = str(_import("triton", TRITON_INSTALL).__version__)
    if version.startswith(GLUON_TRITON):
        return BackendProbe(is_available=True)
    missing = f"the Gluon kernel is for Triton {GLUON_TRITON}x, this is {version}"
    return BackendProbe(is_available=False, missing=missing)


def load_gluon_extend() -> GluonExtend:
    """Raises AttentionBackendError when Triton has no Gluon. Compiles nothing yet."""
    _import("triton.experimental.gluon", TRITON_INSTALL)
    extend = importlib.import_module("attention.kernels.gluon_extend")
    return GluonExtend(attend=extend.attend_gluon_kernel, describe=extend.describe_pages)


def probe_triton() -> BackendProbe:
    """Whether Triton imports here."""
    try:
        load_triton_kernels()
    except AttentionBackendError as error:
        return BackendProbe(is_available=False, missing=str(error))
    return BackendProbe(is_available=True)


def _open(package: FlashAttention3Package, module: ModuleType) -> FlashAttention3:
    attend = module.flash_attn_with_kvcache
    parameters = inspect.signature(attend).parameters
    return FlashAttention3(
        package=package.distribution,
        attend=attend,
        plan=module.get_scheduler_metadata,
        has_sinks="sinks" in parameters,
        takes_out="out" in parameters,
        attend_flat=_with_lse(module.flash_attn_varlen_func),
        takes_qv="qv" in parameters,
    )


def _with_lse(attend_flat: Callable[..., Any]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """By the flag that the package's build has for it; builds without one return both. What they
    return beside is the kernel's own."""
    parameters = inspect.signature(attend_flat).parameters
    flags = [flag for flag in ("return_softmax_lse", "return_attn_probs") if flag in parameters]
    asked = dict.fromkeys(flags[:1], True)

    def attend(*args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = attend_flat(*args, **named, **asked)
        return out, lse

    return attend


def _import(module: str, install: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        raise AttentionBackendError(
            f"{module} does not load here: {error}. To install: {install}"
        ) from error
