"""Images in chats, by every protocol: the text that transformers generates from the same files."""

import base64
from dataclasses import replace

import anthropic
import grpc
import httpx
import httpx2
import msgspec
import pytest
import pytest_asyncio

from service.api.http import build_http_app
from service.limits import Limits
from service.proto import inference_pb2 as pb
from service.proto import inference_pb2_grpc as pb_grpc
from tests.fakes.engine_script import EngineScript
from tests.fakes.pictures import picture, png_of_zeros, saved
from tests.fakes.served_vision import reference_text, save_served_vision
from tests.fakes.text import InlineTokenizer, bench_over
from tests.fakes.tiny_vision import vision_reference
from workers.config import EngineConfig

pytestmark = pytest.mark.asyncio

MAX_TOKENS = 24
CAT, DOG = picture(1, 40, 30), picture(2, 24, 60)
PARTS = ["what is ", CAT, " beside ", DOG, "?"]
LIMITS = {"max_image_bytes": 100_000, "max_image_pixels": 100_000, "max_images": 4}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_served_vision(tmp_path_factory.mktemp("eyes"))


@pytest.fixture(scope="module")
def reference(folder):
    return vision_reference(folder)


@pytest.fixture(scope="module")
def script(folder):
    config = EngineConfig(model=str(folder), page_size=8, num_pages=128, num_cpu_threads=1)
    script = EngineScript(config)
    yield script
    script.close()


@pytest.fixture
def bench(folder, script):
    limits = Limits(**LIMITS)
    info = msgspec.structs.replace(script.engine.info, name="eyes")
    return bench_over(InlineTokenizer(folder), script, limits, info)


@pytest_asyncio.fixture
async def claude(app):
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://tessera") as http:
        yield anthropic.AsyncAnthropic(
            base_url="http://tessera", api_key="none", http_client=http, max_retries=0
        )


def text_of(data):
    return base64.b64encode(data).decode()


def image_url(image, **more):
    url = f"data:image/png;base64,{text_of(image if isinstance(image, bytes) else saved(image))}"
    return {"type": "image_url", "image_url": {"url": url, **more}}


def openai_parts(parts):
    return [{"type": "text", "text": p} if isinstance(p, str) else image_url(p) for p in parts]


def claude_block(part):
    if isinstance(part, str):
        return {"type": "text", "text": part}
    source = {"type": "base64", "media_type": "image/png", "data": text_of(saved(part))}
    return {"type": "image", "source": source}


def responses_part(part):
    if isinstance(part, str):
        return {"type": "input_text", "text": part}
    return {"type": "input_image", "image_url": image_url(part)["image_url"]["url"]}


def grpc_part(part):
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    return pb.ContentPart(image=pb.Image(media_type="image/png", data=saved(part)))


async def ask(client, parts, **more):
    return await client.chat.completions.create(
        model="eyes",
        messages=[{"role": "user", "content": openai_parts(parts)}],
        max_tokens=MAX_TOKENS,
        temperature=0,
        **more,
    )


@pytest.mark.parametrize(
    "parts", [PARTS, [CAT], ["a ", CAT, " and a ", CAT], ["x" * 50, DOG]], ids=range(4)
)
async def test_texts_are_transformers(openai_client, folder, reference, parts):
    expected, num_tokens = reference_text(folder, reference, parts, MAX_TOKENS)
    answer = await ask(openai_client, parts)
    assert answer.choices[0].message.content == expected
    assert answer.usage.prompt_tokens == num_tokens


async def test_all_protocols_say_the_same(openai_client, claude, serve_grpc):
    whole = await ask(openai_client, PARTS)
    expected = whole.choices[0].message.content
    stream = await ask(openai_client, PARTS, stream=True)
    chunks = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
    assert "".join(chunks) == expected
    told = [{"role": "user", "content": [claude_block(part) for part in PARTS]}]
    message = await claude.messages.create(
        model="eyes", max_tokens=MAX_TOKENS, messages=told, extra_body={"temperature": 0}
    )
    assert message.content[0].text == expected
    items = [{"role": "user", "content": [responses_part(part) for part in PARTS]}]
    asked = {"model": "eyes", "max_output_tokens": MAX_TOKENS, "temperature": 0}
    response = await openai_client.responses.create(input=items, **asked)
    assert response.output_text == expected
    after = [*items, *response.output, {"role": "user", "content": "and?"}]
    by_hand = await openai_client.responses.create(input=after, **asked)
    by_id = await openai_client.responses.create(
        input="and?", previous_response_id=response.id, **asked
    )
    assert by_id.output_text == by_hand.output_text
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens
    counted = await claude.messages.count_tokens(model="eyes", messages=told)
    usage = message.usage
    assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens
    assert counted.input_tokens == whole.usage.prompt_tokens
    stub = pb_grpc.InferenceStub((await serve_grpc())())
    request = pb.GenerateRequest(
        chat={"messages": [{"role": "user", "parts": [grpc_part(part) for part in PARTS]}]},
        sampling={"max_tokens": MAX_TOKENS, "temperature": 0},
    )
    assert (await stub.Generate(request)).choices[0].text == expected


async def test_images_are_cached_by_what_they_show(openai_client, script):
    first = picture(11, 40, 30)
    other = picture(12, 40, 30)
    await ask(openai_client, ["look: ", first, " " * 20])
    again = await ask(openai_client, ["look: ", first, " " * 20])
    unlike = await ask(openai_client, ["look: ", other, " " * 20])
    cached = [answer.usage.prompt_tokens_details.cached_tokens for answer in (again, unlike)]
    assert cached[0] >= again.usage.prompt_tokens - 8
    # What comes before the image is common to all.
    assert cached[1] <= 24 < cached[0]


async def test_low_detail_reaches_whoever_prepares_the_image(openai_client, bench, monkeypatch):
    jobs = []
    encode = bench.tokenizer.encode_images

    async def remember(job, flow):
        jobs.append(job)
        return await encode(job, flow)

    monkeypatch.setattr(bench.tokenizer, "encode_images", remember)
    for detail in ("auto", "high", "low"):
        content = [image_url(CAT, detail=detail)]
        await openai_client.chat.completions.create(
            model="eyes", messages=[{"role": "user", "content": content}], max_tokens=1
        )
    assert [job.images[0].max_pixels for job in jobs] == [0, 0, 512 * 512]


BROKEN = {
    "no image": (image_url(b"hello"), "invalid_request", "no PNG, JPEG, WebP or GIF"),
    "half an image": (image_url(saved(CAT)[:200]), "invalid_request", "cannot be decoded"),
    "a bomb": (image_url(png_of_zeros(7_000, 7_000)), "invalid_request", "7000 x 7000 pixels"),
    "a large file": (image_url(b"x" * 120_000), "limit_exceeded", "at most 100000 bytes"),
    "no base64": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,###"}},
        "invalid_request",
        "not base64",
    ),
    "no data": (
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}},
        "invalid_request",
        "no PNG",
    ),
    "another type": (
        {"type": "image_url", "image_url": {"url": "data:image/svg+xml;base64,PHN2Zz4="}},
        "invalid_request",
        "image/svg",
    ),
    "a url without base64": (
        {"type": "image_url", "image_url": {"url": "data:image/png,abc"}},
        "invalid_request",
        "data:image/png;base64,",
    ),
    "a file": (
        {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}},
        "unsupported_parameter",
        "not fetched",
    ),
    "an address": (
        {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}},
        "unsupported_parameter",
        "not fetched",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
async def test_hostile_images_are_typed_400s(client, bench, name):
    part, code, reason = BROKEN[name]
    body = {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2}
    answer = await client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, code, "messages.content")
    assert reason in error["message"]
    assert bench.handler._image_room.num_bytes == 0


class Files:
    """Implements Fetcher over a few files."""

    def __init__(self, files):
        self.files = files

    async def fetch(self, urls, max_file_bytes, max_bytes):
        assert (max_file_bytes, max_bytes) == (100_000, Limits().max_body_bytes)
        return [self.files[url] for url in urls]

    async def aclose(self):
        raise AssertionError("it is its owner's to close")


async def test_fetched_images_stand_where_their_urls_are(folder, script, openai_client, services):
    there = {"https://a.example/cat": saved(CAT), "https://a.example/dog": saved(DOG)}
    info = msgspec.structs.replace(script.engine.info, name="eyes")
    limits = Limits(**LIMITS)
    bench = bench_over(InlineTokenizer(folder), script, limits, info, Files(there))
    transport = httpx.ASGITransport(app=build_http_app(replace(services, models=bench.models)))
    expected = await ask(openai_client, [CAT, DOG, "both", CAT])
    cat, dog = ({"type": "image_url", "image_url": {"url": url}} for url in there)
    content = [cat, dog, {"type": "text", "text": "both"}, image_url(CAT)]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": MAX_TOKENS}
    async with httpx.AsyncClient(transport=transport, base_url="http://tessera") as http:
        answer = await http.post("/v1/chat/completions", json={**body, "temperature": 0})
    assert answer.json()["choices"][0]["message"]["content"] == expected.choices[0].message.content


async def test_more_images_than_allowed_are_refused(client):
    content = [image_url(CAT)] * 5
    body = {"messages": [{"role": "user", "content": content}]}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"] == "at most 4 images are allowed"


@pytest.mark.parametrize("role", ["system", "assistant"])
async def test_images_are_what_users_show(client, role):
    body = {"messages": [{"role": role, "content": [image_url(CAT)]}]}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert "role user" in answer.json()["error"]["message"]


@pytest.mark.parametrize("more", [{"truncate_prompt_tokens": 5}, {"use_beam_search": True, "n": 2}])
async def test_what_a_prompt_with_images_cannot_have_is_refused(client, more):
    body = {"messages": [{"role": "user", "content": [image_url(CAT)]}], **more}
    answer = await client.post("/v1/chat/completions", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
    assert error["param"] == next(iter(more))


async def test_engines_of_an_older_version_are_sent_none(client, bench):
    media = msgspec.structs.replace(bench.backend.info.media, takes_pixels=False)
    bench.backend.info = msgspec.structs.replace(bench.backend.info, media=media)
    body = {"messages": [{"role": "user", "content": [image_url(CAT)]}]}
    answer = await client.post("/v1/chat/completions", json=body)
    assert answer.json()["error"]["code"] == "unsupported_parameter"
    assert bench.backend.requests == []


async def test_text_that_looks_like_a_placeholder_is_text(openai_client, bench):
    answer = await ask(openai_client, ["<|image_pad|> ", CAT])
    placeholder = bench.backend.info.media.placeholder_id
    plain = await ask(openai_client, [CAT])
    (request,) = bench.backend.requests[-2:-1]
    assert request.prompt_token_ids.count(placeholder) == request.content_spans[0].num_tokens
    assert answer.usage.prompt_tokens > plain.usage.prompt_tokens


@pytest.mark.parametrize("n", [1, 3])
async def test_room_for_images_is_held_as_long_as_they_are_and_given_back(
    openai_client, bench, monkeypatch, n
):
    room, held = bench.handler._image_room, []
    submit = bench.backend.submit

    async def look(request, context):
        held.append(room.num_bytes)
        return await submit(request, context)

    monkeypatch.setattr(bench.backend, "submit", look)
    await ask(openai_client, [CAT], n=n)
    num_shown = len(bench.backend.requests[0].media[0].values)
    (settled,) = set(held)
    assert n * num_shown + len(saved(CAT)) <= settled <= n * num_shown + len(saved(CAT)) + 2
    assert room.num_bytes == 0


async def test_images_beyond_what_a_server_holds_wait_outside(client, bench):
    bench.handler._image_room.num_bytes = 1 << 30
    body = {"messages": [{"role": "user", "content": [image_url(CAT)]}]}
    answer = await client.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "overloaded")


GRPC_REFUSED = {
    "content and parts": pb.Message(role="user", content="x", parts=[grpc_part("y")]),
    "an empty part": pb.Message(role="user", parts=[pb.ContentPart()]),
    "an image of an assistant": pb.Message(role="assistant", parts=[grpc_part(CAT)]),
    "an image without a source": pb.Message(
        role="user", parts=[pb.ContentPart(image=pb.Image(media_type="image/png"))]
    ),
    "a detail that there is not": pb.Message(
        role="user",
        parts=[pb.ContentPart(image=pb.Image(media_type="image/png", data=b"x", detail="most"))],
    ),
}


@pytest.mark.parametrize("name", GRPC_REFUSED)
async def test_grpc_refuses_by_name(serve_grpc, name):
    stub = pb_grpc.InferenceStub((await serve_grpc())())
    request = pb.GenerateRequest(chat={"messages": [GRPC_REFUSED[name]]})
    with pytest.raises(grpc.RpcError) as refused:
        await stub.Generate(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(refused.value.trailing_metadata())["tessera-error-param"] == "messages.parts"
