"""Queries of a decoder over what an encoder made: all of it, nobody else's, in its own account."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import AttentionHeads, LayerAttentionConfig, RadixAttention
from attention.backends.base import AttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.capability import AttentionBackendError
from attention.cross_layer import CrossAttention
from attention.features import Feature
from attention.memory.grouped_kv_pool import GroupedTokenToKVPool
from attention.memory.layout import EveryToken, FixedLength, LastTokens
from attention.memory.req_to_token_pool import ReqToTokenPool
from attention.memory.token_to_kv_pool import MHATokenToKVPool
from attention.oracle import OracleBackend
from attention.preferences import DeviceFacts
from attention.roofline import attention_step_cost
from attention.selection import AttentionNeeds, select_attention_backend
from attention.timing import CpuAttentionTimer
from tests.proofs.cells import proves
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

MAX_ENCODER_TOKENS = 300
WIDE = AttentionHeads(4, 2, 48, 48)
LAYERS = (
    LayerAttentionConfig(),
    LayerAttentionConfig(max_encoder_tokens=MAX_ENCODER_TOKENS),
    LayerAttentionConfig(sliding_window_size=9),
    LayerAttentionConfig(max_encoder_tokens=MAX_ENCODER_TOKENS, heads=WIDE),
)
STEPS = {
    "decode": rows_of((0, 1), (15, 1), (16, 1), (300, 1)),
    "extend": rows_of((0, 40), (15, 3), (7, 130)),
    "mixed": rows_of((40, 1), (0, 33), (255, 1), (17, 9)),
}
ENCODER_LENS = np.array([17, 1, MAX_ENCODER_TOKENS, 64], dtype=np.int32)


class Step:
    """Layers of both kinds over pools of three accounts; what no row owns is NaN."""

    def __init__(self, backend_class: type[AttentionBackend], page_size: int, rows) -> None:
        case = build_case(CaseSpec(rows, page_size=page_size))
        self.config = replace(
            case.config, num_layers=len(LAYERS), layers=LAYERS, has_bounded_accounts=True
        )
        self.lens = ENCODER_LENS[: len(rows)]
        own_pages = case.token_to_kv_pool.num_pages
        num_wanted = -(-self.lens // page_size)
        width = -(-MAX_ENCODER_TOKENS // page_size) * page_size
        table = case.req_to_token_pool.req_to_token
        pools = ReqToTokenPool(*table.shape, case.config.device, 2, width)
        for own in pools.own_tables:
            own.copy_(table)
        pages = (own_pages, own_pages, int(num_wanted.sum()) + 3)
        self.kv = GroupedTokenToKVPool(self.config, pages, MHATokenToKVPool)
        self._fill(case, num_wanted, page_size, pools)
        backend = backend_class(self.config, pools, self.kv)
        self.timer = CpuAttentionTimer(backend)
        self.batch = replace(
            case.batch,
            attn_backend=self.timer,
            bounded_cache_locs=(case.batch.out_cache_loc,),
            encoder_lens_cpu=self.lens,
        )
        backend.init_forward_metadata(self.batch)

    def _fill(self, case, num_wanted, page_size: int, pools: ReqToTokenPool) -> None:
        torch.manual_seed(5)
        for layer_id, layer in enumerate(LAYERS):
            for buffer in self.kv.get_kv_buffer(layer_id):
                buffer.copy_(torch.randn_like(buffer))
                if layer.max_encoder_tokens:
                    buffer[0] = torch.nan
        free = np.random.default_rng(page_size).permutation(np.arange(1, num_wanted.sum() + 3))
        slots = case.batch.req_pool_indices
        first = 0
        for row, num_pages in enumerate(num_wanted.tolist()):
            own = torch.from_numpy(free[first : first + num_pages])
            first += num_pages
            tokens = (own[:, None] * page_size + torch.arange(page_size)).view(-1)
            pools.write(slots[row : row + 1], 0, tokens.int(), account=2)
            for layer_id in (1, 3):
                for buffer in self.kv.get_kv_buffer(layer_id):
                    buffer.flatten(0, 1)[tokens[self.lens[row] :]] = torch.nan

    def run(self) -> list[torch.Tensor]:
        outs = []
        for layer_id in range(len(LAYERS)):
            torch.manual_seed(layer_id)
            heads = self.config.heads_of(layer_id)
            q_shape = self.batch.num_tokens, heads.tp_q_head_num, heads.head_dim
            kv_shape = self.batch.num_tokens, heads.tp_k_head_num, heads.head_dim
            q, k, v = torch.randn(q_shape), torch.randn(kv_shape), torch.randn(kv_shape)
            shape = heads.tp_q_head_num, heads.head_dim, 0.17, heads.tp_k_head_num, layer_id
            if LAYERS[layer_id].max_encoder_tokens:
                outs.append(CrossAttention(*shape)(q, self.batch))
                continue
            layer = RadixAttention(*shape, sliding_window_size=LAYERS[layer_id].sliding_window_size)
            outs.append(layer(q, k, v, self.batch))
        return outs


class OracleOfAccounts(OracleBackend):
    """Of the layers that see an encoder alone: the others are other tests' matter."""

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return q


@proves("torch_native", Feature.CROSS)
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows", STEPS.values(), ids=STEPS.keys())
def test_every_query_sees_all_that_its_rows_encoder_made(page_size, rows):
    got = Step(TorchNativeBackend, page_size, rows).run()
    wanted = Step(OracleOfAccounts, page_size, rows).run()
    assert not any(out.isnan().any() for out in got)
    for layer_id in (1, 3):
        assert relative_error(got[layer_id], wanted[layer_id]) < 1e-5


def test_accounts_stand_behind_each_other():
    config = Step(TorchNativeBackend, 16, STEPS["decode"]).config
    assert [config.account_of(layer_id) for layer_id in range(4)] == [0, 2, 1, 2]
    assert config.num_accounts == 3
    kinds = [account.retention for account in config.kv_layout.accounts]
    assert kinds == [EveryToken(), LastTokens(9), FixedLength(MAX_ENCODER_TOKENS)]
    assert config.kv_bytes_of_account(2) == (4 * 64 + 2 * 96) * 4
    assert replace(config, layers=LAYERS[:1], num_layers=1).num_accounts == 1


def test_a_layer_that_sees_an_encoder_has_no_window():
    with pytest.raises(ValueError, match="sees all of them"):
        LayerAttentionConfig(max_encoder_tokens=4, sliding_window_size=2)
    with pytest.raises(ValueError, match="at least one token"):
        FixedLength(0)


def test_a_steps_cost_counts_the_encoders_keys_and_is_measured():
    rows = STEPS["mixed"]
    step = Step(TorchNativeBackend, 16, rows)
    step.timer.begin_step(step.batch)
    step.run()
    timing = step.timer.end_step()
    assert timing is not None
    batch = step.batch
    config = replace(step.config, num_layers=2, layers=(LAYERS[0], LAYERS[2]))
    own = attention_step_cost(config, batch.seq_lens_cpu, batch.extend_seq_lens_cpu)
    num_keys = int(step.lens.sum())
    assert timing.bytes_read == own.bytes_read + num_keys * (4 * 64 + 2 * 96) * 4
    pairs = sum(int(n) * row.num_new for n, row in zip(step.lens, rows, strict=True))
    assert timing.flops == own.flops + 2 * pairs * (8 * 64 + 4 * 96)


def test_a_backend_without_cross_attention_is_refused_by_name():
    needs = AttentionNeeds(torch.float32, torch.float32, needs_cross_attention=True)
    cpu = DeviceFacts("cpu", "CPU", None)
    assert select_attention_backend(None, cpu, needs).name == "torch_native"
    fp8 = replace(needs, kv_dtype=torch.float8_e4m3fn)
    with pytest.raises(AttentionBackendError, match="has no cross-attention, which this model"):
        select_attention_backend("torch_native_fp8", cpu, fp8)
