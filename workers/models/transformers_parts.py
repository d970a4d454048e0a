"""Where within a model of transformers its language model is, and that one's body."""

from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from workers.errors import ModelLoadError
from workers.loading.model_folder import text_config_of
from workers.models.transformers_head import GivenHiddenStates

_BY_NAME = Parameter.POSITIONAL_OR_KEYWORD


@dataclass(frozen=True, slots=True)
class BodyAndHead:
    """A causal language model taken apart. head: the model, where a GivenHiddenStates stands for
    its body."""

    body: nn.Module
    head: PreTrainedModel

    @classmethod
    def of(cls, model: PreTrainedModel) -> "BodyAndHead":
        """Takes the model over: it can no longer run as a whole."""
        head, name = language_model_of(model)
        body = getattr(head, name)
        setattr(head, name, GivenHiddenStates(body))
        return cls(body, head)


def language_model_of(model: PreTrainedModel) -> tuple[PreTrainedModel, str]:
    """The causal language model, and the attribute of it that holds its body.

    That is mostly the model itself. Some wrappers hold a whole language model, head and all; some
    models keep their body under another name than their class says.
    Raises ModelLoadError where no part is the only one of its text config's class, or the wrapper
    of a whole language model takes no text alone.
    """
    if model.base_model is not model:
        return model, model.base_model_prefix
    config_class = type(text_config_of(model.config))
    parts: dict[str, Any] = {
        name: part for name, part in model.named_children() if _is_of_config(part, config_class)
    }
    if len(parts) != 1:
        raise ModelLoadError(f"{type(model).__name__} has no body apart from its head")
    ((name, part),) = parts.items()
    if part.get_output_embeddings() is None:
        return model, name
    _check_takes_text_alone(model)
    return language_model_of(part)


def _is_of_config(part: nn.Module, config_class: Any) -> bool:
    return isinstance(part, PreTrainedModel) and type(part.config) is config_class


def _check_takes_text_alone(model: PreTrainedModel) -> None:
    parameters = signature(model.forward).parameters.values()
    needed = [one.name for one in parameters if one.default is one.empty and one.kind is _BY_NAME]
    needed = [name for name in needed if name != "input_ids"]
    if needed:
        raise ModelLoadError(f"{type(model).__name__} takes no text without {', '.join(needed)}")
