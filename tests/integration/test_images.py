"""Images on a real Ray, by stock clients: transformers' text, also when every replica dies."""

import base64
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import anthropic
import grpc
import httpx
import numpy as np
import pytest

from service.images.files import ImageCeilings
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.pictures import hostile_file, picture, png_of_zeros, saved
from tests.fakes.served_vision import reference_text, save_served_vision
from tests.fakes.tiny_vision import vision_reference
from tests.integration.services import replica_processes, running_service, wait_until

APP, PORT = "images", 18870
MODEL = "eyes"
MAX_TOKENS = 32
CAT, DOG = picture(1, 40, 30), picture(2, 24, 60)
PARTS = ["what is ", CAT, " beside ", DOG, "?"]
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served_vision(tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def expected(folder):
    return reference_text(folder, vision_reference(folder), PARTS, MAX_TOKENS)


@pytest.fixture(scope="module")
def service(ray_session, folder):
    engine = {"model": str(folder), "kv_cache_bytes": 16 << 20, "num_cpu_threads": 1}
    engine |= {"served_model_name": MODEL, "check_integrity_when_idle": True}
    with running_service(APP, PORT, engine=engine, num_replicas=2) as running:
        wait_until(lambda: running.metric("tessera_connected_replicas") == 2, 60)
        yield running


def encoded(image):
    return base64.b64encode(saved(image)).decode()


def openai_part(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    url = f"data:image/png;base64,{encoded(part)}"
    return {"type": "image_url", "image_url": {"url": url}}


def asked(parts, **more):
    messages = [{"role": "user", "content": [openai_part(part) for part in parts]}]
    return {"model": MODEL, "messages": messages, "temperature": 0, **more}


def openai_text(service, parts):
    answer = service.openai().chat.completions.create(**asked(parts, max_tokens=MAX_TOKENS))
    return answer.choices[0].message.content, answer.usage.prompt_tokens


def test_openai_client_gets_transformers_text(service, expected):
    assert openai_text(service, PARTS) == expected


def test_anthropic_client_gets_the_same(service, expected):
    claude = anthropic.Anthropic(base_url=service.url, api_key="none", max_retries=0)
    blocks = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image",
            "source": {"type": "base64", "media_type": "image/png", "data": encoded(part)},
        }
        for part in PARTS
    ]
    message = claude.messages.create(
        model=MODEL,
        max_tokens=MAX_TOKENS,
        messages=[{"role": "user", "content": blocks}],
        extra_body={"temperature": 0},
    )
    assert message.content[0].text == expected[0]


def test_grpc_gets_the_same(service, expected):
    parts = [
        pb.ContentPart(text=part)
        if isinstance(part, str)
        else pb.ContentPart(image=pb.Image(media_type="image/png", data=saved(part)))
        for part in PARTS
    ]
    request = pb.GenerateRequest(
        chat={"messages": [{"role": "user", "parts": parts}]},
        sampling={"max_tokens": MAX_TOKENS, "temperature": 0},
    )
    with grpc.insecure_channel(service.grpc_address) as channel:
        answer = pb_grpc.InferenceStub(channel).Generate(request, timeout=120)
    assert answer.choices[0].text == expected[0]


def test_texts_do_not_depend_on_who_asks_beside(service):
    prompts = [["look: ", picture(seed, 40, 30), "!"] for seed in range(3, 9)]
    alone = [openai_text(service, prompt) for prompt in prompts]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda prompt: openai_text(service, prompt), prompts * 2))
    assert together == alone * 2


def test_hostile_images_are_refused_and_others_are_served(service, expected):
    bomb = base64.b64encode(png_of_zeros(8000, 8000)).decode()
    for data in (bomb, base64.b64encode(saved(CAT)[:100]).decode(), "####"):
        part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}]}
        answer = httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages.content")
    assert openai_text(service, PARTS) == expected


URLS = [
    "file:///etc/passwd",
    "http://127.0.0.1:1/a.png",
    "http://169.254.169.254/latest/meta-data",
    "http://[::1]/",
    "https://example.com/a.png",
    "data:",
    "data:image/png;base64,",
    "data:image/svg+xml;base64,PHN2Zz4=",
    "data:text/html,<script>",
    "gopher://x",
    "\u0000",
    "h" * 100_000,
]


def memory_bytes(service):
    """Of the ingress and its tokenizer processes."""
    (ingress,) = replica_processes(APP, "Ingress")
    processes = [ingress, *ingress.children(recursive=True)]
    return sum(process.memory_info().rss for process in processes)


def test_any_image_and_any_url_has_a_typed_answer_and_leaves_nothing(service, expected):
    """Seeded; a part of it goes through every protocol's own way of bringing images."""
    assert openai_text(service, PARTS) == expected
    before = memory_bytes(service)
    rng = np.random.default_rng(7)
    files = [hostile_file(rng) for _ in range(150)]
    urls = [f"data:image/png;base64,{base64.b64encode(file).decode()}" for file in files]

    def post(url):
        part = {"type": "image_url", "image_url": {"url": url}}
        body = {"model": MODEL, "messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
        return httpx.post(f"{service.url}/v1/chat/completions", json=body, timeout=60)

    def call(file):
        part = pb.ContentPart(image=pb.Image(media_type="image/png", data=file))
        request = pb.GenerateRequest(
            chat={"messages": [{"role": "user", "parts": [part]}]}, sampling={"max_tokens": 2}
        )
        with grpc.insecure_channel(service.grpc_address) as channel:
            try:
                pb_grpc.InferenceStub(channel).Generate(request, timeout=60)
            except grpc.RpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(post, [*urls, *URLS]))
        codes = list(pool.map(call, files[:50]))
    statuses = {answer.status_code for answer in answers}
    assert statuses == {200, 400}
    assert {a.json()["error"]["param"] for a in answers if a.status_code == 400} == {
        "messages.content"
    }
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT}
    assert all(answer.status_code == 400 for answer in answers[len(urls) :])
    assert memory_bytes(service) - before < ImageCeilings().memory_bytes
    assert openai_text(service, PARTS) == expected
    wait_until(lambda: service.metric("tessera_live_requests") == 0, 30)


def test_a_stream_with_an_image_goes_on_at_another_replica(service):
    parts = ["look at this: ", CAT]
    long = asked(parts, max_tokens=400, extra_body={"ignore_eos": True})
    whole = service.openai().chat.completions.create(**long).choices[0].message.content
    stream = service.openai().chat.completions.create(**long, stream=True)
    texts = []
    for number, chunk in enumerate(stream):
        if number == 10:
            for process in replica_processes(APP, "Engine"):
                os.kill(process.pid, signal.SIGKILL)
        texts += [choice.delta.content or "" for choice in chunk.choices]
    assert "".join(texts) == whole
