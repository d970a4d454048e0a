"""Bodies of the calls that load and unload adapters, as vLLM has them."""

from typing import Annotated

from pydantic import Field

from service.api.openai.parameters import StrictModel

_Text = Annotated[str, Field(min_length=1, max_length=4096)]


class LoadAdapterBody(StrictModel):
    """As vLLM takes it. lora_path: a PEFT folder that every node sees. model: whose adapter it is,
    where several models are served. load_inplace: it may take the place of one of its name."""

    lora_name: _Text
    lora_path: _Text
    model: str = ""
    load_inplace: bool = False


class UnloadAdapterBody(StrictModel):
    """As vLLM takes it. model: where several models have an adapter of that name."""

    lora_name: _Text
    lora_int_id: int | None = None
    model: str = ""
