"""Several backends over one pool: calls go where the routes say, results are as of one backend."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention import router as router_module
from attention.backends.base import GraphAttentionBackend
from attention.backends.torch_native import TorchNativeBackend
from attention.forward_batch import ForwardMode
from attention.oracle import OracleBackend
from attention.router import (
    AttentionRouter,
    GraphAttentionRouter,
    GraphTreeRouter,
    build_attention,
)
from attention.routes import AttentionRoutes
from attention.visibility import Tree
from tests.unit.attention.cases import CaseSpec, build_case, relative_error, rows_of

NUM_LAYERS = 3
ROUTES = AttentionRoutes(("first", "second", "first"), ("third", "third", "second"))
DECODE = CaseSpec(rows_of((30, 1), (3, 1)))
EXTEND = CaseSpec(rows_of((30, 1), (0, 40), (17, 5)))


class Recording(TorchNativeBackend):
    """Tells its name of each call to calls."""

    def __init__(self, name, calls, case):
        super().__init__(case.config, case.req_to_token_pool, case.token_to_kv_pool)
        self.capability = replace(self.capability, name=name)
        self.calls = calls

    def init_forward_metadata(self, forward_batch):
        self.calls.append((self.capability.name, "metadata"))
        super().init_forward_metadata(forward_batch)

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.calls.append((self.capability.name, layer.layer_id))
        layer.layer_id = 0
        return super().forward(q, k, v, layer, forward_batch, save_kv_cache)


class Graphable(Recording, GraphAttentionBackend):
    plans_on_host = False

    def init_cuda_graph_state(self, max_bs):
        self.calls.append((self.capability.name, max_bs))

    def init_forward_metadata_capture_cuda_graph(self, forward_batch):
        self.calls.append((self.capability.name, "capture"))

    def record_step_tables(self, forward_batch):
        self.calls.append((self.capability.name, "tables"))

    def before_replay(self, num_rows, seq_lens_cpu):
        self.calls.append((self.capability.name, (num_rows, seq_lens_cpu)))


def router_over(case, backend_class=Recording, router_class=AttentionRouter, routes=ROUTES):
    calls = []
    backends = {name: backend_class(name, calls, case) for name in routes.names}
    config = replace(case.config, num_layers=NUM_LAYERS, layers=case.config.layers * NUM_LAYERS)
    return router_class(
        config, case.req_to_token_pool, case.token_to_kv_pool, routes, backends
    ), calls


@pytest.mark.parametrize(("spec", "names"), [(DECODE, ROUTES.decode), (EXTEND, ROUTES.extend)])
def test_a_call_goes_to_the_backend_of_its_phase_and_layer(spec, names):
    case = build_case(spec)
    router, calls = router_over(case)
    router.init_forward_metadata(case.batch)
    assert calls == [(name, "metadata") for name in dict.fromkeys(names)]
    oracle = OracleBackend(case.config, case.req_to_token_pool, case.token_to_kv_pool)
    expected = oracle.forward(case.q, case.k, case.v, case.layer, case.batch)
    for layer_id, name in enumerate(names):
        case.layer.layer_id = layer_id
        out = router.forward(case.q, case.k, case.v, case.layer, case.batch)
        assert calls[-1] == (name, layer_id)
        assert relative_error(out, expected) < 1e-5
    assert router.name_in(spec.mode) == ROUTES.name_in(spec.mode)


def test_it_has_the_name_of_its_routes():
    router, _ = router_over(build_case(DECODE))
    assert router.capability.name == "first+second (prefill), third+second (decode)"
    assert router.name_in(ForwardMode.TARGET_VERIFY) == "first+second"


def test_a_step_begins_with_projections_where_all_of_its_layers_can():
    router, _ = router_over(build_case(DECODE))
    assert not router.fuses_decode_projection(4)
    third, _, second = router._decode
    third.fuses_decode_projection = lambda num_rows: num_rows > 2
    assert not router.fuses_decode_projection(4)
    second.fuses_decode_projection = lambda num_rows: True
    assert router.fuses_decode_projection(4)
    assert not router.fuses_decode_projection(2)


@pytest.mark.parametrize("method", ["forward_latent", "forward_cross", "forward_projected"])
def test_other_calls_take_the_same_way(method):
    case = build_case(DECODE)
    router, _ = router_over(case)
    taken = []
    for backend in set(router._decode):
        name = backend.capability.name
        setattr(backend, method, lambda *arguments, name=name: taken.append((name, *arguments)))
    case.layer.layer_id = 2
    between = {"forward_latent": ("tokens", "up"), "forward_cross": ("q",)}.get(method, ("qkv",))
    getattr(router, method)(*between, case.layer, case.batch)
    assert taken == [("second", *between, case.layer, case.batch)]


def test_a_graph_asks_each_backend_of_decode_steps_once():
    case = build_case(DECODE)
    router, calls = router_over(case, Graphable, GraphAttentionRouter)
    router.init_cuda_graph_state(8)
    router.init_forward_metadata_capture_cuda_graph(case.batch)
    router.record_step_tables(case.batch)
    router.before_replay(4, "lengths")
    told = (8, "capture", "tables", (4, "lengths"))
    assert calls == [(name, what) for what in told for name in ("third", "second")]


def test_steps_are_planned_on_the_host_where_a_backend_of_theirs_does():
    router, _ = router_over(build_case(DECODE), Graphable, GraphAttentionRouter)
    assert not router.plans_on_host
    # Of prompts only.
    router._extend[0].plans_on_host = True
    assert not router.plans_on_host
    router._decode[1].plans_on_host = True
    assert router.plans_on_host


def test_routes_of_other_layers_than_the_models_are_refused():
    routes = AttentionRoutes(("first",) * 2, ("third",) * 2)
    with pytest.raises(ValueError, match="routes of 2 layers for 3"):
        router_over(build_case(DECODE), routes=routes)


TREES = AttentionRoutes(("first",) * 3, ("third",) * 3, ("second",) * 3)
VERIFY = CaseSpec(rows_of((30, 4), (3, 4)))


def with_trees(case):
    parents = [np.array([-1, 0, 0, 1], dtype=np.int32)] * 2
    return replace(case.batch, visibility=Tree.of_parents(parents, torch.device("cpu")))


def test_steps_with_trees_go_their_own_way():
    case = build_case(VERIFY)
    router, calls = router_over(case, routes=TREES)
    for batch, name in ((with_trees(case), "second"), (case.batch, "first")):
        router.init_forward_metadata(batch)
        router.forward(case.q, case.k, case.v, case.layer, batch)
        assert calls[-2:] == [(name, "metadata"), (name, 0)]
        assert router.name_of(batch) == name


def test_graphs_of_steps_with_trees_ask_who_attends_in_them():
    case = build_case(VERIFY)
    router, calls = router_over(case, Graphable, GraphTreeRouter, TREES)
    router.init_cuda_graph_state(8)
    assert calls == [("third", 8), ("second", 8)]
    calls.clear()
    router.init_forward_metadata_capture_cuda_graph(with_trees(case))
    router.record_step_tables(with_trees(case))
    decode = build_case(DECODE).batch
    router.record_step_tables(decode)
    assert calls == [("second", "capture"), ("second", "tables"), ("third", "tables")]


@pytest.mark.parametrize("captures_verify", [True, False])
def test_steps_with_trees_are_captured_where_who_attends_in_them_can_be(
    captures_verify, monkeypatch
):
    case = build_case(VERIFY)

    def create(name, config, *pools):
        backend = Graphable(name, [], case)
        backend.captures_verify = captures_verify and name == "second"
        return backend

    monkeypatch.setattr(router_module, "create_attention_backend", create)
    config = replace(case.config, num_layers=NUM_LAYERS, layers=case.config.layers * NUM_LAYERS)
    pools = case.req_to_token_pool, case.token_to_kv_pool
    assert build_attention(TREES, config, *pools).captures_verify == captures_verify
