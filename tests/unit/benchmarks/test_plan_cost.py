"""benchmarks.plan_cost measures the plan that admits everybody over the cached document."""

import pytest

from benchmarks.plan_cost import SAMPLINGS, Workload


@pytest.mark.parametrize("page_size", [1, 16])
def test_every_request_is_in_the_plan_and_the_document_is_named_once(page_size: int):
    workload = Workload(num_requests=8, num_tokens=4096, page_size=page_size)
    costs = {name: workload.measure(sampling) for name, sampling in SAMPLINGS.items()}
    assert all(cost.num_admitted == 8 for cost in costs.values())
    pages_bytes = 4 * 4096 // page_size
    greedy = costs["greedy"].frame_bytes
    assert pages_bytes < greedy < pages_bytes + 8 * 1024
    assert costs["repetition penalty"].frame_bytes > greedy
    assert all(min(cost.schedule_ms, cost.encode_ms, cost.write_ms) > 0 for cost in costs.values())
