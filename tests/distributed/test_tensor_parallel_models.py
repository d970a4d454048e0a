"""Tensor parallelism over gloo, in real processes: ranks agree with each other and with one rank.

All ranks of one size are started once and run every check of that size. They are forked from a
server process that has imported torch and transformers but never run anything.
"""

import multiprocessing
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.fakes.model_rows import ModelRows, torch_native_backend
from tests.fakes.tiny_models import (
    LATENT,
    MIXTURES,
    NATIVE,
    random_prompt,
    save_tiny_model,
)
from tests.fakes.tiny_reference import build_reference, config_of
from workers.config import EngineConfig
from workers.loading.loader import load_model
from workers.parallel.group import SingleRank, TPGroup, connect_tp_group

CPU = torch.device("cpu")
TINY = {**NATIVE, **LATENT, **MIXTURES}
MODELS = ("llama3", "llama_biased", "mistral", "qwen2", "qwen3", "gemma3")
MODELS += ("deepseek_v2_lite", "deepseek_v3", "qwen2_moe", "llama4")
DIVIDED = ("deepseek_v3", "qwen2_moe", "llama4")
"""Two parts of the ranks have experts of their own; else all ranks cut the width of each."""
# By the plans of transformers: windows and caps, experts, layers that differ and share K and V.
PLANNED = ("gemma2", "mixtral", "gemma4")
PRELOADED = ["workers.models.transformers_model"] + [
    f"transformers.models.{name}.modeling_{name}" for name in PLANNED
]
MAX_DIFFERENCE = 1e-5
MAX_DIFFERENCE_BY_PLAN = 1e-4
# Its norms of blocks' outputs pass the rounding of sums on enlarged.
LESS_EXACT = {"gemma3": 5e-5}


def models_for(size: int) -> tuple[str, ...]:
    """Two KV heads: four ranks have to replicate them, which transformers' plans do not."""
    return (*MODELS, *PLANNED) if size == 2 else MODELS


def save_model(name: str, folder: Path) -> None:
    if name == "gemma4":
        class_name = "Gemma4ForCausalLM"
        build_reference(config_of("gemma4_text", class_name, {}), class_name, folder)
    else:
        save_tiny_model(TINY[name], folder)


def run_model(folder: Path, tp: TPGroup, load_format: Any) -> torch.Tensor:
    """Logits of a prompt in two chunks and of eight decoded tokens: float32 (num_tokens, vocab)."""
    config = EngineConfig(
        model=str(folder),
        tp_size=tp.size,
        ep_size=2 if tp.size > 1 and folder.name in DIVIDED else 1,
        load_format=load_format,
        model_impl="transformers" if folder.name in PLANNED else "native",
    )
    loaded = load_model(config, tp, CPU, torch.float32)
    rows, prompt = ModelRows(loaded, torch_native_backend(loaded)), random_prompt(30)
    # Sums over ranks in hooks of transformers' modules stand in no graph's way.
    assert folder.name not in PLANNED or not loaded.model.capture_obstacle(64)
    outputs = [rows.step({0: prompt[:17]})[0], rows.step({0: prompt[17:]})[0]]
    for _ in range(8):
        outputs.append(rows.step({0: [int(outputs[-1][-1].argmax())]})[0])
    return torch.cat(outputs)


def as_it_lies(tensor: torch.Tensor) -> torch.Tensor:
    """As a kernel reads it that knows no strides."""
    return tensor.as_strided(tensor.shape, (tensor.shape[1], 1)).clone()


def check_collectives(tp: TPGroup) -> dict[str, torch.Tensor]:
    mine = torch.tensor([[tp.rank, 10.0], [tp.rank + 0.5, 20.0]])
    shared = torch.full((3,), float(tp.rank))
    tp.broadcast(shared, source_rank=1)
    tp.barrier()
    return {
        "sum": tp.all_reduce(mine.clone()),
        "joined": tp.all_gather_last_dim(mine),
        "joined_strided": tp.all_gather_last_dim(mine.t()),
        "joined_columns": as_it_lies(tp.all_gather_last_dim(mine[:, :1])),
        "shared": shared,
        "min": torch.tensor(tp.all_reduce_min(100 - tp.rank)),
    }


def run_rank(rank: int, size: int, folder: Path) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    meeting_point = f"file://{folder / 'meet'}"
    tp = connect_tp_group("gloo", meeting_point, rank, size, CPU, timeout_s=60.0)
    outputs = {f"collective/{k}": v for k, v in check_collectives(tp).items()}
    for name in models_for(size):
        outputs[name] = run_model(folder / name, tp, "safetensors")
    outputs["dummy"] = run_model(folder / "llama3", tp, "dummy")
    torch.save(outputs, folder / f"rank{rank}.pt")
    tp.close()


@pytest.fixture(scope="module", params=[2, 4], ids=["tp2", "tp4"])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[dict[str, torch.Tensor]]]:
    """The folder and what each rank computed."""
    folder = tmp_path_factory.mktemp(f"tp{request.param}")
    for name in models_for(request.param):
        save_model(name, folder / name)
    multiprocessing.set_forkserver_preload([__name__, *PRELOADED])
    arguments = (request.param, folder)
    mp.start_processes(run_rank, arguments, nprocs=request.param, start_method="forkserver")
    loaded = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(request.param)]
    return folder, loaded


Ranks = tuple[Path, list[dict[str, torch.Tensor]]]


def check_is_that_of_one_rank(ranks: Ranks, name: str, max_difference: float) -> None:
    folder, outputs = ranks
    want = run_model(folder / name, SingleRank(), "safetensors")
    torch.testing.assert_close(outputs[0][name], want, rtol=0, atol=max_difference)
    assert torch.equal(outputs[0][name].argmax(-1), want.argmax(-1))


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_one_rank(ranks: Ranks, name: str) -> None:
    check_is_that_of_one_rank(ranks, name, LESS_EXACT.get(name, MAX_DIFFERENCE))


@pytest.mark.parametrize("ranks", [2], ids=["tp2"], indirect=True)
@pytest.mark.parametrize("name", PLANNED)
def test_logits_by_the_plans_of_transformers_equal_those_of_one_rank(
    ranks: Ranks, name: str
) -> None:
    check_is_that_of_one_rank(ranks, name, MAX_DIFFERENCE_BY_PLAN)


def test_dummy_weights_make_the_same_model_at_every_size(ranks: Ranks) -> None:
    folder, outputs = ranks
    want = run_model(folder / "llama3", SingleRank(), "dummy")
    torch.testing.assert_close(outputs[0]["dummy"], want, rtol=0, atol=MAX_DIFFERENCE)


def test_every_rank_has_the_same_logits_bit_for_bit(ranks: Ranks) -> None:
    _, outputs = ranks
    for name in (*models_for(len(outputs)), "dummy"):
        assert all(torch.equal(output[name], outputs[0][name]) for output in outputs[1:])


def test_collectives_do_what_they_say(ranks: Ranks) -> None:
    _, outputs = ranks
    size = len(outputs)
    parts = [torch.tensor([[r, 10.0], [r + 0.5, 20.0]]) for r in range(size)]
    for output in outputs:
        assert torch.equal(output["collective/sum"], torch.stack(parts).sum(0))
        assert torch.equal(output["collective/joined"], torch.cat(parts, -1))
        assert torch.equal(
            output["collective/joined_strided"], torch.cat([part.t() for part in parts], -1)
        )
        columns = [part[:, :1] for part in parts]
        assert torch.equal(output["collective/joined_columns"], torch.cat(columns, -1))
        assert output["collective/shared"].tolist() == [1.0] * 3
        assert output["collective/min"].item() == 100 - (size - 1)
