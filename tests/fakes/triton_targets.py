"""The engine's Triton kernels compiled for GPUs that are not here: Triton's ptxas needs none."""

from dataclasses import dataclass
from types import MappingProxyType

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from attention.kernels import triton_kv_write
from workers.layers.cuda import (
    activation,
    embedding,
    expert_adapter_kernels,
    expert_gather,
    expert_gemm,
    expert_maps,
    expert_routing,
    expert_tiles,
    greedy,
    latent_projection,
    logit_cap,
    norm,
    peer_norm,
    rope,
    sandwich_norm,
    sharded_greedy,
    two_shot_norm,
)
from workers.layers.cuda.expert_adapters import ExpertAdapterTiles
from workers.layers.gemm import configs, skinny, tiled
from workers.layers.gemm.device_limits import DeviceLimits

KIB = 1 << 10
SHARED_BYTES = MappingProxyType(
    {
        (8, 0): 163 * KIB,
        (8, 6): 99 * KIB,
        (8, 9): 99 * KIB,
        (9, 0): 227 * KIB,
        (10, 0): 227 * KIB,
        (12, 0): 99 * KIB,
    }
)
"""Of one program, by compute capability (CUDA programming guide, "Compute Capabilities")."""
_INTEGERS = {"num_splits", "num_tokens", "num_rows", "num_blocks", "num_ring_slots", "width"}
_INTEGERS |= {"out_features", "in_features", "k_per_split", "hidden_size", "first_row", "end_row"}
_INTEGERS |= {"num_pairs", "max_blocks", "query_split", "query_row", "key_split", "key_row"}
_INTEGERS |= {"first_token", "rows_a_rank", "flags_offset", "residual_offset", "num_counters"}
_ALIGNED = {"in_features", "k_per_split", "out_features", "width", "hidden_size"}


@dataclass(frozen=True)
class Variant:
    """A kernel as it is launched. types: of pointers; integers are known by name."""

    kernel: object
    types: dict
    constants: dict
    options: dict

    def compile_for(self, capability):
        """Raises what Triton and ptxas raise where the GPU cannot run it."""
        types = {name: self._type(name) for name in self.kernel.arg_names}
        positions = {name: place for place, name in enumerate(self.kernel.arg_names)}
        constants = {**self.constants}
        if "IS_DEPENDENT" in positions:
            constants["IS_DEPENDENT"] = DeviceLimits(capability, 0).has_copy_engine
        aligned = {
            (positions[name],): [["tt.divisibility", 16]]
            for name, kind in types.items()
            if isinstance(kind, str) and (kind.startswith("*") or name in _ALIGNED)
        }
        places = {(positions[name],): value for name, value in constants.items()}
        source = ASTSource(self.kernel, types, places, aligned)
        target = GPUTarget("cuda", capability[0] * 10 + capability[1], 32)
        return triton.compile(source, target=target, options=self.options)

    def _type(self, name):
        if name in self.constants or name == "IS_DEPENDENT":
            return "constexpr"
        if name in self.types:
            return self.types[name]
        assert name in _INTEGERS or name.endswith("stride"), name
        return "i32"


def gemm_variant(config, num_tokens):
    """config: a GemmConfig, with tensors of bfloat16."""
    out = "*bf16" if config.num_splits == 1 else "*fp32"
    types = {"x": "*bf16", "weight": "*bf16", "out": out}
    constants = {"BLOCK_ROWS": config.block_rows, "BLOCK_K": config.block_k, "PREFETCH_BYTES": 1024}
    if config.is_gated:
        constants["IS_GELU"] = False
    options = {"num_stages": config.num_stages, "num_warps": config.num_warps}
    if config.is_gemv:
        kernel = skinny._gated_gemv_kernel if config.is_gated else skinny._gemv_kernel
        return Variant(kernel, types, constants, options)
    if not config.is_tiled:
        constants["BLOCK_TOKENS"] = configs.block_tokens(num_tokens)
        kernel = skinny._gated_kernel if config.is_gated else skinny._skinny_kernel
        return Variant(kernel, types, constants, options)
    constants["BLOCK_TOKENS"] = tokens = configs.tile_tokens(num_tokens)
    types["x_map"] = f"tensordesc<bf16[{tokens}, {config.block_k}]>"
    types["weight_map"] = f"tensordesc<bf16[{config.block_rows}, {config.block_k}]>"
    if config.is_gated:
        return Variant(tiled._gated_tiled_kernel, types, constants, options)
    constants["NUM_SPLITS"] = config.num_splits
    return Variant(tiled._tiled_kernel, types, constants, options)


_RING = {"next_slot": "*i32", "current": "*i32", "last_token_ids": "*i64", "slots": "*i64"}
_STEP = dict.fromkeys(("input_ids", "positions", "out_cache_loc"), "*i64")
_STEP |= dict.fromkeys(("ring_rows", "req_to_token", "seq_lens", "prefix_lens"), "*i32")
_STREAM = {"residual": "*bf16", "weight": "*bf16", "hidden": "*bf16", "eps": "fp32"}
_PAGES = {"k": "*bf16", "v": "*bf16", "cache_indices": "*i64"}
_HEADS = {"num_heads": 8, "head_dim": 128, "v_head_dim": 128, "k_block": 1024, "v_block": 1024}
_MEETING = {"addresses": "*i64", "timeout_ns": "i64"}
_RANKS = {"RANK": 0, "NUM_RANKS": 2, "BLOCK_RANKS": 2, "ROW_BYTES": 32, "FLAG": 4}
_PARTS = ("*bf16", "*bf16")

_CHOSEN = dict.fromkeys(("ids", "ranks", "counts", "pairs", "blocks", "num_blocks"), "*i32")
EXPERTS = _CHOSEN | {"logits": "*fp32", "weights": "*fp32", "factor": "fp32", "places": "*i64"}
EXPERTS |= dict.fromkeys(("x", "out", "gate_up", "down", "bias", "added"), "*bf16")
EXPERTS |= {"slot_of_token": "*i32"}
_LATENTS = dict.fromkeys(("norm", "q_out", "latent_out", "pool"), "*bf16")
_LATENTS |= {"queries": "*fp32", "keys": "*fp32", "cos_sin": "*fp32", "eps": "fp32"}


def expert_variants(capability):
    """Both products of every entry of the tables, as a GPU of that kind launches them."""
    limits = DeviceLimits.within(capability, SHARED_BYTES[capability])
    tables = [expert_tiles.BY_POINTERS]
    if limits.has_copy_engine:
        tables.append(expert_tiles.BY_MAPS)
    for table in tables:
        for most, _ in table:
            pairs = int(64 * min(most, 1 << 16))
            activate, project = expert_tiles.tiles_for(table, pairs, 64, limits.shared_bytes)
            yield expert_variant(activate, "activate", 2048, 1408)
            yield expert_variant(project, "project", 1408, 2048)


def expert_variant(tiles, product, depth, width, has_bias=False, has_added=False):
    """Of tensors of bfloat16. product: "activate" or "project"; has_added: on top of the former,
    by pointers."""
    constants = {"DEPTH_SIZE": depth, "WIDTH": width, "NUM_CHOSEN": 8, "HAS_BIAS": has_bias}
    if product == "activate":
        constants |= {"ALPHA": 1.0, "LIMIT": 7.0 if has_bias else 0.0}
    constants |= {"ROWS": tiles.block_rows, "COLUMNS": tiles.columns, "DEPTH": tiles.depth}
    options = {"num_stages": tiles.num_stages, "num_warps": tiles.num_warps}
    module, types = expert_gemm, EXPERTS
    if isinstance(tiles, expert_maps.MappedTiles):
        constants |= {"GROUP": tiles.group, "IS_SWAPPED": tiles.is_swapped}
        module, types = expert_maps, dict(EXPERTS)
        types["x_map"] = f"tensordesc<bf16[{tiles.block_rows}, {tiles.depth}]>"
        types["weight_map"] = f"tensordesc<bf16[{tiles.columns}, {tiles.depth}]>"
    elif product == "activate" and not has_added:
        constants |= {"added": None, "slot_of_token": None}
    return Variant(getattr(module, f"_{product}_kernel"), types, constants, options)


def expert_adapter_variants(capability):
    """All that adapters launch around the products by pointers, and the first of these with rows
    added, as a GPU of that kind launches them for Qwen3-30B-A3B and gpt-oss-20b."""
    shared_bytes = DeviceLimits.within(capability, SHARED_BYTES[capability]).shared_bytes
    # Of one row on average there are tiles of their own, whose blocks are those of up to 16.
    for most, _ in expert_tiles.BY_POINTERS[1:]:
        pairs = int(64 * min(most, 1 << 16))
        activate, _ = expert_tiles.tiles_for(expert_tiles.BY_POINTERS, pairs, 64, shared_bytes)
        rows = activate.block_rows
        for hidden, width, max_rank in ((2048, 768, 64), (2880, 2880, 256), (2048, 768, 20)):
            yield expert_variant(activate, "activate", hidden, width, hidden == 2880, True)
            yield _expert_shrink(rows, hidden, 0, 2, max_rank)
            yield _expert_shrink(rows, width, 2, 1, max_rank)
            yield _expert_expand("gate_up", rows, hidden, width, max_rank)
            yield _expert_expand("down", rows, width, hidden, max_rank)


_EXPERT_ADAPTERS = EXPERTS | dict.fromkeys(("a", "b"), "*bf16") | {"shrunk": "*fp32"}


def _expert_adapter_constants(tiles, rows, max_rank):
    constants = {"NUM_EXPERTS": 128, "NUM_CHOSEN": 8, "MAX_RANK": max_rank, "ROWS": rows}
    return constants | {"RANKS": tiles.rank_block(max_rank)}


def _expert_shrink(rows, num_inputs, first_part, num_parts, max_rank):
    tiles = ExpertAdapterTiles.of(rows)
    constants = _expert_adapter_constants(tiles, rows, max_rank) | {"FIRST_PART": first_part}
    constants |= {"DEPTH_SIZE": num_inputs, "NUM_PARTS": num_parts, "DEPTH": tiles.inputs}
    constants |= {"IS_BY_TOKEN": first_part == 0, "OF_SPLIT": tiles.inputs_of_split(num_inputs)}
    options = {"num_stages": tiles.num_stages, "num_warps": tiles.num_warps}
    return Variant(expert_adapter_kernels.shrink_kernel, _EXPERT_ADAPTERS, constants, options)


def _expert_expand(product, rows, num_inputs, width, max_rank):
    """num_inputs: of what was shrunk."""
    tiles = ExpertAdapterTiles.of(rows)
    constants = _expert_adapter_constants(tiles, rows, max_rank) | {"WIDTH": width}
    constants |= {"NUM_SPLITS": tiles.splits_of(num_inputs), "OUTPUTS": tiles.outputs}
    options = {"num_stages": 1, "num_warps": tiles.num_warps}
    kernel = getattr(expert_adapter_kernels, f"expand_{product}_kernel")
    return Variant(kernel, _EXPERT_ADAPTERS, constants, options)


def _choose_experts(num_kept):
    constants = {"NUM_ROUTED": 64, "NUM_SHARED": 2, "NUM_CHOSEN": 6, "BLOCK": 64, "LANES": 8}
    constants |= {"IS_NORMED": True, "NUM_KEPT": num_kept}
    return Variant(expert_routing._choose_kernel, EXPERTS, constants, {"num_warps": 1})


OTHERS = {
    "choose_experts": _choose_experts(num_kept=0),
    "choose_experts_here": _choose_experts(num_kept=33),
    "count_experts": Variant(
        expert_routing._count_kernel, EXPERTS, {"PAIRS": 64}, {"num_warps": 2}
    ),
    "group_by_expert": Variant(
        expert_routing._group_kernel,
        EXPERTS,
        {"NUM_EXPERTS": 257, "EXPERTS": 512, "PAIRS": 64, "ROWS": 16, "NUM_ELSEWHERE": 1}
        | {"COUNTERS": 1024},
        {"num_warps": 4},
    ),
    "gather_rows": Variant(
        expert_gather._gather_kernel,
        EXPERTS | {"ordered": "*i32", "num_placed": "*i32"},
        {"WIDTH": 2880, "NUM_CHOSEN": 4, "BLOCK_ROWS": 256, "STEP": 64, "BLOCKS": 256}
        | {"ROWS": expert_gather._ROWS, "COLUMNS": expert_gather._COLUMNS},
        {"num_warps": 4},
    ),
    "project_latents": Variant(
        latent_projection._project_latents_kernel,
        _LATENTS | dict.fromkeys(("positions", "cache_loc"), "*i64"),
        {"HEADS": 16, "NOPE": 128, "NOPE_BLOCK": 128, "LATENT": 512, "LATENT_BLOCK": 512}
        | {"HALF": 32, "QUERY_SPLITS": 4, "KEY_SPLITS": 4, "IS_INTERLEAVED": True},
        {"num_warps": 2},
    ),
    "add_norm": Variant(
        norm._add_norm_kernel,
        {**_STREAM, "partials": "*fp32"},
        {"NUM_SPLITS": 4, "IS_WIDE": True, "BLOCK": 8192},
        {"num_warps": 16},
    ),
    "gate_and_mul": Variant(
        activation._gate_and_mul_kernel,
        {"partials": "*fp32", "out": "*bf16"},
        {"NUM_SPLITS": 4, "IS_GELU": True, "BLOCK": 1024},
        {"num_warps": 4},
    ),
    "sandwich_norm": Variant(
        sandwich_norm._sandwich_norm_kernel,
        {"partials": "*fp32", "residual": "*bf16", "hidden": "*bf16"}
        | dict.fromkeys(("after_scale", "before_scale"), "*fp32")
        | dict.fromkeys(("after_eps", "before_eps"), "fp32"),
        {"NUM_SPLITS": 4, "IS_WIDE": True, "BLOCK": 8192},
        {"num_warps": 16},
    ),
    "cap_logits": Variant(
        logit_cap._cap_logits_kernel,
        {"logits": "*bf16", "cap": "fp32"},
        {"BLOCK": 2048},
        {"num_warps": 4},
    ),
    "lookup": Variant(
        embedding._lookup_kernel,
        {"input_ids": "*i64", "weight": "*bf16", "out": "*bf16"},
        {"BLOCK": 8192},
        {"num_warps": 8},
    ),
    "rope": Variant(
        rope._rope_kv_kernel,
        {"partials": "*fp32", "cos_sin": "*fp32", "eps": "fp32"}
        | dict.fromkeys(("positions", "target_indices"), "*i64")
        | dict.fromkeys(("bias", "q_norm", "k_norm", "q_out", "k_target", "v_target"), "*bf16"),
        {"NUM_Q": 32, "NUM_KV": 8, "HALF": 64, "HEADS": 8, "NUM_SPLITS": 4}
        | {"HAS_BIAS": True, "HAS_NORM": True},
        {"num_warps": 2},
    ),
    "begin_step": Variant(
        greedy._begin_step_kernel,
        {**_RING, **_STEP},
        {"BLOCK": 512, "NUM_FIELDS": 4},
        {"num_warps": 4},
    ),
    "place_rows": Variant(
        greedy._place_rows_kernel,
        {**_RING, "cache_indices": "*i32", "table": "*i32"}
        | dict.fromkeys(("positions", "cache_loc"), "*i64"),
        {"BLOCK": 512},
        {"num_warps": 4},
    ),
    "block_argmax": Variant(
        greedy._block_argmax_kernel,
        {"logits": "*bf16", "block_max": "*fp32", "block_token": "*i32"},
        {"BLOCK": 4096},
        {"num_warps": 4},
    ),
    "end_step": Variant(
        greedy._end_step_kernel,
        {**_RING, "block_max": "*fp32", "block_token": "*i32", "ring_sampled": "*i32"},
        {"BLOCK": 64},
        {"num_warps": 1},
    ),
    "copy_kv": Variant(
        triton_kv_write._copy_kernel,
        {**_PAGES, "k_pages": "*bf16", "v_pages": "*bf16"},
        _HEADS,
        {"num_warps": 4},
    ),
    "peer_norm": Variant(
        peer_norm._peer_add_norm_kernel,
        {**_STREAM, **_MEETING, "parts": _PARTS},
        {**_RANKS, "PLACE_BYTES": 8448, "BLOCK": 8192, "BEGINS_STREAM": False},
        {"num_warps": 16, "maxnreg": 128},
    ),
    "two_shot_norm": Variant(
        two_shot_norm._two_shot_add_norm_kernel,
        {**_STREAM, **_MEETING, "parts": _PARTS, "hidden": _PARTS},
        {**_RANKS, "PLACE_BYTES": 8448, "BLOCK": 8192, "BEGINS_STREAM": False},
        {"num_warps": 16, "maxnreg": 128},
    ),
    "peer_end_step": Variant(
        sharded_greedy._peer_end_step_kernel,
        {**_RING, **_MEETING, "ring_sampled": "*i32"}
        | {"maxima": ("*fp32", "*fp32"), "tokens": ("*i32", "*i32")},
        {**_RANKS, "BLOCK": 64},
        {"num_warps": 1},
    ),
}
"""What a step launches beside GEMMs, by name."""

QUANTISE_KV = Variant(
    triton_kv_write._quantise_kernel,
    {**_PAGES, "k_pages": "*fp8e4nv", "v_pages": "*fp8e4nv", "scales": "*fp32"},
    _HEADS,
    {"num_warps": 4},
)
