"""The tuned backend: each step goes to the backend that its lengths ask for, with equal results."""

from dataclasses import replace

import numpy as np
import pytest

from attention.backends.base import GraphAttentionBackend
from attention.capability import AttentionBackendError
from attention.oracle import OracleBackend
from attention.timing import CpuAttentionTimer
from attention.tuning.candidates import CandidateSet
from attention.tuning.choice import TunedRoutes, rounded_point, rounded_prefixes
from attention.tuning.router import GraphTunedAttention, TunedAttention
from attention.tuning.table import TuningTable
from attention.visibility import CAUSAL, CAUSAL_ONLY, Everything
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of
from tests.unit.attention.test_router import Graphable, Recording
from tests.unit.attention.tuning.doubles import DECODE, EXTEND, decode, extend

BOTH = {"a": ("a",), "b": ("b",)}
TIMES = {
    decode(1, 64): {"a": 1.0, "b": 2.0},
    decode(64, 64): {"a": 3.0, "b": 2.0},
    decode(64, 64, is_uneven=True): {"a": 1.0, "b": 2.0},
    extend(1, 8): {"a": 2.0, "b": 1.0},
    extend(1, 256): {"a": 1.0, "b": 2.0},
}
TUNED = TunedRoutes(
    CandidateSet(16, False, {DECODE: BOTH, EXTEND: BOTH}),
    TuningTable({DECODE: ("a", "b"), EXTEND: ("a", "b")}, TIMES),
    max_context_len=1000,
    num_layers=1,
)
FEW, MANY = CaseSpec(rows_of((30, 1), (3, 1))), CaseSpec(rows_of(*[(20, 1)] * 40))
SHORT, LONG = CaseSpec(rows_of((9, 4))), CaseSpec(rows_of((9, 200)))
UNEVEN = CaseSpec(rows_of(*[(4, 1)] * 39, (400, 1)))


def tuned_over(case, backend_class=Recording, router_class=TunedAttention, tuned=TUNED):
    calls = []
    backends = {name: backend_class(name, calls, case) for name in BOTH}
    pools = (case.req_to_token_pool, case.token_to_kv_pool)
    router = router_class(case.config, *pools, tuned, {DECODE: backends, EXTEND: backends})
    return router, calls


@pytest.mark.parametrize(
    ("spec", "name"), [(FEW, "a"), (MANY, "b"), (UNEVEN, "a"), (SHORT, "b"), (LONG, "a")]
)
def test_a_step_goes_to_the_fastest_for_such_steps(spec, name):
    case = build_case(spec)
    router, calls = tuned_over(case)
    expected = OracleBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool).forward(
        case.q, case.k, case.v, case.layer, case.batch
    )
    router.init_forward_metadata(case.batch)
    out = router.forward(case.q, case.k, case.v, case.layer, case.batch)
    assert calls == [(name, "metadata"), (name, 0)]
    assert relative_error(out, expected) < 1e-5


def test_a_steps_time_carries_the_name_of_who_attended():
    case = build_case(MANY)
    router, _ = tuned_over(case)
    timer = CpuAttentionTimer(router, iter(range(100)).__next__)
    timer.begin_step(case.batch)
    router.init_forward_metadata(case.batch)
    timer.forward(case.q, case.k, case.v, case.layer, case.batch)
    timer.end_step()
    assert [timing.backend for timing in timer.drain()] == ["b"]
    assert router.capability.name == "auto-tuned: a or b"


@pytest.mark.parametrize("method", ["forward_latent", "forward_cross", "forward_projected"])
def test_other_calls_take_the_same_way(method):
    case = build_case(MANY)
    router, _ = tuned_over(case)
    router.init_forward_metadata(case.batch)
    taken = []
    setattr(router._active, method, lambda *arguments: taken.append(arguments))
    between = {"forward_latent": ("tokens", "up"), "forward_cross": ("q",)}.get(method, ("qkv",))
    getattr(router, method)(*between, case.layer, case.batch)
    assert taken == [(*between, case.layer, case.batch)]
    assert router._active.capability.name == "b"


def test_a_step_begins_with_projections_where_its_own_backend_can():
    case = build_case(MANY)
    router, _ = tuned_over(case)
    router._backends[DECODE]["b"].fuses_decode_projection = lambda num_rows: num_rows > 2
    router.init_forward_metadata(case.batch)
    assert router.fuses_decode_projection(40)
    router.init_forward_metadata(build_case(FEW).batch)
    assert not router.fuses_decode_projection(40)


def test_steps_that_see_otherwise_take_who_can():
    case = build_case(SHORT)
    router, _ = tuned_over(case)
    backends = router._backends[EXTEND]
    backends["b"].capability = replace(backends["b"].capability, visibilities=CAUSAL_ONLY)
    everything = replace(case.batch, visibility=Everything())
    assert router.name_of(everything) == "a"
    assert router.name_of(replace(case.batch, visibility=CAUSAL)) == "b"
    backends["a"].capability = replace(backends["a"].capability, visibilities=CAUSAL_ONLY)
    with pytest.raises(AttentionBackendError, match="none of a, b has"):
        router.name_of(everything)


def test_each_backend_that_a_size_may_take_has_graphs_of_its_own():
    router, calls = tuned_over(build_case(FEW), Graphable, GraphTunedAttention)
    router.init_cuda_graph_state(64)
    assert sorted(calls) == [("a", 64), ("b", 64)]
    assert [one.capability.name for one in router.graph_backends(1)] == ["a"]
    assert {one.capability.name for one in router.graph_backends(64)} == {"a", "b"}
    even, uneven = np.full(40, 21, np.int32), np.array([5] * 39 + [401], np.int32)
    for lengths, name in ((even, "b"), (uneven, "a")):
        chosen = router.graph_backend_of(64, lengths)
        assert isinstance(chosen, GraphAttentionBackend)
        assert chosen.capability.name == name
        assert chosen in router.graph_backends(64)


def test_every_choice_of_a_size_is_among_its_graphs():
    router, _ = tuned_over(build_case(FEW), Graphable, GraphTunedAttention)
    for size in (1, 8, 24, 64):
        for length in range(1, 1000, 7):
            lengths = np.full(size, length, np.int32)
            assert router.graph_backend_of(size, lengths) in router.graph_backends(size)


def test_a_graph_holds_steps_of_fewer_rows_whose_own_fastest_attends():
    """12 of 16 rows: their 36 chunks are more than run at once, those of 16 rows are not."""
    times = {
        decode(8, 64): {"a": 1.0, "b": 1.2},
        decode(12, 64): {"a": 1.4, "b": 1.2},
        decode(16, 64): {"a": 1.2, "b": 1.4},
    }
    tuned = replace(TUNED, table=TuningTable(TUNED.table.names, times))
    router, _ = tuned_over(build_case(FEW), Graphable, GraphTunedAttention, tuned)
    for num_rows, name in ((16, "a"), (15, "a"), (12, "b"), (10, "b")):
        chosen = router.graph_backend_of(16, np.full(num_rows, 65, np.int32))
        assert chosen.capability.name == name
        assert chosen in router.graph_backends(16)
    assert {one.capability.name for one in router.graph_backends(16)} == {"a", "b"}
    assert [one.capability.name for one in router.graph_backends(8)] == ["a"]


def test_rounded_prefixes_are_all_that_rounding_gives():
    known = rounded_prefixes(40_000)
    for prefix in [*range(300), *range(300, 40_000, 37)]:
        assert rounded_point(decode(4, prefix)).prefix_tokens in known
    assert known == sorted(set(known))


def test_only_winners_of_measured_points_are_taken():
    times = {decode(1, 64): {"a": 1.0, "b": 1.5}, decode(64, 64): {"a": 1.0, "b": 1.5}}
    tuned = replace(TUNED, table=TuningTable(TUNED.table.names, times))
    assert tuned.chosen == {DECODE: ("a",), EXTEND: ("a",)}
