"""The Gluon extend kernel against float64, with NaN wherever nobody wrote."""

from dataclasses import replace

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.triton_paged import TritonBackend
from attention.kernels.gluon_shape import GluonTuning
from attention.kernels.providers import probe_gluon
from attention.kernels.warpgroup_extend import WarpgroupExtend
from tests.gpu.attention.device_cases import BF16_TOLERANCE, device_spec, error_of, oracle
from tests.gpu.needs import HAS_GPU, NEEDS_GPU, NEEDS_HOPPER
from tests.unit.attention.cases import build_case, relative_error, rows_of

NEEDS_GLUON = pytest.mark.skipif(
    not (HAS_GPU and probe_gluon().is_available), reason="another Triton than Gluon's"
)
pytestmark = [*NEEDS_GPU, NEEDS_HOPPER, NEEDS_GLUON]

TUNINGS = {
    "128": GluonTuning(128, 2),
    "64": GluonTuning(64, 4),
}
EVEN = rows_of((0, 256), (128, 128), (512, 384))
ODD = rows_of((0, 5), (7, 130), (0, 257), (128, 2), (33, 16), (0, 1), (1000, 1), (63, 65))
LONG = rows_of((0, 1100), (2049, 333), (4096, 64))


class AlwaysWarpgroups(WarpgroupExtend):
    num_launches = 0

    def _pays(self, num_tokens, rows):
        AlwaysWarpgroups.num_launches += 1
        return True


def backend_of(tuning):
    class Backend(TritonBackend):
        def _make_extend(self):
            return AlwaysWarpgroups(self._geometry(), self._limits, tuning)

    return Backend


def launched_error(spec, tuning=TUNINGS["128"]):
    before = AlwaysWarpgroups.num_launches
    error = error_of(build_case(spec), backend_of(tuning))
    assert AlwaysWarpgroups.num_launches > before
    return error


@pytest.mark.parametrize("tuning", TUNINGS.values(), ids=TUNINGS.keys())
@pytest.mark.parametrize("rows", [EVEN, ODD, LONG], ids=["even", "odd", "long"])
def test_every_tuning(rows, tuning):
    spec = device_spec(rows, page_size=64)
    assert launched_error(spec, tuning) < BF16_TOLERANCE


@pytest.mark.parametrize("page_size", [16, 32, 128, 256])
@pytest.mark.parametrize("rows", [ODD, LONG], ids=["odd", "long"])
def test_every_page_size(rows, page_size):
    spec = device_spec(rows, page_size=page_size, layout_seed=page_size)
    assert launched_error(spec) < BF16_TOLERANCE


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize(("q_heads", "kv_heads"), [(4, 4), (16, 2), (14, 2)])
def test_every_gqa_ratio_and_head_dim(q_heads, kv_heads, head_dim):
    heads = {"q_heads": q_heads, "kv_heads": kv_heads, "head_dim": head_dim, "v_head_dim": head_dim}
    assert launched_error(device_spec(ODD, page_size=16, **heads)) < BF16_TOLERANCE


def test_float16():
    half = {"dtype": torch.float16, "kv_dtype": torch.float16}
    assert launched_error(device_spec(ODD, page_size=64, **half)) < BF16_TOLERANCE


def test_rows_without_keys_give_zeros():
    """As those that pad a batch do."""
    case = build_case(device_spec(rows_of((0, 40), (0, 300)), page_size=64))
    lengths = case.batch.seq_lens_cpu.copy()
    lengths[0] = 0
    batch = replace(case.batch, seq_lens_cpu=lengths, seq_lens=torch.from_numpy(lengths).cuda())
    out = replace(case, batch=batch).run(backend_of(TUNINGS["128"]))
    assert not out[:40].any()
    assert relative_error(out[40:], oracle(case)[40:]) < BF16_TOLERANCE


def test_the_same_bits_every_time():
    case = build_case(device_spec(LONG, page_size=16))
    first, *others = (case.run(backend_of(TUNINGS["128"])) for _ in range(5))
    for other in others:
        assert torch.equal(first, other)


@pytest.mark.parametrize(
    "layer",
    [LayerAttentionConfig(sliding_window_size=24), LayerAttentionConfig(has_sinks=True)],
    ids=["window", "sinks"],
)
def test_other_layers_take_the_plain_kernel(layer):
    spec = device_spec(ODD, page_size=64, layer=layer)
    assert error_of(build_case(spec), backend_of(TUNINGS["128"])) < BF16_TOLERANCE


def test_a_captured_launch_follows_its_inputs():
    """As in the segments of a captured prompt step."""
    case = build_case(device_spec(EVEN, page_size=64))
    backend = backend_of(TUNINGS["128"])(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    wanted = case.run(lambda *_: backend)
    q = torch.zeros_like(case.q)
    backend.init_forward_metadata(case.batch)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        out = backend.forward(q, case.k, case.v, case.layer, case.batch, save_kv_cache=False)
    q.copy_(case.q)
    graph.replay()
    assert torch.equal(out.view_as(wanted), wanted)
