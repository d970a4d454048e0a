"""What the fuzz takes for a machine without CPU to spare: these errors of ours and no others."""

from pathlib import Path

import pytest

from service.errors import ApiErrorCode
from service.tokenizer import pool as pool_module
from service.tokenizer.jobs import EncodeText
from service.tokenizer.pool import TokenizerPool, TokenizerPoolConfig
from tests.integration.fuzz.busy_machine import is_busy

TIMEOUT_S = 5.0


def too_long(cpu_s):
    pool = TokenizerPool(TokenizerPoolConfig(Path("/absent"), timeout_s=TIMEOUT_S))
    return pool._took_too_long(EncodeText("a"), cpu_s)


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (too_long(0.1 * TIMEOUT_S - 0.1), True),
        (too_long(0.1 * TIMEOUT_S + 0.1), False),
        (pool_module._worker_failed(), False),
    ],
)
def test_it_is_told_from_a_fault_by_what_it_says(error, is_told) -> None:
    assert is_busy(error.code.value, error.message) is is_told


def test_another_code_with_its_words_is_a_fault() -> None:
    message = too_long(0.0).message
    assert not is_busy(ApiErrorCode.INTERNAL.value, message)
