"""Every family of memory over HTTP, on a real Ray with real engines: transformers' own tokens,
whoever asks beside and whatever prefix is known.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.fakes.families import FAMILIES
from tests.fakes.reference_family import MAX_CONTEXT_LEN, NUM_FIRST_TOKENS, Family
from tests.fakes.tokenizer_folders import make_byte_level_folder
from tests.integration.services import RunningService, running_service
from workers.engine.encoder_input import SourceTokens

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(600)]
PAGE_SIZE = 16
ENGINE = {
    "kv_cache_bytes": 32 << 20,
    "num_cpu_threads": 1,
    "page_size": PAGE_SIZE,
    "max_context_len": MAX_CONTEXT_LEN,
    "max_running_requests": 8,
}
# As many as start together within a service's time to be ready.
MODELS_AT_A_TIME = 4
# What it hears comes as a file: tests/unit/service/api/test_transcriptions.py.
NAMES = [name for name in FAMILIES if name != "whisper"]
GROUPS = [NAMES[at : at + MODELS_AT_A_TIME] for at in range(0, len(NAMES), MODELS_AT_A_TIME)]


@pytest.fixture(scope="module", params=range(len(GROUPS)), ids=["+".join(one) for one in GROUPS])
def families(request, tmp_path_factory) -> Mapping[str, Family]:
    folders = {name: tmp_path_factory.mktemp(name) for name in GROUPS[request.param]}
    for folder in folders.values():
        make_byte_level_folder(folder, chat_template=None)
    return {name: FAMILIES[name].build_served(folder) for name, folder in folders.items()}


@pytest.fixture(scope="module")
def service(ray_session, families: Mapping[str, Family]) -> Iterator[RunningService]:
    models = {
        name: {"engine": {**ENGINE, "model": str(family.folder)}}
        for name, family in families.items()
    }
    with running_service("families", 18460, models=models) as running:
        yield running


def ask(service: RunningService, name: str, family: Family, prompt: Sequence[int]) -> Any:
    sampling = family.sampling
    return service.openai().completions.create(
        model=name,
        prompt=list(prompt),
        max_tokens=NUM_FIRST_TOKENS,
        temperature=0,
        logit_bias={str(token): bias for token, bias in sampling.logit_bias.items()},
        extra_body={
            "ignore_eos": True,
            "return_token_ids": True,
            "repetition_penalty": sampling.repetition_penalty,
        },
    )


def asked_of(family: Family) -> list[Sequence[int]]:
    """What a client sends: to an encoder-decoder, what its encoder reads."""
    sources = [one.token_ids for one in family.sources if isinstance(one, SourceTokens)]
    return sources or list(family.prompts)


def test_tokens_are_those_of_transformers(service, families) -> None:
    """Each alone; then all of all models at once, twice, when their prefixes are known."""
    questions = [
        (name, family, asked) for name, family in families.items() for asked in asked_of(family)
    ]
    expected = [tokens[:NUM_FIRST_TOKENS] for one in families.values() for tokens in one.tokens]
    alone = [ask(service, *question) for question in questions]
    assert [answer.choices[0].token_ids for answer in alone] == expected
    with ThreadPoolExecutor(len(questions)) as pool:
        together = list(pool.map(lambda question: ask(service, *question), questions * 2))
    assert [answer.choices[0].token_ids for answer in together] == expected * 2
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in together]
    assert (
        cached
        == [known_tokens(name, prompt) for name, one in families.items() for prompt in one.prompts]
        * 2
    )


def known_tokens(name: str, prompt: Sequence[int]) -> int:
    unit = max(PAGE_SIZE, FAMILIES[name].border_tokens)
    return (len(prompt) - 1) // unit * unit
