"""The attention kernels compiled for GPUs that are not here, as their launchers launch them."""

from attention.kernels import triton_decode, triton_decode_plan, triton_extend
from attention.kernels.decode_shape import DecodeGeometry, fitting_tuning
from attention.kernels.extend_shape import ExtendGeometry
from attention.kernels.gpu_limits import GpuLimits
from tests.fakes.triton_targets import SHARED_BYTES, Variant

_INT32 = dict.fromkeys(
    ("page_table", "plan", "cu_seqlens_q", "cache_seqlens", "mask_starts", "shared_keys"), "*i32"
)
_INT32 |= dict.fromkeys(("first_own",), "*i32")
_NUMBERS = dict.fromkeys(
    ("q_row_stride", "q_token_stride", "q_rope_token_stride", "page_table_stride", "window"), "i32"
)
_NUMBERS |= dict.fromkeys(
    ("max_items", "num_rows", "num_tokens", "num_splits", "target_chunks", "min_chunk"), "i32"
)
_NUMBERS |= {"slack_eighths": "i32", "scaling": "fp32", "logit_cap": "fp32"}
_TENSORS = dict.fromkeys(("q", "q_rope", "k_pages", "v_pages", "sinks", "out"), "*bf16")
_TENSORS |= {"partials": "*fp32", "kv_scales": "*fp32", "positions": "*i64", "masks": "*u8"}
TYPES = _INT32 | _NUMBERS | _TENSORS

EXTEND_HEADS = {
    "small": ExtendGeometry(8, 4, 64, 64, 64),
    "llama": ExtendGeometry(8, 4, 128, 128, 64),
    "odd": ExtendGeometry(2, 7, 96, 96, 24),
    "gemma": ExtendGeometry(4, 2, 256, 256, 64),
    "unequal": ExtendGeometry(16, 1, 192, 128, 64),
    "fp8": ExtendGeometry(8, 4, 128, 128, 64, is_e4m3=True),
    "latent": ExtendGeometry(1, 16, 512, 512, 64, rope_dim=64),
}
NEW_TOKENS = (1, 8, 1024)
KINDS = {
    "plain": {},
    "all": {"has_window": True, "has_cap": True, "has_sinks": True},
    "tree": {"is_tree": True, "has_window": True},
    "items": {"is_items": True, "has_window": True},
    "everything": {"is_everything": True, "has_window": True},
    "split": {"is_split": True, "has_sinks": True},
}


def limits_of(capability):
    return GpuLimits(capability, 100, SHARED_BYTES[capability])


def extend_variant(geometry, tiles, kind):
    types = TYPES | (dict.fromkeys(("k_pages", "v_pages"), "*u8") if geometry.is_e4m3 else {})
    options = {"num_stages": tiles.num_stages, "num_warps": geometry.num_warps(tiles)}
    shape = geometry.shape(tiles, **KINDS[kind])
    return Variant(triton_extend.attend_extend_kernel, types, {"shape": shape}, options)


def join_variant(geometry):
    tiles = geometry.tiles(1, limits_of((8, 6)))
    shape = geometry.shape(tiles, is_split=True, has_sinks=True)
    constants = {"shape": shape, "block_splits": 32}
    return Variant(triton_extend.join_splits_kernel, TYPES, constants, {"num_warps": 4})


def decode_variants(geometry, num_rows, capability):
    """The plan and a chunk's kernel as that GPU launches them, and the tuning."""
    is_dependent = capability >= (9, 0)
    tuning = fitting_tuning(geometry, num_rows, SHARED_BYTES[capability])
    shape = geometry.shape(tuning, True, True, True, is_dependent)
    options = {"num_stages": tuning.num_stages, "num_warps": tuning.num_warps}
    chunk = Variant(triton_decode.attend_chunk_kernel, TYPES, {"shape": shape}, options)
    constants = {"block_keys": tuning.block_keys, "kv_heads": geometry.kv_heads}
    constants |= {
        "block_rows": 64,
        "compared_rows": 32,
        "max_waves": 3,
        "is_dependent": is_dependent,
    }
    plan = Variant(triton_decode_plan.plan_chunks_kernel, TYPES, constants, {"num_warps": 8})
    return tuning, plan, chunk


DECODE_HEADS = {
    "llama": DecodeGeometry(8, 4, 128, 64),
    "odd": DecodeGeometry(2, 7, 96, 24),
    "gemma": DecodeGeometry(4, 2, 256, 64),
}
