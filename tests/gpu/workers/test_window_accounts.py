"""Windows in memory of their own on a GPU: transformers' text, and no page that was given back is
seen by a kernel that loads whole blocks of keys."""

import numpy as np
import pytest
import torch

from tests.fakes.tiny_models import TinyModel, eager_reference, random_prompt, save_tiny_model
from tests.gpu.engines import CUDA, GREEDY, NUM_TOKENS
from tests.gpu.needs import NEEDS_FA3, NEEDS_GPU
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason
from workers.parallel.group import SingleRank
from workers.runner.factory import make_model_runner

pytestmark = [*NEEDS_GPU, NEEDS_FA3]

WINDOW = 40
NEAR_TIE = 0.2
MAX_SHARE = 0.03
"""Of tokens beyond a near tie, whose gap is measured in standard deviations of the logits. On a
CPU bfloat16 leaves 0.013 at most; a window of four more tokens 0.096 at least."""
BAD_TOKEN = 2  # no prompt has it
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}
_SHARED = {
    **_HEADS,
    "sliding_window": WINDOW,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,  # with more, bfloat16 alone makes another text
}
_SEES = {"s": "sliding_attention", "f": "full_attention"}


def layers(kinds):
    return {"num_hidden_layers": len(kinds), "layer_types": [_SEES[kind] for kind in kinds]}


MODELS = {
    # Every token goes to every expert: which one it gets is no matter of a rounding.
    "gpt_oss": TinyModel(
        "gpt_oss",
        {**_SHARED, **layers("sfsf"), "num_local_experts": 4, "num_experts_per_tok": 4},
    ),
    # Native, over fused kernels, as the last two.
    "gemma2": TinyModel("gemma2", {**_SHARED, **layers("sfsf"), "query_pre_attn_scalar": 64}),
    # What comes last sees a window: its states do not vouch for all tokens.
    "gemma3": TinyModel("gemma3_text", {**_SHARED, **layers("ssfs"), "query_pre_attn_scalar": 64}),
    # Chunks of 128 positions, by a backend of their own beside the one of the last layer.
    "llama4": TinyModel(
        "llama4_text",
        {
            **_SHARED,
            "num_hidden_layers": 4,
            "attention_chunk_size": 128,
            "num_local_experts": 2,
            "intermediate_size_mlp": 96,
        },
    ),
    # All layers see a window, or the last ones do.
    "mistral": TinyModel("mistral", _SHARED),
    "qwen3": TinyModel("qwen3", {**_SHARED, "use_sliding_window": True, "max_window_layers": 1}),
}
LONG = random_prompt(230, seed=100)
PROMPTS = [random_prompt(5 + 29 * i, seed=i) for i in range(9)]
PROMPTS += [LONG, LONG[:150] + random_prompt(60, seed=101), LONG[:70] + random_prompt(9, seed=102)]


@pytest.fixture(scope="module", params=MODELS)
def folder(request, tmp_path_factory):
    return save_tiny_model(MODELS[request.param], tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def reference(folder):
    return eager_reference(folder).eval().to(CUDA)


def build(folder, **changes):
    """(engine, its runner), with a pool of num_tokens tokens."""
    settings = {"page_size": 16, "max_step_tokens": 128, "max_running_requests": 16, **changes}
    if "llama4" in folder.name and settings.get("attention_backend") == "fa3":
        settings["attention_backend"] = "fa3_chunks"
    num_pages = settings.pop("num_tokens", 16384) // settings["page_size"]
    config = EngineConfig(model=str(folder), dtype="bfloat16", num_pages=num_pages, **settings)
    runner = make_model_runner(config, SingleRank(), CUDA, lambda done, total: None)
    engine = Engine.of_runner(config, runner)
    own, windows = runner.pages_by_account
    assert windows < own or "num_tokens" in changes
    return engine, runner


def generate(engine, rounds=2):
    """The second time most steps decode in graphs, and prompts find prefixes."""
    for _ in range(rounds):
        results = engine.generate(PROMPTS, GREEDY)
        engine.check_integrity()
        assert {one.finish_reason for one in results} == {FinishReason.LENGTH}
    return [one.token_ids for one in results], [one.num_cached_tokens for one in results]


def gaps(reference, outputs):
    """How far below its likeliest token's logit transformers, in float32, puts each token, in
    standard deviations of the logits."""
    found = []
    for prompt, tokens in zip(PROMPTS, outputs, strict=True):
        text = torch.tensor([prompt + tokens], device=CUDA)
        with torch.inference_mode():
            logits = reference(text).logits[0, len(prompt) - 1 : -1].float()
        chosen = logits.gather(1, text[0, len(prompt) :, None]).squeeze(1)
        found.append((logits.max(dim=-1).values - chosen) / logits.std(dim=-1))
    return torch.cat(found)


def check_text(reference, outputs):
    assert all(len(tokens) == NUM_TOKENS for tokens in outputs)
    assert (gaps(reference, outputs) > NEAR_TIE).float().mean() < MAX_SHARE


@pytest.mark.parametrize(
    ("page_size", "backend"),
    [(1, None), (16, None), (128, None), (64, "fa3"), (16, "torch_native")],
)
def test_text_is_transformers_own_but_for_near_ties(page_size, backend, folder, reference) -> None:
    """Together, in chunks, with prefix hits, decoding in graphs where the backend has them."""
    engine, runner = build(folder, page_size=page_size, attention_backend=backend)
    try:
        outputs, num_cached = generate(engine)
        graphs = runner._graphs
        assert (graphs is None) is (backend == "torch_native")
        assert graphs is None or graphs.captured_sizes
    finally:
        engine.close()
    check_text(reference, outputs)
    assert max(num_cached) >= 128 if page_size < 128 else True


def test_text_does_not_depend_on_retraction(folder, reference) -> None:
    engine, _ = build(folder, num_tokens=640)
    try:
        outputs, _ = generate(engine)
        assert engine.stats().num_preemptions
    finally:
        engine.close()
    check_text(reference, outputs)


class PoisonedStock:
    """What is free when a step is planned holds NaN when it runs; whoever gets it finds zeros, as
    of a stock whose pages hold numbers."""

    def __init__(self, engine, runner):
        self._allocators = engine._scheduler._pool._allocators
        pool = runner._backend.token_to_kv_pool
        self._pools = [list(pool._pools_of(account)) for account in range(len(self._allocators))]
        self._poisoned = [set() for _ in self._allocators]
        self._schedule, engine._scheduler.schedule = engine._scheduler.schedule, self._note
        self._launch, engine._executor._launch = engine._executor._launch, self._poison
        self._free = {}
        self.num_returned = 0

    def _note(self):
        plan = self._schedule()
        if plan is not None:
            self._free[plan.step_id] = [set(one.free_pages().tolist()) for one in self._allocators]
        return plan

    def _poison(self, plan):
        for account, free in enumerate(self._free.pop(plan.step_id)):
            before = self._poisoned[account]
            self._fill(account, before - free, 0.0)
            self._fill(account, free - before, torch.nan)
            # What the first step leaves was never anybody's.
            self.num_returned += len(free - before) if before else 0
            self._poisoned[account] = free
        return self._launch(plan)

    def _fill(self, account, pages, value):
        indices = torch.tensor(sorted(pages), dtype=torch.int64, device=CUDA)
        for pool in self._pools[account]:
            for layer_id in range(pool.num_layers):
                for buffer in pool.get_kv_buffer(layer_id):
                    buffer[indices] = value


@pytest.mark.parametrize(
    ("page_size", "backend"), [(1, None), (16, None), (128, None), (64, "fa3")]
)
def test_no_output_depends_on_a_page_that_was_given_back(
    page_size, backend, folder, reference
) -> None:
    engine, runner = build(folder, page_size=page_size, attention_backend=backend)
    stock = PoisonedStock(engine, runner)
    try:
        outputs, _ = generate(engine)
    finally:
        engine.close()
    check_text(reference, outputs)
    assert stock.num_returned > 0, "no page came back"


@pytest.mark.parametrize(("page_size", "backend"), [(16, None), (128, "fa3")])
def test_a_request_of_no_numbers_spoils_nobody(page_size, backend, folder, reference) -> None:
    """It takes pages that others have let go of while they decode, and theirs come from its own."""
    engine, runner = build(
        folder, page_size=page_size, attention_backend=backend, num_tokens=2048 + page_size
    )
    weight_of(runner, "embed_tokens").data[BAD_TOKEN] = torch.nan
    weight_of(runner, "lm_head").data[BAD_TOKEN] = 0.0  # nobody comes to say it
    bad = [BAD_TOKEN, *random_prompt(200, seed=7)]
    try:
        results = engine.generate(_woven(bad), GREEDY)
        engine.check_integrity()
        again = engine.generate(PROMPTS, GREEDY)
    finally:
        engine.close()
    good = [one for one in results if one.finish_reason is not FinishReason.ERROR]
    assert [one.finish_reason for one in again] == [FinishReason.LENGTH] * len(PROMPTS)
    assert len(good) == len(PROMPTS)
    check_text(reference, [one.token_ids for one in again])
    check_text(reference, [one.token_ids for one in good])


def weight_of(runner, part):
    return next(tensor for name, tensor in runner._model.named_parameters() if part in name)


def _woven(bad):
    """Every prompt, and behind each one that begins with BAD_TOKEN."""
    return [prompt for one in PROMPTS for prompt in (one, [*bad, 3 + len(one) % 100])]


def test_windows_hold_their_own_bytes(folder) -> None:
    """Of four requests and two steps' prompts, however long a text may become."""
    engine, runner = build(folder, page_size=16, max_running_requests=4, num_tokens=8192)
    pool = runner._backend.token_to_kv_pool
    try:
        own, windows = runner.pages_by_account
        (retention,) = runner._retentions
        assert windows <= 4 * (2 * (retention.num_tokens // 16 + 2) + 1) + 2 * 128 // 16 + 1
        assert own == 513
        by_account = [sum(one.num_bytes for one in pool._pools_of(account)) for account in (0, 1)]
        tokens = [own * 16, windows * 16]
        sizes = [runner._backend.config.kv_bytes_of_account(account) for account in (0, 1)]
        assert by_account == [int(n) for n in np.multiply(tokens, sizes)]
    finally:
        engine.close()
