"""What a model has as it would run, with what settings would have another code run it."""

from collections.abc import Mapping

from workers.config import ModelImpl
from workers.models.features import ModelCapability, ModelFeature

_UNFUSED = "on GPUs models of fused layers take adapters, and as it is served it has none"
# max_loras alone does not choose the native class.
_LORA_NATIVELY = (
    "transformers' code takes no adapters; the native class does, with --model-impl native"
)
_QUANTISED_NATIVELY = (
    "transformers' code reads no formats; the native class does, with --model-impl native"
)


def shown_features(
    capability: ModelCapability,
    natively: ModelCapability | None,
    model_impl: ModelImpl,
    is_unfused_on_gpu: bool,
) -> dict[str, str]:
    """ModelFeature -> why not, "" where it has it. capability: of the code that runs the model.
    natively: of a native class that could, None where there is none. is_unfused_on_gpu: whether
    that one would run on a GPU without fused layers."""
    shown = {one.value: capability.why_not.get(one, "") for one in ModelFeature}
    if natively is None:
        return shown
    lora = natively.why_not.get(ModelFeature.LORA, "")
    if not lora and is_unfused_on_gpu:
        lora = _UNFUSED
    if capability == natively:
        return shown | {ModelFeature.LORA.value: lora}
    return shown | {
        ModelFeature.LORA.value: lora or _LORA_NATIVELY,
        ModelFeature.QUANTISED.value: _quantised(natively.why_not, model_impl),
    }


def _quantised(natively: Mapping[ModelFeature, str], model_impl: ModelImpl) -> str:
    """Of what transformers' code runs unquantised. auto takes the native class for formats."""
    reason = natively.get(ModelFeature.QUANTISED, "")
    return reason or ("" if model_impl == "auto" else _QUANTISED_NATIVELY)
