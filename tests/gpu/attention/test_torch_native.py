"""The same properties on an NVIDIA GPU: device tables, no host copy, event timing."""

from dataclasses import replace

import pytest
import torch

from attention import LayerAttentionConfig
from attention.backends.torch_native import TorchNativeBackend
from attention.cuda_timing import CudaEventAttentionTimer, new_cuda_event
from tests.gpu.needs import NEEDS_GPU
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

pytestmark = NEEDS_GPU

MIXED = rows_of((40, 1), (0, 300), (255, 1), (17, 9), (3, 1))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_torch_native_agrees_with_oracle_on_the_device(dtype, tolerance, has_sinks):
    layer = LayerAttentionConfig(has_sinks=has_sinks)
    spec = CaseSpec(MIXED, dtype=dtype, kv_dtype=dtype, layer=layer, device=torch.device("cuda"))
    case = build_case(spec)
    assert relative_error(case.run(TorchNativeBackend), case.run_oracle()) < tolerance


def test_event_timer_reports_a_step_after_the_device_has_passed_it():
    case = build_case(CaseSpec(MIXED, device=torch.device("cuda")))
    backend = TorchNativeBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    backend.init_forward_metadata(case.batch)
    timer = CudaEventAttentionTimer(backend, new_cuda_event)
    batch = replace(case.batch, attn_backend=timer)
    timer.begin_step(batch)
    case.layer(case.q.flatten(1), case.k.flatten(1), case.v.flatten(1), batch)
    timer.end_step()
    torch.cuda.synchronize()
    (timing,) = timer.drain()
    assert 0.0 < timing.seconds < 10.0
