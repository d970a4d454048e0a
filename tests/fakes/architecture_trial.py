"""One architecture: built tiny and random, served by the engine, compared with transformers.

The sweep over all of them runs each trial in a process of its own, which may end in any way.
"""

import logging
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from tests.fakes.tiny_configs import MAX_POSITIONS
from tests.fakes.tiny_reference import (
    BANNED_TOKENS,
    NotBuiltError,
    build_reference,
    config_of,
    greedy_tokens,
    in_one_line,
    random_prompt,
    reference_logits,
)
from workers.config import EngineConfig
from workers.engine.engine import Engine
from workers.engine.results import GenerateResult
from workers.errors import ConfigError, ModelLoadError
from workers.loading.model_folder import read_hf_config, resolve_max_context_len
from workers.sampling.params import SamplingParams

MAX_LOGPROB_ERROR = 2e-3
ROW_BY_ROW_LOGGER = logging.getLogger("workers.models.transformers_row_model")
PROMPT_LENGTHS = (3, 24, 41)
NUM_OUTPUT_TOKENS = 24


class Verdict(StrEnum):
    """What became of an architecture."""

    SERVED = "served"
    REFUSED = "refused"
    NOT_BUILT = "not built"
    DIFFERENT = "different"
    CRASHED = "crashed"


@dataclass(frozen=True, slots=True)
class Outcome:
    """verdict, and why: a message in one line, or how far log probabilities are apart."""

    verdict: Verdict
    reason: str


def architectures() -> list[tuple[str, str]]:
    """(model_type, class) of all causal and all image-text models, each once, in order."""
    causal = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    image_text = modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return sorted({*causal.items(), *image_text.items()})


def run_trial(
    model_type: str, class_name: str, changes: Mapping[str, Any] | None = None
) -> Outcome:
    """Build, save, serve, compare. changes: to the tiny config, of its own fields."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            config = config_of(model_type, class_name, changes or {})
        except NotBuiltError as error:
            return Outcome(Verdict.NOT_BUILT, str(error))
        try:
            reference = build_reference(config, class_name, Path(folder))
        except NotBuiltError as error:
            return _without_reference(config, Path(folder), str(error))
        return _serve_and_compare(reference, Path(folder))


def _without_reference(config: PreTrainedConfig, folder: Path, obstacle: str) -> Outcome:
    """What is refused needs no model to compare with."""
    config.save_pretrained(folder)
    try:
        Engine.from_config(_engine_config(folder, load_format="dummy", **_context(folder))).close()
    except (ModelLoadError, ConfigError) as error:
        return _refused(error)
    except Exception as error:  # noqa: BLE001 - of a config that has been seen not to work
        return Outcome(Verdict.NOT_BUILT, f"{obstacle}; in the engine {in_one_line(error)}")
    return Outcome(Verdict.NOT_BUILT, obstacle)


def _serve_and_compare(reference: PreTrainedModel, folder: Path) -> Outcome:
    log = _Log()
    try:
        with log.of(ROW_BY_ROW_LOGGER):
            results = _serve(folder)
    except (ModelLoadError, ConfigError) as error:
        return _refused(error, folder)
    except Exception as error:  # noqa: BLE001 - whatever an engine raises is the verdict
        return Outcome(Verdict.CRASHED, in_one_line(error))
    worst = 0.0
    for length, result in zip(PROMPT_LENGTHS, results, strict=True):
        if result.error is not None:
            return Outcome(Verdict.CRASHED, result.error.message)
        prompt = random_prompt(length)
        if result.token_ids != greedy_tokens(reference, prompt, NUM_OUTPUT_TOKENS):
            return Outcome(Verdict.DIFFERENT, f"other tokens after a prompt of {length}")
        worst = max(worst, _logprob_error(reference, prompt, result))
    if worst > MAX_LOGPROB_ERROR:
        return Outcome(Verdict.DIFFERENT, f"log probabilities are {worst:.0e} apart")
    return Outcome(Verdict.SERVED, f"{worst:.0e}" + ", row by row" * log.has_spoken)


class _Log(logging.Handler):
    """Whether a logger has said anything."""

    has_spoken = False

    def emit(self, record: logging.LogRecord) -> None:
        self.has_spoken = True

    @contextmanager
    def of(self, logger: logging.Logger) -> Iterator[None]:
        logger.addHandler(self)
        try:
            yield
        finally:
            logger.removeHandler(self)


def _refused(error: Exception, folder: Path | None = None) -> Outcome:
    """Without what every such message has."""
    words = str(error).partition(". Supported: ")[0].replace(f"{folder}: ", "")
    once = re.sub(r"^(\w+): (?=\1 )", "", " ".join(words.split()))
    return Outcome(Verdict.REFUSED, once)


def _engine_config(folder: Path, **changes: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder),
        device="cpu",
        max_step_tokens=16,
        num_pages=512,
        num_cpu_threads=1,
        check_integrity_when_idle=True,
        **changes,
    )


def _context(folder: Path) -> dict[str, Any]:
    """What has to be said where the config states no longest context."""
    try:
        resolve_max_context_len(read_hf_config(folder), None)
    except ConfigError:
        return {"max_context_len": MAX_POSITIONS}
    return {}


def _serve(folder: Path) -> list[GenerateResult]:
    """In chunks of a few tokens, several rows together."""
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=NUM_OUTPUT_TOKENS,
        ignore_eos=True,
        logprobs=0,
        prompt_logprobs=0,
        logit_bias=dict.fromkeys(BANNED_TOKENS, -100.0),
    )
    engine = Engine.from_config(_engine_config(folder, **_context(folder)))
    try:
        return engine.generate([random_prompt(length) for length in PROMPT_LENGTHS], sampling)
    finally:
        engine.close()


def _logprob_error(reference: PreTrainedModel, prompt: list[int], result: GenerateResult) -> float:
    """The largest difference of any token's log probability, prompt and output."""
    tokens = prompt + result.token_ids
    wanted = reference_logits(reference, tokens).log_softmax(-1)[:-1]
    wanted = wanted.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
    assert result.prompt_logprobs is not None
    entries = [*result.prompt_logprobs[1:], *result.logprobs]
    got = torch.tensor([entry.logprob for entry in entries if entry is not None])
    return float((got - wanted).abs().max())
