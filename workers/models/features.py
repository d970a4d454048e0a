"""What models can be asked for, by the code that runs them, and why not what they cannot.

docs/models.md, where tests prove every yes, and `tessera models` are made of this.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from workers.models.registry import NATIVE_ARCHITECTURES, NativeFamily, no_member


class ModelFeature(Enum):
    """In the order of the table's columns. The value is what tests' proofs call it."""

    CPU = "runs on CPU"
    QUANTISED = "quantised weights"
    TENSOR_PARALLEL = "tensor parallelism"
    EXPERT_PARALLEL = "expert parallelism"
    SPECULATION = "drafts by lookup"
    LORA = "LoRA"
    GPU = "runs on a GPU"
    GRAPHS = "decode graphs"
    TENSOR_PARALLEL_GPU = "tensor parallelism on GPUs"
    EXPERT_PARALLEL_GPU = "expert parallelism on GPUs"

    @property
    def is_proved_on_gpu(self) -> bool:
        """Whether only a run on hardware shows it."""
        return self in _ON_GPU


_ON_GPU = {
    ModelFeature.GPU,
    ModelFeature.GRAPHS,
    ModelFeature.TENSOR_PARALLEL_GPU,
    ModelFeature.EXPERT_PARALLEL_GPU,
}


@dataclass(frozen=True, slots=True)
class ModelCapability:
    """subject: an architecture, or a kind of models that transformers' code runs. code: whose runs
    it. why_not: a sentence for everything that it has not."""

    subject: str
    code: str
    why_not: Mapping[ModelFeature, str]

    @property
    def features(self) -> frozenset[ModelFeature]:
        return frozenset(set(ModelFeature) - set(self.why_not))


_NO_LORA = {ModelFeature.LORA: "of natively run models the Llama family and Gemma take adapters"}
_NO_EXPERTS = "its layers are no mixtures of experts"
_WINDOWS_AND_DRAFTS = "layers with windows or chunks take no drafts yet"
_STATES_AND_DRAFTS = "a recurrent state cannot forget a wrong draft"
_WHOLE_EXPERTS = "transformers' plans cut experts by their width"
_ONE_RANK = "it runs on one rank"


def _experts(reason: str) -> dict[ModelFeature, str]:
    return dict.fromkeys((ModelFeature.EXPERT_PARALLEL, ModelFeature.EXPERT_PARALLEL_GPU), reason)


def _ranks(reason: str) -> dict[ModelFeature, str]:
    return _experts(reason) | dict.fromkeys(
        (ModelFeature.TENSOR_PARALLEL, ModelFeature.TENSOR_PARALLEL_GPU), reason
    )


_BY_BRIDGE: dict[ModelFeature, str] = {
    **_NO_LORA,
    ModelFeature.QUANTISED: "weights in formats are read by native models only",
    **_experts(_WHOLE_EXPERTS),
}
_ROW_BY_ROW: dict[ModelFeature, str] = {
    **_BY_BRIDGE,
    ModelFeature.GRAPHS: "the host decides which rows share a call",
}
_STATEFUL: dict[ModelFeature, str] = {
    **_BY_BRIDGE,
    ModelFeature.SPECULATION: _STATES_AND_DRAFTS,
}
_SEQ2SEQ: dict[ModelFeature, str] = {
    **_BY_BRIDGE,
    **_ranks(_ONE_RANK),
    ModelFeature.GRAPHS: "an encoder's tokens are attended to by plain torch",
    ModelFeature.SPECULATION: "no test has shown it",
}
_ENCODER: dict[ModelFeature, str] = {
    **_BY_BRIDGE,
    **_ranks(_ONE_RANK),
    ModelFeature.GRAPHS: "it generates nothing",
    ModelFeature.SPECULATION: "it generates nothing",
}

FLAT = ModelCapability("decoders", "transformers", _BY_BRIDGE)
ROW_BY_ROW = ModelCapability("decoders, row by row", "transformers", _ROW_BY_ROW)
STATEFUL = ModelCapability("decoders with states", "transformers", _STATEFUL)
SEQ2SEQ = ModelCapability("encoder-decoders", "transformers", _SEQ2SEQ)
ENCODER = ModelCapability("encoders alone", "transformers", _ENCODER)
BRIDGED = (FLAT, ROW_BY_ROW, STATEFUL, SEQ2SEQ, ENCODER)


TEXT_OF: dict[str, str] = {
    "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
    "Llama4ForConditionalGeneration": "Llama4ForCausalLM",
}
"""Models for images and text, of which the text is served by another one's class."""

_OF_ARCHITECTURE: dict[str, dict[ModelFeature, str]] = {
    "Llama4ForCausalLM": {
        ModelFeature.QUANTISED: "of stacked experts only gpt-oss's are read in a format"
    },
}


def native_capability(architecture: str) -> ModelCapability:
    """Of one of NATIVE_ARCHITECTURES; subject is that of its text."""
    family = NATIVE_ARCHITECTURES[architecture]
    subject = TEXT_OF.get(architecture, architecture)
    is_asked_for = family.is_measured is no_member
    code = "native; on one GPU with `model_impl: native`" if is_asked_for else "native"
    why_not = _native_obstacles(family) | _OF_ARCHITECTURE.get(subject, {})
    return ModelCapability(subject, code, why_not)


def _native_obstacles(family: NativeFamily) -> dict[ModelFeature, str]:
    why_not = {} if family.takes_adapters else dict(_NO_LORA)
    if not family.has_experts:
        why_not |= _experts(_NO_EXPERTS)
    if family.has_windows:
        why_not[ModelFeature.SPECULATION] = _WINDOWS_AND_DRAFTS
    if family.has_states:
        why_not[ModelFeature.SPECULATION] = _STATES_AND_DRAFTS
    return why_not


def all_capabilities() -> tuple[ModelCapability, ...]:
    """Native architectures in the order of the registry, then what transformers' code runs."""
    of_text = (name for name in NATIVE_ARCHITECTURES if name not in TEXT_OF)
    return (*map(native_capability, of_text), *BRIDGED)
