"""A folder of adapters that is watched while a real service of two ingresses serves."""

import shutil
import time

import httpx
import openai
import pytest
import ray

from service.deployments.control_plane import REGISTRY_EXPIRE_AFTER_S, get_registry
from service.model_names import model_folder
from tests.fakes.adapters import greedy_tokens, merged_reference, save_adapter
from tests.fakes.tiny_models import eager_reference
from tests.integration.services import running_service, wait_until

APP = "adapter-folder"
MODEL, ADAPTER = "builtin", "dropped"
INTERVAL_S = 0.2
REFUSALS = "tessera_adapter_folder_refusals_total"


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """The folder."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def service(ray_session, adapters):
    engine = {
        "kv_cache_bytes": 64 << 20,
        "num_cpu_threads": 1,
        "max_context_len": 96,
        "max_loras": 2,
        "lora_folder": str(adapters),
        "lora_folder_interval_s": INTERVAL_S,
    }
    auth = {"admin_api_keys": ["operator"]}
    with running_service(APP, 18380, engine=engine, auth=auth, num_ingresses=2) as running:
        yield running


@pytest.fixture(scope="module")
def base():
    return eager_reference(model_folder("builtin"))


def parents(service):
    """Of all models, by a connection of its own: the kernel chooses the ingress."""
    with service.openai() as client:
        return {model.id: getattr(model, "parent", None) for model in client.models.list().data}


def is_told(service, name, *, is_there):
    """Whether both ingresses say so, all but certainly."""
    return all((name in parents(service)) == is_there for _ in range(12))


def answers_as(service, name, merged):
    """Whether the adapter's tokens are those of the model that is merged with it. No: the files
    have changed, and the service has not seen that yet."""
    try:
        with service.openai() as client:
            answer = client.completions.create(
                model=name,
                prompt="def __init__(self",
                max_tokens=8,
                temperature=0,
                extra_body={"return_token_ids": True},
            )
    except openai.NotFoundError:
        return False
    (choice,) = answer.choices
    expected = greedy_tokens(merged, choice.prompt_token_ids, 8)
    return choice.token_ids == expected[: len(choice.token_ids)]


def unload(service, name):
    reply = httpx.post(
        f"{service.url}/v1/unload_lora_adapter",
        json={"lora_name": name},
        headers={"authorization": "Bearer operator"},
        timeout=60,
    )
    assert reply.status_code == 200, reply.text


def test_what_lies_in_the_folder_is_served_without_a_call(service, adapters, base):
    assert parents(service) == {MODEL: None}
    for seed in (1, 2):
        # The second one is written over the first.
        folder = save_adapter(adapters / ADAPTER, base, seed=seed, rank=4)
        merged = merged_reference(model_folder("builtin"), folder)
        wait_until(lambda merged=merged: answers_as(service, ADAPTER, merged))
    wait_until(lambda: is_told(service, ADAPTER, is_there=True))
    assert parents(service) == {MODEL: None, ADAPTER: MODEL}
    shutil.rmtree(folder)
    wait_until(lambda: is_told(service, ADAPTER, is_there=False))
    with pytest.raises(openai.NotFoundError):
        service.openai().completions.create(model=ADAPTER, prompt="x", max_tokens=1)


def test_what_a_call_has_unloaded_comes_back_with_other_files(service, adapters, base):
    folder = save_adapter(adapters / ADAPTER, base, seed=1, rank=4)
    wait_until(lambda: is_told(service, ADAPTER, is_there=True))
    unload(service, ADAPTER)
    wait_until(lambda: is_told(service, ADAPTER, is_there=False))
    time.sleep(5 * INTERVAL_S)
    assert is_told(service, ADAPTER, is_there=False)
    save_adapter(adapters / ADAPTER, base, seed=3, rank=4)
    wait_until(lambda: is_told(service, ADAPTER, is_there=True))
    merged = merged_reference(model_folder("builtin"), folder)
    wait_until(lambda: answers_as(service, ADAPTER, merged))


def test_what_is_of_no_use_is_counted_once_and_disturbs_nobody(service, adapters, base):
    wait_until(lambda: service.metric(REFUSALS) == 0)
    bad = adapters / "bad"
    bad.mkdir()
    (bad / "adapter_config.json").write_text("{")
    save_adapter(adapters / "good", base, seed=4, rank=4)
    wait_until(lambda: is_told(service, "good", is_there=True))
    wait_until(lambda: service.metric(REFUSALS) == 1)
    time.sleep(5 * INTERVAL_S)
    assert service.metric(REFUSALS) == 1
    assert "bad" not in parents(service)


def test_a_registry_that_starts_anew_takes_nothing_away(service, adapters, base):
    save_adapter(adapters / "stays", base, seed=5, rank=4)
    save_adapter(adapters / "unloaded", base, seed=6, rank=4)
    wait_until(lambda: is_told(service, "unloaded", is_there=True))
    unload(service, "unloaded")
    wait_until(lambda: is_told(service, "unloaded", is_there=False))
    wait_until(lambda: is_told(service, "stays", is_there=True))
    ray.kill(get_registry(APP), no_restart=False)
    end_s = time.monotonic() + REGISTRY_EXPIRE_AFTER_S + 20 * INTERVAL_S
    while time.monotonic() < end_s:
        assert is_told(service, "stays", is_there=True)
        assert is_told(service, "unloaded", is_there=False)
    shutil.rmtree(adapters / "stays")
    wait_until(lambda: is_told(service, "stays", is_there=False))
