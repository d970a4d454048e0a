"""The fused Llama above its kernels, on any device: what is launched, in which order, on what.

Everything that launches a kernel is replaced by a fake that writes down its call. A tensor's value
says which call made it.
"""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

pytest.importorskip("triton", reason="comes with torch for CUDA only")

from workers.graphs.segment_graphs import SegmentGraphs
from workers.layers.quantised import products
from workers.layers.sharding import ShardContext
from workers.models import cuda_llama, cuda_stream
from workers.models.llama_family import llama_family_spec
from workers.models.token_inputs import TokenInputs
from workers.parallel.group import SingleRank

CPU = torch.device("cpu")
HIDDEN = 8
NUM_TOKENS = 5
ROWS = torch.tensor([1, 4])


class Launches:
    """The log, and tensors that remember the call that made them."""

    def __init__(self):
        self.log = []
        self._makers = ["nobody"]

    def add(self, maker, *arguments):
        self.log.append(" ".join([maker, *map(self._name_of, arguments)]))

    def result(self, maker, num_rows, new=torch.empty):
        self._makers.append(maker)
        made = new((num_rows, HIDDEN), dtype=torch.float32, device=CPU)
        return made.fill_(len(self._makers) - 1)

    def _name_of(self, argument):
        if not isinstance(argument, torch.Tensor):
            return str(argument)
        return f"{self._makers[int(argument[0, 0])]}x{len(argument)}"


@dataclass(frozen=True)
class FakeGemm:
    name: str
    launches: Launches

    def __call__(self, x):
        self.launches.add(self.name, x)
        return self.launches.result(self.name, len(x))


@dataclass(frozen=True)
class FakeJoin:
    """As residual_stream.Join: it launches its GEMM, too."""

    place: str
    launches: Launches
    norm_names: dict

    def __call__(self, gemm, x, residual, norm):
        name = self.norm_names[id(norm)]
        self.launches.add(self.place, gemm.name, x, residual, name)
        return self.launches.result(name, len(x))


@dataclass(frozen=True)
class FakeAttention:
    """As cuda_attention.LayerAttention."""

    layer: int
    launches: Launches
    is_fused: bool

    def rotate(self, qkv, places, new):
        self.launches.add(f"rotate{self.layer}", qkv, f"at {places.positions.tolist()}")
        return (self.launches.result(f"rotated{self.layer}", len(qkv), new),)

    def attend(self, inputs, batch):
        self.launches.add(f"attend{self.layer}", *inputs)
        return self.launches.result(f"attended{self.layer}", len(inputs[0]))

    def takes_projected(self, batch):
        return self.is_fused

    def attend_projected(self, qkv, batch):
        self.launches.add(f"attend_projected{self.layer}", qkv)
        return self.launches.result(f"attended{self.layer}", len(qkv))


def fused_llama(monkeypatch, launches, is_fused=False):
    """Two layers over fakes."""
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=HIDDEN,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        architectures=["LlamaForCausalLM"],
    )
    shard = ShardContext(SingleRank(), torch.float32, CPU)
    model = cuda_llama.CudaLlamaForCausalLM(llama_family_spec(config), 64, shard)
    weights, norms = {}, {id(model.model.norm): "norm"}
    for index, layer in enumerate(model.model.layers):
        modules = {
            "qkv": layer.self_attn.qkv_proj,
            "o": layer.self_attn.o_proj,
            "gate_up": layer.mlp.gate_up_proj,
            "down": layer.mlp.down_proj,
        }
        weights |= {id(module.weight): f"{name}{index}" for name, module in modules.items()}
        norms[id(layer.input_layernorm)] = f"norm{index}"
        norms[id(layer.post_attention_layernorm)] = f"mlp_norm{index}"
    weights[id(model.lm_head.weight)] = "head"

    def begin(input_ids, norm):
        launches.add(f"begin {norms[id(norm)]}")
        num_tokens = len(input_ids)
        return launches.result("stream", num_tokens), launches.result("begun", num_tokens)

    def select_rows(residual, rows):
        launches.add("select", residual)
        return residual.index_select(0, rows)

    def gemms(chooser, given, kind):
        return [FakeGemm(weights[id(weight)], launches) for weight in given]

    ways = SimpleNamespace(
        begin=begin,
        after_attention=FakeJoin("after_attention", launches, norms),
        after_mlp=FakeJoin("after_mlp", launches, norms),
        select_rows=select_rows,
    )
    attentions = iter(FakeAttention(index, launches, is_fused) for index in range(2))
    fakes = {
        "GemmChooser": SimpleNamespace(for_device=lambda device: None),
        "partial_gemms": gemms,
        "layer_attention": lambda *given: next(attentions),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(cuda_stream, name, fake)
    monkeypatch.setattr(products, "partial_gemms", fakes["partial_gemms"])
    monkeypatch.setattr(products, "gated_gemms", gemms)
    monkeypatch.setattr(cuda_llama, "stream_ways", lambda tp, embedding: ways)
    model.prepare(None, None)
    return model


@dataclass
class Batch:
    """What is read of a ForwardBatch."""

    num_tokens: int = NUM_TOKENS
    input_ids: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    out_cache_loc: torch.Tensor | None = None
    attention_out: torch.Tensor | None = None

    @property
    def locs_by_account(self):
        return (self.out_cache_loc,)


def batch_of(num_tokens=NUM_TOKENS):
    tokens = torch.arange(num_tokens)
    return Batch(num_tokens, tokens, tokens, tokens)


def arguments(batch):
    return TokenInputs(batch.input_ids, batch.positions), batch


PLACES = "at [0, 1, 2, 3, 4]"
# A layer's projections and attention, then the rest of it, over all tokens.
ATTENDED = {
    False: [
        ["qkv0 begunx5", f"rotate0 qkv0x5 {PLACES}", "attend0 rotated0x5"],
        ["qkv1 norm1x5", f"rotate1 qkv1x5 {PLACES}", "attend1 rotated1x5"],
    ],
    True: [
        ["qkv0 begunx5", "attend_projected0 qkv0x5"],
        ["qkv1 norm1x5", "attend_projected1 qkv1x5"],
    ],
}
FINISHED = [
    [
        "after_attention o0 attended0x5 streamx5 mlp_norm0",
        "gate_up0 mlp_norm0x5",
        "after_mlp down0 gate_up0x5 streamx5 norm1",
    ],
    [
        "after_attention o1 attended1x5 streamx5 mlp_norm1",
        "gate_up1 mlp_norm1x5",
        "after_mlp down1 gate_up1x5 streamx5 norm",
    ],
]
FINISHED_ROWS = [
    "select streamx5",
    "after_attention o1 attended1x2 streamx2 mlp_norm1",
    "gate_up1 mlp_norm1x2",
    "after_mlp down1 gate_up1x2 streamx2 norm",
]


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_whole_step_launches_layer_after_layer(monkeypatch, is_fused):
    launches = Launches()
    model = fused_llama(monkeypatch, launches, is_fused)
    model(*arguments(batch_of()))
    first, second = ATTENDED[is_fused]
    assert launches.log == ["begin norm0", *first, *FINISHED[0], *second, *FINISHED[1]]


@pytest.mark.parametrize("is_fused", [False, True])
def test_the_last_layer_is_finished_for_the_wanted_rows_only(monkeypatch, is_fused):
    launches = Launches()
    model = fused_llama(monkeypatch, launches, is_fused)
    model.forward_rows(*arguments(batch_of()), ROWS)
    first, second = ATTENDED[is_fused]
    assert launches.log == ["begin norm0", *first, *FINISHED[0], *second, *FINISHED_ROWS]


def test_no_wanted_row_finishes_nothing(monkeypatch):
    launches = Launches()
    model = fused_llama(monkeypatch, launches)
    assert model.forward_rows(*arguments(batch_of()), ROWS[:0]).hidden.shape == (0, HIDDEN)
    assert launches.log[-1] == "attend1 rotated1x5"


@pytest.mark.parametrize(("num_ranks", "selected"), [(1, []), (2, ["select streamx5"])])
def test_a_tapped_layer_leaves_the_stream_of_every_token_as_the_ranks_keep_it(
    monkeypatch, num_ranks, selected
):
    """One rank keeps all of it."""
    launches = Launches()
    model = fused_llama(monkeypatch, launches)
    model.tap_layers([0])
    model._shard = replace(model._shard, tp=SimpleNamespace(size=num_ranks))
    output = model.forward_rows(*arguments(batch_of()), ROWS)
    first, second = ATTENDED[False]
    tapped = [*first, *FINISHED[0], *selected]
    assert launches.log == ["begin norm0", *tapped, *second, *FINISHED_ROWS]
    (tap,) = output.taps
    assert launches._name_of(tap) == "streamx5"


class LoggingCapturer:
    """Keeps what a record launched; a replay is one line, and leaves the record's results."""

    def __init__(self, launches):
        self._launches = launches
        self.graphs = []

    def try_out(self, run):
        return run()

    def record(self, run):
        before, self._launches.log = self._launches.log, []
        out = run()
        graph = len(self.graphs)
        self.graphs.append(self._launches.log)
        self._launches.log = before
        results = [(tensor, tensor.clone()) for tensor in flat(out)]

        def replay():
            self._launches.log.append(f"replay {graph}")
            for tensor, result in results:
                tensor.copy_(result)

        return replay, out


def flat(nested):
    if isinstance(nested, torch.Tensor):
        return [nested]
    return [tensor for one in nested for tensor in flat(one)]


def test_segments_hold_what_lies_between_two_layers_attention(monkeypatch):
    launches = Launches()
    model = fused_llama(monkeypatch, launches)
    capturer = LoggingCapturer(launches)
    graphs = SegmentGraphs(model, capturer, [NUM_TOKENS], torch.float32, CPU, 1)
    assert graphs.capture_next()
    # As captured, every token is padding at position 0 and attention has left nothing yet.
    first = [call.replace(PLACES, "at [0, 0, 0, 0, 0]") for call in ATTENDED[False][0][:-1]]
    second = [call.replace(PLACES, "at [0, 0, 0, 0, 0]") for call in ATTENDED[False][1][:-1]]
    finished = [call.replace("attended0", "nobody") for call in FINISHED[0]]
    assert capturer.graphs == [["begin norm0", *first], [*finished, *second]]
    launches.log.clear()
    with torch.inference_mode():
        graphs.run(batch_of(), ROWS)
    replayed = ["replay 0", "attend0 rotated0x5", "replay 1", "attend1 rotated1x5"]
    assert launches.log == [*replayed, *FINISHED_ROWS]
