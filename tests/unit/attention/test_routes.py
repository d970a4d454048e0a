"""Who attends in which phase and layer, over fake backends so that every rule is reached."""

from dataclasses import replace

import pytest

from attention.capability import AttentionBackendError
from attention.config import LayerAttentionConfig
from attention.forward_batch import ForwardMode
from attention.preferences import PREFERENCES
from attention.registration import BackendRegistry
from attention.routes import AskedBackends, AttentionRoutes, choose_routes
from attention.visibility import CAUSAL_ONLY, VisibilityKind
from tests.unit.attention.test_selection import BF16, HOPPER, fake_backend

PLAIN = LayerAttentionConfig()
CHUNKS = LayerAttentionConfig(chunk_size=8)
NOTHING = AskedBackends()
NEVER = {"has_chunked_attention": False, "has_bounded_accounts": False}


def registry_of(*backends):
    registry = BackendRegistry()
    for backend in backends:
        registry.register(backend.capability.name)(backend)
    return registry


def routes_of(asked=NOTHING, layers=(PLAIN, PLAIN), needs=BF16, **fa3):
    """Over fa3_triton, fa3 and torch_native; what else is preferred on Hopper is unfit."""
    fit = {
        "fa3_triton": {"default_page_size": 128, **NEVER},
        "fa3": NEVER | fa3,
        "torch_native": {"device_types": ("cuda", "cpu")},
    }
    names = PREFERENCES[HOPPER.generation].mha
    registry = registry_of(
        *(fake_backend(name, **fit.get(name, {"kv_dtypes": ()})) for name in names)
    )
    return choose_routes(asked, HOPPER, needs, layers, registry)


def test_alike_layers_and_phases_have_one_route():
    choice = routes_of()
    assert choice.routes == AttentionRoutes(("fa3_triton",) * 2, ("fa3_triton",) * 2)
    assert (str(choice.routes), choice.routes.names) == ("fa3_triton", ("fa3_triton",))
    assert (choice.page_size, choice.has_bounded_accounts) == (128, False)


def test_phases_take_what_was_asked_for_them():
    choice = routes_of(AskedBackends(extend="fa3", decode="torch_native"))
    assert choice.routes == AttentionRoutes(("fa3",) * 2, ("torch_native",) * 2)
    assert str(choice.routes) == "fa3 (prefill), torch_native (decode)"
    assert choice.routes.names == ("torch_native", "fa3")
    half = routes_of(AskedBackends(decode="fa3"))
    assert str(half.routes) == "fa3_triton (prefill), fa3 (decode)"


def test_layers_take_the_first_that_does_what_they_ask_for():
    choice = routes_of(layers=(CHUNKS, PLAIN, CHUNKS))
    of_layers = ("torch_native", "fa3_triton", "torch_native")
    assert choice.routes == AttentionRoutes(of_layers, of_layers)
    assert str(choice.routes) == "torch_native+fa3_triton"
    assert choice.routes.name_in(ForwardMode.EXTEND) == "torch_native+fa3_triton"
    assert not choice.has_bounded_accounts
    assert routes_of(layers=(CHUNKS, CHUNKS)).has_bounded_accounts


@pytest.mark.parametrize("phase", ["extend", "decode"])
def test_what_was_asked_for_is_for_every_layer(phase):
    with pytest.raises(AttentionBackendError, match="'fa3' was asked for but has no attention in"):
        routes_of(AskedBackends(**{phase: "fa3"}), layers=(PLAIN, CHUNKS))


def test_steps_that_mix_phases_are_a_matter_of_prefill():
    needs = replace(BF16, needs_mixed_batches=True)
    asked = AskedBackends(extend="fa3_triton", decode="fa3")
    assert str(routes_of(asked, needs=needs, has_mixed_batches=False).routes).endswith("(decode)")
    with pytest.raises(AttentionBackendError, match="'fa3' .* has no prefill and decode in"):
        routes_of(AskedBackends(extend="fa3"), needs=needs, has_mixed_batches=False)
    assert str(routes_of(AskedBackends(extend="fa3"), has_mixed_batches=False).routes)


def test_the_pages_are_of_a_size_that_all_work_with():
    asked = AskedBackends(extend="fa3_triton", decode="fa3")
    only_64 = {"page_sizes": (64,), "default_page_size": 64}
    assert routes_of(asked, **only_64).page_size == 64
    assert routes_of(asked, needs=replace(BF16, page_size=64), **only_64).page_size == 64
    with pytest.raises(AttentionBackendError, match="does not work with page size 32"):
        routes_of(asked, needs=replace(BF16, page_size=32), **only_64)
    only_512 = {"page_sizes": (512,), "default_page_size": 512}
    with pytest.raises(AttentionBackendError, match=r"all work with \(fa3: 512, fa3_triton: 128\)"):
        routes_of(asked, **only_512)


def tree_routes(asked=NOTHING, layers=(PLAIN, PLAIN), **triton):
    """Over fa3, which has no masks, triton and torch_native, which have."""
    every = frozenset(VisibilityKind)
    registry = registry_of(
        fake_backend("fa3", visibilities=CAUSAL_ONLY, **NEVER),
        fake_backend("triton", visibilities=every, **triton),
        fake_backend("torch_native", device_types=("cuda", "cpu"), visibilities=every),
        *(
            fake_backend(name, kv_dtypes=())
            for name in PREFERENCES[HOPPER.generation].mha
            if name not in ("fa3", "triton", "torch_native")
        ),
    )
    needs = replace(BF16, visibilities=frozenset({VisibilityKind.CAUSAL, VisibilityKind.TREE}))
    return choose_routes(asked, HOPPER, needs, layers, registry)


def test_steps_with_trees_go_where_there_are_masks_and_no_others_do():
    routes = tree_routes().routes
    assert routes == AttentionRoutes(("fa3",) * 2, ("fa3",) * 2, ("triton",) * 2)
    assert str(routes) == "fa3 (prefill), fa3 (decode), triton (draft trees)"
    assert routes.names == ("fa3", "triton")
    assert tree_routes(AskedBackends("fa3", "fa3")).routes == routes


@pytest.mark.parametrize("name", ["triton", "torch_native"])
def test_who_attends_to_prompts_attends_to_trees_where_it_can(name):
    asked = AskedBackends(extend=name, decode=name)
    assert tree_routes(asked).routes == AttentionRoutes((name,) * 2, (name,) * 2)


def test_pages_are_such_that_steps_with_trees_read_them():
    assert tree_routes(page_sizes=(32,), default_page_size=32).page_size == 32
    mixed = tree_routes(layers=(PLAIN, CHUNKS)).routes
    assert mixed == AttentionRoutes(("fa3", "triton"), ("fa3", "triton"), ("triton", "triton"))
