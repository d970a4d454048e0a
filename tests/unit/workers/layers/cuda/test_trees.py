"""Kernels of trees of drafts: by Triton's interpreter, and compiled for GPUs that are not here."""

import pytest
import torch

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from attention.kernels import triton_kv_lines
from tests.fakes.interpreted import TIMEOUT_S, check_by_interpreter
from tests.fakes.triton_targets import SHARED_BYTES, Variant
from tests.unit.workers.models.test_cuda_eagle_head import Launches
from workers.layers.cuda import tree_levels, tree_paths, tree_states
from workers.speculation.device_tree import DeviceTrees

_TREES = dict.fromkeys(("ids", "parents", "ids_out", "parents_out"), "*i64")
_TREES |= dict.fromkeys(("logprobs", "logprobs_out"), "*fp64")
_TREES |= dict.fromkeys(("sees", "sees_out"), "*u8")
_FOUND = {"peaks": "*fp32", "sums": "*fp32", "values": "*fp32", "columns": "*i32"}
_FOUND |= dict.fromkeys(("num_parts", "num_kept", "num_newest"), "i32")
_PATHS = dict.fromkeys(("ids", "parents", "starts", "cache_indices", "run_lens"), "*i64")
_PATHS |= dict.fromkeys(("sources", "samples", "targets", "num_kept"), "*i64")
_PATHS |= dict.fromkeys(("positions", "places", "slots"), "*i64")
_PATHS |= dict.fromkeys(("positions_before", "indices_before"), "*i64")
KERNELS = {
    "keep_likeliest": Variant(
        tree_levels._keep_likeliest_kernel,
        {**_FOUND, "logits": "*fp32"},
        {"BLOCK": 4096},
        {"num_warps": 8},
    ),
    "append_level": Variant(
        tree_levels._append_level_kernel,
        {**_FOUND, **_TREES, "names": "*i64", "own_widths": "*i64"},
        {
            "HAS_NAMES": True,
            "HAS_WIDTHS": True,
            "BLOCK_NEWEST": 8,
            "BLOCK_PARTS": 64,
            "BLOCK_FOUND": 512,
            "BLOCK_TOKENS": 64,
        },
        {"num_warps": 8},
    ),
    "carry_states": Variant(
        tree_states._carry_states_kernel,
        {
            **dict.fromkeys(("carried", "made", "out"), "*bf16"),
            **dict.fromkeys(("num_made", "size"), "i32"),
            "parents": "*i64",
        },
        {"BLOCK": 1024},
        {"num_warps": 4},
    ),
    "hold_path": Variant(
        tree_paths._hold_path_kernel,
        {**_PATHS, "sampled": "*i32"},
        {"BLOCK": 32},
        {"num_warps": 1},
    ),
    "mark_ancestors": Variant(
        tree_paths._mark_ancestors_kernel,
        {"parents": "*i64", "cells": "*u8"},
        {"BLOCK": 64},
        {"num_warps": 4},
    ),
    "find_before": Variant(
        tree_paths._find_before_kernel,
        {**_PATHS, "table": "*i32"},
        {"BLOCK": 128},
        {"num_warps": 4},
    ),
    "line_up": Variant(
        triton_kv_lines._line_up_kernel,
        {**_PATHS, "tokens": "*i64", "size": "i32", "layer_stride": "i64"},
        {"BLOCK": 256},
        {"num_warps": 4},
    ),
}


# Newer versions than the engine is tested with warn of a default that is to change.
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_every_gpu_has_them(name, capability) -> None:
    assert KERNELS[name].compile_for(capability).metadata.shared <= SHARED_BYTES[capability]


def test_each_is_a_launch_and_a_level_two(monkeypatch) -> None:
    launches = Launches(monkeypatch)
    trees = DeviceTrees.of_roots(torch.zeros(3, dtype=torch.int64))
    logits, parents = torch.zeros(3, 5000), torch.zeros(3 * 17, dtype=torch.int64)
    carried, made = torch.zeros(3, 64), torch.zeros(3, 1, 64)
    with launches:
        grown = tree_levels.grow_level(trees, logits, 4)
        assert launches.num == 2
        tree_states.carry_states(carried, made, grown.parents)
        tree_paths.mark_ancestors(parents, 17, torch.empty(3 * 17 * 17, dtype=torch.bool))
        assert launches.num == 4


@pytest.mark.timeout(TIMEOUT_S)
def test_they_compute_what_plain_torch_does() -> None:
    check_by_interpreter("tests.fakes.interpreted_trees")
