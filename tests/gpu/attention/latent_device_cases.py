"""Steps over latents on the device, with DeepSeek's sizes, and their graphs."""

from __future__ import annotations

from dataclasses import replace

import torch

from attention.backends.base import GraphAttentionBackend
from tests.gpu.attention.device_cases import DECODE, EXTEND, FRESH, MIXED
from tests.unit.attention.cases import CaseSpec, RowSpec, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, LatentCase, LatentDims, build_latent_case

# Where DeepSeek's heads attend over K and V of heads, in pieces of the prefixes.
AFTER_PREFIXES = rows_of((900, 1), (7, 1), (650, 500), (0, 200), (33, 160), (64, 64))
STEPS = {
    "decode": DECODE,
    "extend": EXTEND,
    "mixed": MIXED,
    "fresh": FRESH,
    "prefixes": AFTER_PREFIXES,
}

# What is stale in memory. Finite, as a kernel that loads a page's unused tail multiplies it by 0.
POISON = 1e4


def latent_device_case(
    rows: tuple[RowSpec, ...], dims: LatentDims = DEEPSEEK, **changes: object
) -> LatentCase:
    spec = CaseSpec(
        rows, dtype=torch.bfloat16, kv_dtype=torch.bfloat16, device=torch.device("cuda"), **changes
    )
    case = build_latent_case(spec, dims)
    case.pool.get_latent(0).nan_to_num_(nan=POISON)
    return case


def run(case: LatentCase, backend_class: type[GraphAttentionBackend]) -> torch.Tensor:
    return case.run(backend_class(case.config, case.table, case.pool))


def eager_and_replayed(
    case: LatentCase, backend_class: type[GraphAttentionBackend]
) -> tuple[torch.Tensor, torch.Tensor]:
    """A decode step as it is launched, and from a graph of its own."""
    backend = backend_class(case.config, case.table, case.pool)
    eager = case.run(backend)
    backend.init_cuda_graph_state(len(DECODE) + 7)
    batch, tokens = replace(case.batch, attn_backend=backend), case.tokens()

    def step():
        backend.record_step_tables(batch)
        return case.layer(tokens, case.up, batch)

    backend.init_forward_metadata_capture_cuda_graph(batch)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.inference_mode(), torch.cuda.stream(stream):
        step()
        graph.capture_begin()
        out = step()
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    with torch.inference_mode():
        out.fill_(torch.nan)
    graph.replay()
    replayed = out.view_as(eager).clone()
    torch.cuda.synchronize()
    return eager, replayed
