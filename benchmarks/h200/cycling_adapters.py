"""More adapters by turns than there are slots: no request is lost, and how many tokens/s are left.

    python3 -m benchmarks.h200.cycling_adapters CONFIG_JSON [--adapters 200] [--slots 16]

Random weights of the config's shapes and adapters of random numbers on the attention's projections
(54 MB each of Llama-3.1-8B), written to a folder of their own: 11 GB of 200, in the host's memory
again when they have been read. All requests are submitted at once, neighbours with other adapters,
every adapter's as far apart as they can be. The first round reads the files, the second one finds
them in the host's memory. One line of JSON a round; exit status 1 where a request has not got all
of its tokens.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.h200.adapters import build
from workers.adapters.folder import adapter_at
from workers.adapters.ref import AdapterInfo, AdapterRef
from workers.engine.engine import Engine
from workers.engine.protocol import FinishReason
from workers.sampling.params import SamplingParams

ATTENTION = (".q_proj", ".k_proj", ".v_proj", ".o_proj")
PROMPT_TOKENS = 256
VOCAB_SIZE = 100_000
NOISE_STEP = 64
"""Numbers between the beginnings of two adapters in the noise that all are cut from."""
NUM_WRITERS = 8


@dataclass(frozen=True, slots=True)
class Round:
    """num_whole: requests that got all their tokens, of num_requests."""

    num_requests: int
    num_whole: int
    tokens_a_second: float


def write_adapters(
    scratch: Path, info: AdapterInfo, rank: int, number: int, ends: Sequence[str] = ATTENTION
) -> list[AdapterRef]:
    """Of modules whose names have these ends. Raises ValueError where there are none."""
    modules = {name: sizes for name, sizes in info.modules.items() if name.endswith(tuple(ends))}
    if not modules:
        raise ValueError(f"no module's name ends with one of {', '.join(ends)}")
    size = rank * max(max(sizes) for sizes in modules.values())
    noise = torch.randn(size + number * NOISE_STEP, generator=torch.Generator().manual_seed(0))
    noise = (noise * 0.01).bfloat16()

    def write(index: int) -> AdapterRef:
        folder = scratch / str(index)
        _write(folder, modules, rank, noise[index * NOISE_STEP :])
        return adapter_at(str(index), folder, info)

    with ThreadPoolExecutor(NUM_WRITERS) as pool:
        return list(pool.map(write, range(number)))


def _write(
    folder: Path, modules: Mapping[str, tuple[int, int]], rank: int, noise: torch.Tensor
) -> None:
    folder.mkdir()
    tensors = {}
    for module, (num_inputs, num_outputs) in modules.items():
        for part, shape in (("A", (rank, num_inputs)), ("B", (num_outputs, rank))):
            # A copy: files have no tensors that share their memory.
            matrix = noise[: shape[0] * shape[1]].view(shape).clone()
            tensors[f"base_model.model.{module}.lora_{part}.weight"] = matrix
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")


def run_round(
    engine: Engine,
    adapters: Sequence[AdapterRef],
    num_requests: int,
    num_tokens: int,
    vocab_size: int = VOCAB_SIZE,
) -> Round:
    """Requests of num_tokens output tokens, with the adapters by turns."""
    rng = random.Random(0)
    prompts = [
        [rng.randrange(10, vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(num_requests)
    ]
    sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
    worn = [adapters[index % len(adapters)] for index in range(num_requests)]
    start_s = time.perf_counter()
    results = engine.generate(prompts, sampling, adapters=worn)
    elapsed_s = time.perf_counter() - start_s
    whole = [
        result
        for result in results
        if result.finish_reason is FinishReason.LENGTH and len(result.token_ids) == num_tokens
    ]
    return Round(num_requests, len(whole), round(len(whole) * num_tokens / elapsed_s, 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--adapters", type=int, default=200)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=64)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        (scratch / "model").mkdir()
        (scratch / "model" / "config.json").write_text(arguments.config.read_text())
        engine = build(str(scratch / "model"), arguments.slots, arguments.rank)
        try:
            info = engine.info.adapters
            assert info is not None
            adapters = write_adapters(scratch, info, arguments.rank, arguments.adapters)
            rounds = []
            for title in ("files", "host memory"):
                rounds.append(run_round(engine, adapters, arguments.requests, arguments.tokens))
                line = {"adapters": arguments.adapters, "slots": arguments.slots, "from": title}
                print(json.dumps({**line, **asdict(rounds[-1])}), flush=True)
            engine.check_integrity()
        finally:
            engine.close()
    return 0 if all(one.num_whole == one.num_requests for one in rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
