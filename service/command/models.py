"""`tessera models FOLDER`: what would run a model, how, and how much memory it takes."""

import sys
from collections.abc import Iterable
from typing import Annotated, Any, get_args

import msgspec
import typer
from rich.console import Console

from workers.config import (
    DType,
    EngineConfig,
    KVCacheDType,
    ModelImpl,
    Quantization,
    QuantizedProducts,
)
from workers.errors import ConfigError, ModelLoadError


def _words(kind: Any) -> str:
    return " | ".join(get_args(kind))


Folder = Annotated[str, typer.Argument(help='A model folder, or "builtin". Weights are optional.')]
Device = Annotated[str, typer.Option(help='"cuda" or "cpu"; it need not be there.')]
GpuMemory = Annotated[
    float | None, typer.Option(min=0.0, help="Also say what fits into a GPU's memory, in GiB.")
]
RequestTokens = Annotated[
    int, typer.Option(min=1, help="Prompt and output of a request, to count how many fit.")
]
Tp = Annotated[int, typer.Option("--tp", min=1, help="Ranks that share the model.")]
Ep = Annotated[int, typer.Option("--ep", min=1, help="Parts of them with experts of their own.")]
MaxContext = Annotated[int | None, typer.Option(min=2, help="Instead of the model's own.")]
KvDtype = Annotated[str, typer.Option(help=_words(KVCacheDType))]
Dtype = Annotated[str, typer.Option(help=_words(DType))]
Impl = Annotated[str, typer.Option(help=_words(ModelImpl))]
Quantise = Annotated[str | None, typer.Option(help=_words(Quantization))]
QuantisedProducts = Annotated[
    str, typer.Option(help=f"{_words(QuantizedProducts)}; the second is what GPUs before sm90 do.")
]
MaxLoras = Annotated[int, typer.Option(min=0, help="Adapters at a time, to count their slots.")]
MaxLoraRank = Annotated[int, typer.Option(min=1, help="Of an adapter.")]
LoraEmbeddings = Annotated[bool, typer.Option(help="Slots for the embedding too.")]
LoraExperts = Annotated[bool, typer.Option(help="Slots for experts too.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object.")]


def models(  # noqa: PLR0913  one parameter a flag
    folder: Folder,
    device: Device = "cuda",
    gpu_memory_gib: GpuMemory = None,
    request_tokens: RequestTokens = 2048,
    tp: Tp = 1,
    ep: Ep = 1,
    max_context_len: MaxContext = None,
    kv_cache_dtype: KvDtype = "auto",
    dtype: Dtype = "auto",
    model_impl: Impl = "auto",
    quantization: Quantise = None,
    quantized_products: QuantisedProducts = "native",
    max_loras: MaxLoras = 0,
    max_lora_rank: MaxLoraRank = 64,
    lora_embeddings: LoraEmbeddings = False,
    lora_experts: LoraExperts = False,
    as_json: AsJson = False,
) -> None:
    """Show what would run a model, how, and what it takes. Reads no weights, needs no GPU.

    Ends with 1 for a model that is refused, or does not fit into --gpu-memory-gib.
    """
    if device not in ("cuda", "cpu"):
        raise typer.BadParameter(f"{device!r} is neither cuda nor cpu")
    settings: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": kv_cache_dtype,
        "model_impl": model_impl,
        "quantized_products": quantized_products,
    }
    settings |= {"quantization": quantization, "max_context_len": max_context_len}
    settings |= {"lora_embeddings": lora_embeddings, "lora_experts": lora_experts}
    settings |= {"max_loras": max_loras, "max_lora_rank": max_lora_rank}
    # Transformers: seconds that the other commands do without.
    from service.command.survey_display import survey_lines
    from workers.survey.survey import survey_model

    try:
        config = _config(model=folder, device=device, tp_size=tp, ep_size=ep, **settings)
        survey = survey_model(config, gpu_memory_gib, request_tokens)
    except (ConfigError, ModelLoadError) as error:
        _refuse(folder, str(error), as_json)
        raise typer.Exit(1) from error
    if as_json:
        sys.stdout.write(msgspec.json.encode(survey).decode() + "\n")
    else:
        _print(survey_lines(survey, tp, ep))
    if survey.memory.why_no_fit:
        raise typer.Exit(1)


def _print(lines: Iterable[str]) -> None:
    console = Console()
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def _config(**settings: Any) -> EngineConfig:
    """Raises typer.BadParameter for a word that an option does not have."""
    try:
        return msgspec.convert(settings, EngineConfig)
    except msgspec.ValidationError as error:
        raise typer.BadParameter(str(error)) from error


def _refuse(folder: str, reason: str, as_json: bool) -> None:
    if as_json:
        refusal = {"model": folder, "runs": "refused", "reason": reason}
        sys.stdout.write(msgspec.json.encode(refusal).decode() + "\n")
    else:
        Console().print(f"refused: {reason}", highlight=False, markup=False, soft_wrap=True)
