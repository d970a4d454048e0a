"""The fused EAGLE-3 head: how many launches it is beside the plain one, and which heads are
fused."""

import logging
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from triton.runtime.jit import JITFunction

from tests.fakes.eagle_heads import ROUNDED, eagle_spec
from tests.fakes.model_rows import make_batch
from tests.fakes.triton_targets import OTHERS, SHARED_BYTES, Variant
from workers.layers.cuda import draft_rows, likeliest, pair_norm, token_rows
from workers.layers.formats.layer import stored_by
from workers.layers.quantised import whole_product
from workers.layers.sharding import ShardContext
from workers.loading.eagle_head import head_class_for
from workers.loading.weights import fill_with_noise
from workers.models import cuda_eagle_head
from workers.models.cuda_eagle_head import CudaEagleHead
from workers.models.eagle_head import EagleHead
from workers.models.pair_states import StatesBefore
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import SingleRank

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = {0: [7], 1: [11], 2: [13]}
PREFIXES = dict.fromkeys(ROWS, 4)
_NORMED = dict.fromkeys(("first", "second", "first_weight", "second_weight", "out"), "*bf16")
_ROWS = {"first_rows": "*i64", "second_rows": "*i32"}
_INT64 = dict.fromkeys(("staged", "ids", "positions", "places"), "*i64")
_INT32 = dict.fromkeys(("prefix_lens", "seq_lens", "table"), "*i32")
_TOKEN_ROWS = dict.fromkeys(("named", "input_ids", "slots", "row_slots"), "*i64")
_TOKEN_ROWS |= dict.fromkeys(("seq_lens", "prefix_lens"), "*i32")
_TOKEN_ROWS |= dict.fromkeys(("row_seq_lens", "row_prefix_lens"), "*i32")
_DRAWN = {"drafts": "*i64", "sampled": "*i32", "run_lens": "*i64"}
_DRAWN |= dict.fromkeys(("num_drafts", "num_places"), "i32")
_ROPE = OTHERS["rope"]
_KEYS = {"NUM_Q": 0, "NUM_SPLITS": 1, "HAS_BIAS": False, "HAS_NORM": False}
KERNELS = {
    "pair_norm": Variant(
        pair_norm._pair_norm_kernel,
        {**_NORMED, **_ROWS, "eps": "fp32"},
        {"BLOCK": 8192, "FIRST_HAS_ROWS": True, "SECOND_HAS_ROWS": True},
        {"num_warps": 16},
    ),
    "likeliest": Variant(
        likeliest._likeliest_kernel,
        {"logits": "*bf16", "names": "*i64", "out": "*i64"},
        {"BLOCK": 32768, "HAS_NAMES": True},
        {"num_warps": 16},
    ),
    "spread_rows": Variant(
        draft_rows._spread_rows_kernel,
        {**_INT64, **_INT32},
        {"BLOCK": 256},
        {"num_warps": 4},
    ),
    "go_on": Variant(
        draft_rows._go_on_kernel,
        {**_INT64, **_INT32, **_DRAWN},
        {"HAS_LENS": False, "BLOCK": 16},
        {"num_warps": 1},
    ),
    "gather_rows": Variant(
        token_rows._gather_rows_kernel,
        _TOKEN_ROWS | {"tokens_per_row": "i32"},
        {"HAS_NAMED": True, "BLOCK": 512},
        {"num_warps": 4},
    ),
    "sum_parts": Variant(
        whole_product._sum_parts_kernel,
        {"partials": "*fp32", "out": "*bf16", "num_elements": "i32"},
        {"NUM_SPLITS": 8, "BLOCK": 1024},
        {"num_warps": 4},
    ),
    "rope of keys": replace(
        _ROPE,
        types={**_ROPE.types, "partials": "*bf16"},
        constants={**_ROPE.constants, **_KEYS},
    ),
}
"""That no model launches so."""


# Newer versions than the engine is tested with warn of a default that is to change.
@pytest.mark.filterwarnings("ignore:TRITON_DEFAULT_FP_FUSION")
@pytest.mark.parametrize("capability", SHARED_BYTES, ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_every_gpu_has_the_head_s_kernels(name, capability) -> None:
    assert KERNELS[name].compile_for(capability).metadata.shared <= SHARED_BYTES[capability]


class Launches(TorchDispatchMode):
    """Counts what a GPU would be given: operations of torch that are neither views nor empty
    tensors, Triton's kernels, which do not run here, and those of attention and the pool."""

    def __init__(self, monkeypatch):
        super().__init__()
        self.num = 0
        monkeypatch.setattr(JITFunction, "run", self._triton)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and "empty" not in func.name():
            self.num += 1
        return func(*args, **(kwargs or {}))

    def _triton(self, *args, **kwargs):
        self.num += 1


class Attention:
    """As AttentionDispatch, and the pool beside it: one launch writes, one attends."""

    def __init__(self, launches, fuses, kv_dtype=torch.bfloat16):
        self._launches = launches
        self._fuses = fuses
        self._pages = torch.zeros(2, 80, 16, 2, 64).to(kv_dtype)

    def forward(self, q, k, v, layer, batch, save_kv_cache=True):
        self._launches.num += 1 + save_kv_cache
        return torch.empty_like(q)

    def fuses_decode_projection(self, num_rows):
        return self._fuses

    def forward_projected(self, projection, layer, batch):
        self._launches.num += 1
        num_tokens = projection.partials.shape[1]
        return projection.partials.new_empty(num_tokens, layer.tp_q_head_num, layer.head_dim)

    def get_kv_buffer(self, layer_id):
        return tuple(self._pages)

    def set_kv_buffer(self, layer_id, out_cache_loc, k, v):
        self._launches.num += 1


def plain_head(head_class):
    head = head_class(eagle_spec(), 256, ShardContext(SingleRank(), torch.bfloat16, CPU))
    for parameter in head.parameters():
        parameter.zero_()
    return head


def rounded_head():
    """So wide that few rows' products are in parts."""
    sizes = dict.fromkeys(("hidden_size", "intermediate_size"), 1024)
    spec = replace(eagle_spec(**sizes, num_q_heads=16, num_kv_heads=8), draft_vocab_size=1024)
    shard = ShardContext(SingleRank(), torch.bfloat16, CPU, has_formats=True)
    head = CudaEagleHead(spec, 256, shard)
    stored = stored_by(ROUNDED, head, shard, head.layers_as_stored())
    fill_with_noise(stored, shard, 0, lambda done, total: None)
    for layer in head.layers_as_stored():
        layer.multiply_kept_by(whole_product.whole_product)
    return head


@torch.no_grad()
def num_launches(monkeypatch, head, fuses=False, kv_dtype=torch.bfloat16):
    """Of a pass up to its drafts, and of what is read behind the target."""
    states = torch.zeros(len(ROWS), len(head.norm.weight), dtype=torch.bfloat16)
    launches = Launches(monkeypatch)
    attention = Attention(launches, fuses, kv_dtype)
    batch = make_batch(ROWS, PREFIXES, attention)
    before = StatesBefore(states, torch.arange(len(states)))
    with launches:
        head.draft(batch.input_ids, states, batch)
        num_of_pass = launches.num
        tokens = TokenInputs(batch.input_ids, batch.positions)
        head.read(tokens, before, batch.out_cache_loc, attention)
    return num_of_pass, launches.num - num_of_pass


def test_a_pass_is_few_launches(monkeypatch) -> None:
    """Five products in a pass and one in what is read, and what stands between them: attention
    from the projection on is one launch, a pool that rounds keys takes two more. What is read is
    gathered by the norm."""
    of_pass, of_read = num_launches(monkeypatch, plain_head(EagleHead))
    assert of_pass > 60
    assert of_read > 30
    head = plain_head(CudaEagleHead)
    assert num_launches(monkeypatch, head, fuses=True) == (11, 3)
    assert num_launches(monkeypatch, head) == (14, 3)
    assert num_launches(monkeypatch, head, kv_dtype=torch.float8_e4m3fn) == (14, 5)


def test_a_pass_of_rounded_weights_sums_parts_up_where_no_kernel_does(monkeypatch) -> None:
    """Those of the output projection and, as it is this narrow, of logits."""
    head = rounded_head()
    assert all(layer.is_kept for layer in head.layers_as_stored())
    assert num_launches(monkeypatch, head, fuses=True) == (13, 3)
    assert num_launches(monkeypatch, head, kv_dtype=torch.float8_e4m3fn) == (16, 5)


@torch.no_grad()
def test_what_a_pass_reads_is_looked_up_by_an_ordinary_launch(monkeypatch) -> None:
    """Products may start before tables and plans are complete, and attention before a product has
    ended: something between tables and attention has to wait for all that runs before it."""
    may_depend = []

    def recorded(first, second, weights, eps, first_rows, second_rows, may):
        may_depend.append(may)
        return torch.zeros(len(ROWS), 512, dtype=torch.bfloat16)

    monkeypatch.setattr(cuda_eagle_head, "pair_norm", recorded)
    head = CudaEagleHead(eagle_spec(), 256, ShardContext(SingleRank(), torch.bfloat16, CPU))
    states = torch.zeros(len(ROWS), 256, dtype=torch.bfloat16)
    launches = Launches(monkeypatch)
    attention = Attention(launches, fuses=True)
    batch = make_batch(ROWS, PREFIXES, attention)
    head(batch.input_ids, states, batch)
    head.draft(batch.input_ids, states, batch)
    assert may_depend == [False, False]
    tokens = TokenInputs(batch.input_ids, batch.positions)
    before = StatesBefore(states, torch.arange(len(states)))
    head.read(tokens, before, batch.out_cache_loc, attention)
    assert may_depend == [False, False, True]


@pytest.mark.parametrize(
    ("device", "changes", "head_class", "said"),
    [
        (CPU, {}, EagleHead, ""),
        (CUDA, {}, CudaEagleHead, ""),
        (CUDA, {"has_qkv_bias": True, "has_o_bias": True}, CudaEagleHead, ""),
        (CUDA, {"head_dim": 96}, EagleHead, "no power of two"),
        (CUDA, {"rotary_dim": 32}, EagleHead, "32 of a head's 64 elements"),
    ],
)
def test_which_heads_are_fused(device, changes, head_class, said, caplog) -> None:
    rotary_dim = changes.pop("rotary_dim", None)
    spec = eagle_spec(**changes)
    if rotary_dim is not None:
        rope = replace(spec.layer.rope, rotary_dim=rotary_dim)
        spec = replace(spec, layer=replace(spec.layer, rope=rope))
    with caplog.at_level(logging.INFO):
        assert head_class_for(spec, device) is head_class
    assert (said in caplog.text) if said else not caplog.text
