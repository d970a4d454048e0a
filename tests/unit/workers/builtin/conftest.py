"""The shipped folders, opened once, with Hugging Face's own loaders: no engine of ours."""

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from workers.builtin import builtin_draft_path, builtin_model_path


@pytest.fixture(scope="package")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(builtin_model_path())


@pytest.fixture(scope="package")
def target() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin_model_path(), dtype=torch.float32).eval()


@pytest.fixture(scope="package")
def draft() -> Any:
    return AutoModelForCausalLM.from_pretrained(builtin_draft_path(), dtype=torch.float32).eval()
