"""What is read of PEFT's files of experts and embeddings."""

import pytest
import torch
from msgspec.structs import replace

from tests.fakes.peft_files import (
    EMBEDDING,
    EXPERTS,
    INFO,
    ONE,
    embedding,
    expert_pair,
    name_of,
    pair,
    refused,
    stack,
    write,
)
from workers.adapters.embedding_site import EmbeddingSite
from workers.adapters.expert_modules import StackFit, StackKind
from workers.adapters.expert_site import of_each_expert
from workers.adapters.folder import adapter_at
from workers.adapters.low_rank import LowRank
from workers.adapters.peft_weights import check_fits, read_pairs, stack_in
from workers.errors import AdapterError
from workers.layers.embedding import ScaledVocabParallelEmbedding
from workers.layers.sharding import ShardContext
from workers.parallel.group import SingleRank

CONTEXT = ShardContext(SingleRank(), torch.float16, torch.device("cpu"))


@pytest.mark.parametrize(
    ("module", "shape"),
    [
        ("model.layers.0.moe.experts.3.w1", (6, 3)),
        ("model.layers.0.moe.experts.0.w3", (6, 3)),
        ("model.layers.0.moe.experts.2.w2", (3, 6)),
        ("model.layers.0.moe.experts.4.w1", None),
        ("model.layers.0.moe.experts.03.w1", None),
        ("model.layers.0.moe.experts.\u0663.w1", None),
        ("model.layers.0.moe.experts.-1.w1", None),
        ("model.layers.0.moe.experts.1.gate", None),
        ("model.layers.1.moe.experts.1.w1", None),
        ("model.layers.0.mlp.experts.1.w1", None),
        ("w1", None),
    ],
)
def test_modules_of_experts_have_the_shapes_of_one(module, shape) -> None:
    assert INFO.shape_of(module) == shape


@pytest.mark.parametrize("inputs_first", [False, True])
@pytest.mark.parametrize("is_never_swapped", [False, True])
@pytest.mark.parametrize("width", [3, 4, 8])
@pytest.mark.parametrize("kind", StackKind)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_stack_is_told_by_its_shapes(
    kind, is_swapped, width, is_never_swapped, inputs_first
) -> None:
    """A square one by the version of PEFT, or by how transformers has the tensor."""
    experts = replace(EXPERTS, hidden_size=8, width=width, inputs_first=inputs_first)
    inputs, outputs = (8, 2 * width) if kind is StackKind.GATE_UP else (width, 8)
    can_swap = not (is_never_swapped or inputs_first)
    if is_swapped:
        inputs, outputs = outputs, inputs
    fit = experts.fit_of((12, inputs), (outputs, 12), is_never_swapped)
    if inputs == outputs:
        assert fit == (None if can_swap else StackFit(kind, False))
    else:
        assert fit == (StackFit(kind, is_swapped) if can_swap or not is_swapped else None)


@pytest.mark.parametrize(
    ("tensors", "changes"),
    [
        (stack((8, 3), (6, 8)) | expert_pair("w1"), {}),
        (stack((8, 3), (6, 8)) | stack((8, 6), (6, 8), inner=True), {"peft_version": "0.19.1"}),
        # Of a kind that is not there.
        (stack((8, 3), (6, 8)), {"rank_pattern": {"gate_up_proj": 16}}),
        (stack((32, 3), (6, 32)), {"r": 8}),
        (embedding(EMBEDDING) | {f"base_model.model.{EMBEDDING}.base_layer.weight": ONE}, {}),
        (pair(), {"ensure_weight_tying": True}),
    ],
)
def test_adapters_of_embeddings_and_experts_are_served(tmp_path, tensors, changes) -> None:
    write(tmp_path, tensors, **changes)
    adapter_at("one", tmp_path, INFO)


@pytest.mark.parametrize("version", ["0.19.0", "0.18.1", "0.19", None])
def test_older_versions_do_not_say_what_are_inputs(tmp_path, version) -> None:
    write(tmp_path, stack((8, 6), (6, 8)), peft_version=version)
    refused(tmp_path, "it cannot be told what are inputs")


def test_of_a_stack_each_expert_and_part_has_its_own(tmp_path) -> None:
    """By the scale of its kind, from a model around the text's."""
    a, b = torch.randn(8, 3), torch.randn(6, 8)
    experts = "model.language_model.layers.0.mlp.experts"
    write(
        tmp_path,
        {name_of(experts, "A"): a, name_of(experts, "B"): b},
        alpha_pattern={"down_proj": 5},
    )
    pairs = read_pairs(tmp_path)
    check_fits(pairs, INFO)
    (stated,) = pairs.values()
    found = stack_in(INFO, stated)
    assert found.pair.scale == 2.5
    modules = of_each_expert(found, LowRank(a, b))
    assert list(modules) == [f"model.layers.0.moe.experts.{expert}.w2" for expert in range(4)]
    for expert, own in enumerate(modules.values()):
        assert torch.equal(own.a, a[2 * expert : 2 * expert + 2])
        assert torch.equal(own.b, b[:, [expert, 4 + expert]])


def test_an_embeddings_own_scale_makes_no_infinities() -> None:
    layer = ScaledVocabParallelEmbedding(9, 48 * 48, CONTEXT)
    site = EmbeddingSite(layer, EMBEDDING)
    small, large = (LowRank(ONE, torch.tensor([[x]]).half()) for x in (1000.0, 2000.0))
    assert float(site.share_of({EMBEDDING: small})[EMBEDDING].b) == 48000
    with pytest.raises(AdapterError, match="no finite numbers .* own scale of 48"):
        site.share_of({EMBEDDING: large})
