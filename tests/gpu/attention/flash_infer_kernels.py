"""What FlashInfer's tests run: `python3 -m tests.gpu.attention.flash_infer_kernels` compiles it.

That takes minutes on all cores, once on a machine; the tests are skipped until it is done.
"""

import logging
import sys
import time
from dataclasses import replace

import torch

from attention import LayerAttentionConfig
from attention.backends.flash_infer import kernel_modules
from attention.backends.flash_infer_latent import latent_modules
from attention.kernels.flash_infer import compile_modules, load_flash_infer
from tests.gpu.attention.device_cases import device_spec
from tests.unit.attention.cases import CaseSpec, build_case, rows_of
from tests.unit.attention.latent_cases import DEEPSEEK, latent_config

PLAIN = LayerAttentionConfig()
LAYERS = {
    "plain": PLAIN,
    "together": LayerAttentionConfig(sliding_window_size=100, logit_cap=1.5),
    "one_key": LayerAttentionConfig(sliding_window_size=1, logit_cap=0.8),
}
"""Of two modules: a window or a cap alone would take another one each."""
HEADS = {
    "llama": {},
    "cuda_cores": {"q_heads": 8, "kv_heads": 4},
    "small": {"q_heads": 8, "kv_heads": 4, "head_dim": 64, "v_head_dim": 64},
    "gemma": {"q_heads": 8, "kv_heads": 4, "head_dim": 256, "v_head_dim": 256},
}
ONE_ROW = rows_of((0, 1))


def modules():
    """Every module that the tests run, each once."""
    kernels = load_flash_infer()
    specs = [device_spec(ONE_ROW, layer=layer) for layer in LAYERS.values()]
    specs += [device_spec(ONE_ROW, **HEADS[name]) for name in ("cuda_cores", "small")]
    specs.append(device_spec(ONE_ROW, layer=LAYERS["together"], **HEADS["gemma"]))
    configs = [build_case(spec).config for spec in specs]
    windowed = build_case(device_spec(ONE_ROW, layer=LAYERS["together"])).config
    configs.append(replace(windowed, kv_dtype=torch.float8_e4m3fn))
    found = [module for config in configs for module in kernel_modules(config, kernels)]
    half = {"dtype": torch.bfloat16, "kv_dtype": torch.bfloat16}
    latents = CaseSpec(ONE_ROW, device=torch.device("cuda"), **half)
    found += latent_modules(latent_config(latents, DEEPSEEK), kernels)
    return list({module.name: module for module in found}.values())


def main():
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    started_s = time.monotonic()
    compile_modules(modules)
    print(f"{len(modules())} modules are compiled, {time.monotonic() - started_s:.0f} s")


if __name__ == "__main__":
    main()
