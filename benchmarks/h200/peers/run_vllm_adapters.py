"""vLLM 0.20.0 with adapters in every, half and none of a batch's streams: a peer of
benchmarks/h200/adapters.py.

    PYTHONPATH=VLLM_SITE python3 benchmarks/h200/peers/run_vllm_adapters.py CONFIG_JSON \\
        [--streams 64] [--adapters 8] [--rank 32] [--tokens 256] [--repeats 3]

Adapters of random numbers on all projections of a Llama's layers, in PEFT's layout, as many slots
as adapters. tokens_a_second counts the time for all tokens less the time for one each; the first
round warms up. One line of JSON a measurement. Settings are run_vllm.py's.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

# Behind the engine's own packages, so that nothing here stands in for one of them.
sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks.h200.driver import MAX_CONTEXT_LEN, MAX_RUNNING_REQUESTS, MEMORY_FRACTION
from benchmarks.h200.peers.noise import fill_with_noise
from benchmarks.h200.peers.run_vllm import apply_environment

PROMPT_TOKENS = 256
VOCAB_SIZE = 100_000
SHARES: dict[str, int | None] = {"every stream": 1, "half of them": 2, "none": None}
"""By name, every how many streams has an adapter."""


def projections(config: Mapping[str, Any]) -> dict[str, tuple[int, int]]:
    """(in_features, out_features) by module of a layer of config.json."""
    hidden, width = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or hidden // heads
    q_size, kv_size = heads * size, config["num_key_value_heads"] * size
    return {
        "self_attn.q_proj": (hidden, q_size),
        "self_attn.k_proj": (hidden, kv_size),
        "self_attn.v_proj": (hidden, kv_size),
        "self_attn.o_proj": (q_size, hidden),
        "mlp.gate_proj": (hidden, width),
        "mlp.up_proj": (hidden, width),
        "mlp.down_proj": (width, hidden),
    }


def write_adapter(folder: Path, config: Mapping[str, Any], rank: int, seed: int) -> Path:
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    modules, tensors = projections(config), {}
    for layer in range(config["num_hidden_layers"]):
        for module, (num_inputs, num_outputs) in modules.items():
            for part, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
                noise = torch.randn(shape, generator=generator) * 0.01
                name = f"base_model.model.model.layers.{layer}.{module}.lora_{part}.weight"
                tensors[name] = noise.bfloat16()
    stated = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "bias": "none",
        "target_modules": [module.rpartition(".")[2] for module in modules],
    }
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def write_adapters(
    scratch: Path, config: Mapping[str, Any], rank: int, num_adapters: int
) -> list[Path]:
    """By processes that end. A fork of this one would wait for ever for OpenMP's threads, if they
    had begun here: they do not come along."""
    write = partial(write_adapter, config=config, rank=rank)
    with ProcessPoolExecutor(num_adapters, mp_context=get_context("spawn")) as processes:
        names = (scratch / str(n) for n in range(num_adapters))
        written = [processes.submit(write, name, seed=n) for n, name in enumerate(names)]
        return [one.result() for one in written]


def seconds(
    llm: Any, adapters: Sequence[Any], every: int | None, num_streams: int, max_tokens: int
) -> tuple[float, int]:
    """(of one batch, its output tokens)."""
    from vllm import SamplingParams

    rng = random.Random(num_streams)
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
    )
    requests = [
        {"prompt_token_ids": [rng.randrange(10, VOCAB_SIZE) for _ in range(PROMPT_TOKENS)]}
        for _ in range(num_streams)
    ]
    worn = [
        None if every is None or index % every else adapters[index // every % len(adapters)]
        for index in range(num_streams)
    ]
    start_s = time.perf_counter()
    outputs = llm.generate(requests, sampling, lora_request=worn, use_tqdm=False)
    elapsed_s = time.perf_counter() - start_s
    return elapsed_s, sum(len(output.outputs[0].token_ids) for output in outputs)


def tokens_a_second(
    llm: Any, adapters: Sequence[Any], every: int | None, arguments: argparse.Namespace
) -> float:
    first_s, num_first = seconds(llm, adapters, every, arguments.streams, 1)
    all_s, num_all = seconds(llm, adapters, every, arguments.streams, arguments.tokens)
    return (num_all - num_first) / (all_s - first_s)


def main() -> None:
    parser = argparse.ArgumentParser(description="vLLM's adapters beside none")
    parser.add_argument("config", type=Path)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    config = json.loads(arguments.config.read_text())
    apply_environment({})
    from vllm import LLM
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.model_loader import dummy_loader

    # The engine's own process is a fork of this one.
    dummy_loader.initialize_dummy_weights = fill_with_noise
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(json.dumps(config))
        folders = write_adapters(scratch, config, arguments.rank, arguments.adapters)
        adapters = [LoRARequest(str(n), n + 1, str(folder)) for n, folder in enumerate(folders)]
        llm = LLM(
            str(scratch / "model"),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=MAX_CONTEXT_LEN,
            gpu_memory_utilization=MEMORY_FRACTION,
            enable_prefix_caching=False,
            max_num_seqs=MAX_RUNNING_REQUESTS,
            disable_log_stats=True,
            enable_lora=True,
            max_loras=arguments.adapters,
            max_lora_rank=arguments.rank,
        )
        for share, every in SHARES.items():
            rates = [
                tokens_a_second(llm, adapters, every, arguments)
                for _ in range(1 + arguments.repeats)
            ][1:]
            line = {"engine": "vllm", "name": share, "streams": arguments.streams}
            print(json.dumps({**line, "tokens_a_second": rates, "best": max(rates)}), flush=True)


if __name__ == "__main__":
    main()
