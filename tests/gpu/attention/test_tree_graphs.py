"""Steps with draft trees in CUDA graphs: a replay reads its own masks, lengths and pages."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention.backends.triton_fp8 import Fp8TritonBackend
from attention.backends.triton_paged import TritonBackend
from attention.forward_batch import ForwardMode
from attention.kernels.triton_kv_lines import line_up
from attention.visibility import Tree
from tests.fakes import interpreted_trees
from tests.gpu.attention.device_cases import (
    BF16_TOLERANCE,
    FP8_TOLERANCE,
    LAYERS,
    device_spec,
    e4m3_twin,
    oracle,
)
from tests.gpu.needs import NEEDS_GPU
from tests.gpu.no_waiting import no_waiting
from tests.unit.attention.cases import relative_error, rows_of
from tests.unit.attention.visibility_cases import build_visible, tree
from workers.layers.cuda.tree_levels import grow_level
from workers.layers.cuda.tree_paths import hold_paths
from workers.speculation.device_tree import DeviceTrees
from workers.speculation.step_trees import sees_ancestors

pytestmark = NEEDS_GPU

NUM_NEW = 9
ROWS = rows_of((40, NUM_NEW), (0, NUM_NEW), (300, NUM_NEW), (1000, NUM_NEW))
GRAPH_ROWS = len(ROWS) + 2
CAPTURED = ("positions", "req_pool_indices", "seq_lens", "extend_prefix_lens", "out_cache_loc")


def case_of(seed, **changes):
    case = build_visible(device_spec(ROWS, layout_seed=seed, **changes), tree, seed)
    for buffer in case.token_to_kv_pool.get_kv_buffer(0):
        buffer.nan_to_num_(nan=1e4)
    return case


class TreeGraph:
    """One layer's attention of GRAPH_ROWS rows, the last of which are padding."""

    def __init__(self, case, backend_class):
        self._case = case
        self._backend = backend_class(case.config, case.req_to_token_pool, case.token_to_kv_pool)
        self._backend.init_cuda_graph_state(GRAPH_ROWS + 1)
        num_tokens = GRAPH_ROWS * NUM_NEW
        self._q, self._k, self._v = (
            torch.zeros((num_tokens, *own.shape[1:]), dtype=own.dtype, device="cuda")
            for own in (case.q, case.k, case.v)
        )
        self._batch = self._blank(num_tokens)
        self._backend.init_forward_metadata_capture_cuda_graph(self._batch)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream), torch.inference_mode():
            self._run()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph), torch.inference_mode():
            self._out = self._run()

    def _run(self):
        self._backend.record_step_tables(self._batch)
        return self._backend.forward(self._q, self._k, self._v, self._case.layer, self._batch)

    def _blank(self, num_tokens):
        """All padding."""
        lens = np.full(GRAPH_ROWS, NUM_NEW, dtype=np.int32)
        tokens = torch.zeros(num_tokens, dtype=torch.int64, device="cuda")
        rows = torch.zeros(GRAPH_ROWS, dtype=torch.int32, device="cuda")
        cells = torch.eye(NUM_NEW, dtype=torch.bool, device="cuda").repeat(GRAPH_ROWS, 1)
        starts = torch.arange(GRAPH_ROWS, dtype=torch.int32, device="cuda") * NUM_NEW**2
        return replace(
            self._case.batch,
            forward_mode=ForwardMode.TARGET_VERIFY,
            batch_size=GRAPH_ROWS,
            num_tokens=num_tokens,
            input_ids=tokens,
            positions=tokens.clone(),
            req_pool_indices=rows.long(),
            seq_lens=rows.clone(),
            extend_seq_lens=rows + NUM_NEW,
            extend_prefix_lens=rows.clone(),
            out_cache_loc=tokens.clone(),
            seq_lens_cpu=lens,
            extend_seq_lens_cpu=lens,
            extend_prefix_lens_cpu=np.zeros_like(lens),
            attn_backend=self._backend,
            is_captured=True,
            visibility=Tree(cells.flatten(), starts),
        )

    def replay(self, case):
        """A step of another case over this one's memory."""
        pools = self._case.token_to_kv_pool, case.token_to_kv_pool
        for to, source in zip(*(pool.get_kv_buffer(0) for pool in pools), strict=True):
            to.copy_(source)
        self._case.req_to_token_pool.req_to_token.copy_(case.req_to_token_pool.req_to_token)
        for name in CAPTURED:
            own = getattr(case.batch, name)
            getattr(self._batch, name)[: len(own)].copy_(own)
        self._batch.visibility.mask[: len(case.batch.visibility.mask)].copy_(
            case.batch.visibility.mask
        )
        num_tokens = case.batch.num_tokens
        for to, source in ((self._q, case.q), (self._k, case.k), (self._v, case.v)):
            to[:num_tokens].copy_(source)
        self._graph.replay()
        return self._out[:num_tokens].clone()


@pytest.mark.parametrize("page_size", [1, 16, 128])
@pytest.mark.parametrize("layer", [LAYERS["plain"], LAYERS["everything"]], ids=["plain", "rules"])
def test_replays_follow_masks_and_shuffled_pages(layer, page_size):
    cases = [case_of(seed, layer=layer, page_size=page_size) for seed in range(3)]
    graph = TreeGraph(case_of(3, layer=layer, page_size=page_size), TritonBackend)
    for case in (*cases, cases[0]):
        assert relative_error(graph.replay(case), oracle(case)) < BF16_TOLERANCE


def test_fp8_replays_follow_masks():
    cases = [case_of(seed) for seed in range(2)]
    twins = [e4m3_twin(case) for case in cases]
    graph = TreeGraph(e4m3_twin(case_of(2)), Fp8TritonBackend)
    for case, twin in zip(cases, twins, strict=True):
        assert relative_error(graph.replay(twin), oracle(case)) < FP8_TOLERANCE


@pytest.mark.parametrize("grow", [DeviceTrees.grown, grow_level], ids=["torch", "kernels"])
def test_trees_grow_and_tell_who_sees_whom_without_waiting(grow):
    widths, rows, vocab = (4, 4, 2), 3, 5000
    drawn = [torch.randn(rows * one, vocab, device="cuda") for one in (1, *widths[:-1])]
    roots = torch.zeros(rows, dtype=torch.int64, device="cuda")
    with no_waiting():
        trees = DeviceTrees.of_roots(roots)
        for width, logits in zip(widths, drawn, strict=True):
            trees = grow(trees, logits, width)
        num_tokens = trees.parents.shape[1]
        own = torch.arange(rows, device="cuda").unsqueeze(1) * num_tokens
        firsts = own.expand(-1, num_tokens).reshape(-1)
        sees = sees_ancestors((trees.parents + own).view(-1), firsts, num_tokens)
    assert sees.view_as(trees.sees).equal(trees.sees)


@pytest.mark.parametrize(
    ("rows", "vocab", "widths"),
    [(1, 32000, (4, 4, 4, 4)), (64, 32000, (4, 4, 4, 4)), (3, 128256, (8, 4, 1)), (2, 40, (1, 16))],
)
def test_kernels_grow_the_trees_that_torch_grows(rows, vocab, widths):
    """Of logits of which no two of a row are equal; some rows have narrower trees."""
    draws = torch.Generator("cuda").manual_seed(5)
    names = torch.randperm(vocab, device="cuda")
    own = torch.tensor(widths, device="cuda").expand(rows, -1).clone()
    own[1::2] = own[1::2].clamp(max=1)
    trees = wanted = DeviceTrees.of_roots(torch.arange(rows, device="cuda"))
    for level, width in enumerate(widths):
        marks = torch.rand(rows * trees.num_newest, vocab, generator=draws, device="cuda")
        logits = marks.argsort(dim=1).float() * (40 / vocab)
        logits += torch.rand(len(logits), 1, generator=draws, device="cuda")
        of_level = own[:, level - 1] if level else None
        trees = grow_level(trees, logits, width, names, of_level)
        wanted = wanted.grown(logits, width, names, of_level)
        assert trees.ids.equal(wanted.ids)
        assert trees.parents.equal(wanted.parents)
        assert trees.sees.equal(wanted.sees)
        assert torch.allclose(trees.logprobs, wanted.logprobs, atol=1e-4, equal_nan=True)


def test_kernels_follow_paths_and_carry_what_lies_on_them():
    with torch.device("cuda"):
        interpreted_trees.check_paths()
        for num_rows, num_tokens in ((1, 17), (64, 17), (3, 5), (2, 33)):
            interpreted_trees.check_ancestors(num_rows, num_tokens)
        interpreted_trees.check_states(13, 4096, torch.bfloat16)
        interpreted_trees.check_growth((4, 4, 2), 37, torch.float32, spoilt=(1,))


def test_kernels_launch_without_waiting():
    with torch.device("cuda"):
        _, trees = interpreted_trees.drawn_trees(np.random.default_rng(1))
        num_tokens = len(trees.parents)
        ids, tokens = torch.arange(num_tokens), torch.zeros(2, 60, 2, 64, dtype=torch.bfloat16)
        with no_waiting():
            lined = hold_paths(trees, ids, ids, ids)
            line_up(tokens, lined.sources, ids, trees.starts, lined.run_lens)
