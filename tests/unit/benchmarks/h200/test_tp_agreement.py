"""Texts of several GPUs beside those of one: what is compared, and what counts as agreement."""

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.h200.text_comparison import FirstDifference, Verdict
from benchmarks.h200.tp_agreement import agrees, check_same_task
from benchmarks.h200.tp_texts import EngineTexts, prompts_for

ROOT = Path(__file__).resolve().parents[4]
ALONE = EngineTexts("folder", "bfloat16", 1, True, [[1, 2], [3]], [[4], [5]])
DIFFERENCE = FirstDifference(0, 0, 4, 9)
TIE = Verdict(DIFFERENCE, 5.0, 5.1, 5.1, bound=0.2)
NO_TIE = Verdict(DIFFERENCE, 5.0, 6.0, 6.0, bound=0.2)


def run_vllm() -> ModuleType:
    """A peer's driver is a script beside no package."""
    path = ROOT / "benchmarks" / "h200" / "peers" / "run_vllm.py"
    spec = importlib.util.spec_from_file_location("run_vllm", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_texts_are_read_as_they_were_written(tmp_path: Path) -> None:
    ALONE.write(tmp_path / "one.json")
    assert EngineTexts.read(tmp_path / "one.json") == ALONE


@pytest.mark.parametrize(
    "other", [{"model": "another"}, {"dtype": "float32"}, {"prompts": [[1, 2], [7]]}]
)
def test_engines_that_were_not_asked_the_same_are_not_compared(other: dict[str, object]) -> None:
    check_same_task(ALONE, replace(ALONE, tp_size=2))
    with pytest.raises(ValueError, match="TP 2"):
        check_same_task(ALONE, replace(ALONE, tp_size=2, **other))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "equal", "verdicts", "expected"),
    [
        ("float32", 1.0, [], True),
        # However little is missing, and whatever anybody thinks of it.
        ("float32", 0.99, [TIE], False),
        ("bfloat16", 0.7, [TIE], True),
        ("bfloat16", 0.99, [TIE, NO_TIE], False),
        ("bfloat16", 0.5, [TIE], False),
    ],
)
def test_float32_has_to_be_equal_and_bf16_may_part_at_near_ties_alone(
    dtype: str, equal: float, verdicts: list[Verdict], expected: bool
) -> None:
    assert agrees(equal, verdicts, dtype, min_equal=0.6) is expected


def test_random_prompts_are_the_same_for_every_engine_and_of_the_models_tokens(
    tmp_path: Path,
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 40}), encoding="utf-8")
    prompts = prompts_for(str(tmp_path), 6)
    assert len(prompts) == 6
    assert prompts == prompts_for(str(tmp_path), 6)
    assert {token for prompt in prompts for token in prompt} <= set(range(40))


def test_vllm_keeps_its_defaults_on_one_gpu_and_takes_no_multicast_on_several() -> None:
    driver = run_vllm()
    assert driver.rank_settings(1, 1) == ({}, {})
    environment, arguments = driver.rank_settings(2, 1)
    assert environment["NCCL_NVLS_ENABLE"] == "0"
    assert environment["VLLM_ALLREDUCE_USE_SYMM_MEM"] == "0"
    assert not any(arguments["compilation_config"]["pass_config"].values())
    assert "disable_custom_all_reduce" not in arguments
