"""FlashInfer: its wrappers, and its kernels, which nvcc compiles where they are first used.

A kernel is one compiled module for a kind of attention. Whoever builds a backend has its modules
compiled then, so that no request waits for nvcc; the package keeps them on disk, below
FLASHINFER_WORKSPACE_BASE or the home folder. Runs no kernel, knows no batch.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from attention.capability import AttentionBackendError, BackendProbe

logger = logging.getLogger(__name__)

FLASH_INFER_INSTALL = (
    "pip install flashinfer-python==0.6.12; ninja and the nvcc of torch's CUDA version compile it"
)
_COMPILED_PACKAGE = "flashinfer_jit_cache"
_DEFAULT_CUDA_HOME = "/usr/local/cuda"
_PROGRESS_INTERVAL_S = 15.0
_FILES_PER_MODULE = 10  # which its ninja compiles at once, on as many cores
_SHOWN_CHARACTERS = 2000

# Of a wrapper: what plan uploads from and to, and what run reads. They have no public name.
_UPLOAD_FROM = "_pin_memory_int_workspace_buffer"
_UPLOAD_TO = "_int_workspace_buffer"
_MASK_BEGINS = "_mask_indptr_buf"
_SCORE_FACTOR = "_sm_scale"


class KernelModule(Protocol):
    """flashinfer.jit.core.JitSpec."""

    name: str
    sources: Sequence[Path]

    @property
    def is_compiled(self) -> bool: ...

    @property
    def build_dir(self) -> Path: ...

    def build(self, verbose: bool) -> None:
        """Run ninja, which finds there what it does not have to do again when the module loads."""


@dataclass(frozen=True, slots=True)
class FlashInfer:
    """decode, prefill, latent: the package's classes BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper and BatchMLAPagedAttentionWrapper. decode_module,
    prefill_module, latent_module: gen_batch_decode_module and its like, which write a kernel's
    sources and compile nothing."""

    decode: Callable[..., Any]
    prefill: Callable[..., Any]
    latent: Callable[..., Any]
    decode_module: Callable[..., KernelModule]
    prefill_module: Callable[..., KernelModule]
    latent_module: Callable[..., KernelModule]


def load_flash_infer() -> FlashInfer:
    """Raises AttentionBackendError when the package is missing or does not load."""
    try:
        decode = importlib.import_module("flashinfer.decode")
        prefill = importlib.import_module("flashinfer.prefill")
        latent = importlib.import_module("flashinfer.mla")
        modules = importlib.import_module("flashinfer.jit.attention.modules")
    except (ImportError, OSError, RuntimeError) as error:
        raise AttentionBackendError(
            f"flashinfer does not load here: {error}. To install: {FLASH_INFER_INSTALL}"
        ) from error
    return FlashInfer(
        decode=decode.BatchDecodeWithPagedKVCacheWrapper,
        prefill=prefill.BatchPrefillWithPagedKVCacheWrapper,
        latent=latent.BatchMLAPagedAttentionWrapper,
        decode_module=modules.gen_batch_decode_module,
        prefill_module=modules.gen_batch_prefill_module,
        latent_module=modules.gen_batch_mla_module,
    )


def probe_flash_infer() -> BackendProbe:
    """Whether the package loads here and can compile its kernels, or has them compiled."""
    try:
        load_flash_infer()
    except AttentionBackendError as error:
        return BackendProbe(is_available=False, missing=str(error))
    obstacle = None if has_compiled_package() else missing_compiler()
    return BackendProbe(is_available=obstacle is None, missing=obstacle or "")


def has_compiled_package() -> bool:
    return importlib.util.find_spec(_COMPILED_PACKAGE) is not None


def missing_compiler() -> str | None:
    """What of nvcc and ninja is not here, with the remedy, or None."""
    cuda_home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or _DEFAULT_CUDA_HOME
    has_nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=f"{cuda_home}/bin")
    missing = [] if has_nvcc else ["nvcc"]
    missing += [] if shutil.which("ninja") else ["ninja"]
    if not missing:
        return None
    return (
        f"{' and '.join(missing)}, with which FlashInfer compiles its kernels (looked for on PATH "
        f"and in {cuda_home}/bin): install the CUDA toolkit of torch's version and ninja, or "
        "flashinfer-jit-cache, which brings kernels compiled"
    )


def uncompiled(name_modules: Callable[[], Sequence[KernelModule]]) -> str:
    """What nvcc would have to compile; "" where nothing. name_modules: as compile_modules."""
    try:
        names = [module.name for module in name_modules() if not module.is_compiled]
    except OSError as error:
        return f"FlashInfer cannot write the sources of its kernels: {error}"
    return f"kernels of FlashInfer that nvcc compiles: {', '.join(names)}" if names else ""


def compile_modules(
    name_modules: Callable[[], Sequence[KernelModule]],
    interval_s: float = _PROGRESS_INTERVAL_S,
) -> None:
    """Have what is not compiled yet compiled, on all cores, and log how far that is.

    name_modules writes their sources. Raises AttentionBackendError where it cannot, where there is
    no compiler, or where that fails.
    """
    try:
        missing = [module for module in name_modules() if not module.is_compiled]
    except OSError as error:
        raise AttentionBackendError(
            f"FlashInfer cannot write the sources of its kernels: {error}. "
            "FLASHINFER_WORKSPACE_BASE names a folder for them that can be written to"
        ) from error
    if not missing:
        return
    obstacle = missing_compiler()
    if obstacle is not None:
        raise AttentionBackendError(f"FlashInfer's kernels cannot be compiled here: no {obstacle}")
    names = ", ".join(module.name for module in missing)
    logger.info("FlashInfer compiles, once on this machine, which takes minutes: %s", names)
    num_at_once = -(-len(os.sched_getaffinity(0)) // _FILES_PER_MODULE)
    with ThreadPoolExecutor(num_at_once, thread_name_prefix="flash-infer-build") as pool:
        builds = [pool.submit(module.build, verbose=False) for module in missing]
        while wait(builds, timeout=interval_s).not_done:
            logger.info("FlashInfer has compiled %s", _progress(missing))
    _check_built(builds)
    logger.info("FlashInfer has compiled %s", _progress(missing))


def _check_built(builds: Iterable[Future[None]]) -> None:
    for error in (built.exception() for built in builds):
        if error is not None:
            raise AttentionBackendError(
                f"FlashInfer's kernels did not compile: {str(error)[-_SHOWN_CHARACTERS:]}"
            ) from error


def _progress(modules: Sequence[KernelModule]) -> str:
    num_done = sum(len(list(module.build_dir.glob("*.o"))) for module in modules)
    return f"{num_done} of {sum(len(module.sources) for module in modules)} files"


def share_workspace(wrapper: Any, upload_to: torch.Tensor) -> None:
    """Give the wrapper the device buffer that its plans go to, in place of its own.

    Raises AttentionBackendError for a package whose wrappers keep no such buffers.
    """
    if not (hasattr(wrapper, _UPLOAD_FROM) and hasattr(wrapper, _UPLOAD_TO)):
        raise AttentionBackendError(
            f"{type(wrapper).__name__} of this flashinfer keeps no {_UPLOAD_TO}: it is another "
            f"version than is known here. To install: {FLASH_INFER_INSTALL}"
        )
    setattr(wrapper, _UPLOAD_TO, upload_to)
    setattr(wrapper, _UPLOAD_FROM, None)


def upload_from(wrapper: Any, page_locked: torch.Tensor) -> None:
    """The wrapper's next plan is uploaded from there."""
    setattr(wrapper, _UPLOAD_FROM, page_locked)


def read_mask(wrapper: Any, begins: torch.Tensor) -> None:
    """begins: int32 (bs,), at which byte of the packed mask each row's bits begin."""
    setattr(wrapper, _MASK_BEGINS, begins)


def score_by(wrapper: Any, scaling: float) -> None:
    """The factor of the scores of a latent wrapper's next run, which only its plan has a name
    for."""
    setattr(wrapper, _SCORE_FACTOR, scaling)
