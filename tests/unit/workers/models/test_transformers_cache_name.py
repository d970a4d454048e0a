"""A model's cache has had three names."""

from typing import Any

import pytest
import transformers

from workers.models.transformers_cache_name import cache_name


def before(input_ids: Any, past_key_values: Any = None, cache_position: Any = None) -> None: ...
def of_states(input_ids: Any, cache_params: Any = None) -> None: ...
def since(input_ids: Any, cache: Any = None) -> None: ...
def without(input_ids: Any, use_cache: bool = False, **kwargs: Any) -> None: ...


@pytest.mark.parametrize(
    ("forward", "name"),
    [(before, "past_key_values"), (of_states, "cache_params"), (since, "cache"), (without, None)],
)
def test_the_name_is_that_of_the_parameter(forward: Any, name: str | None) -> None:
    assert cache_name(forward) == name


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MambaForCausalLM", "BartForCausalLM"])
def test_the_transformers_that_is_installed_has_one_of_them(name: str) -> None:
    assert cache_name(getattr(transformers, name).forward) is not None
