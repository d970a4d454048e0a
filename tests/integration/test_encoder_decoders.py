"""BART and Whisper in one application on a real Ray, with real engines and stock clients."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from service.proto import inference_pb2_grpc
from tests.fakes.served_seq2seq import tiny_bart, tiny_extractor, tiny_whisper
from tests.fakes.sounds import tones, wav
from tests.fakes.tokenizer_folders import make_byte_level_folder
from tests.integration.services import grpc_request, running_service

pytestmark = pytest.mark.nightly
APP = "encoder-decoders"
BART, WHISPER = "bart", "whisper"
SOUNDS = [wav(tones(0.5, 44_100, 200.0 * (i + 1)), 44_100) for i in range(4)]
PROMPTS = ["the quick brown fox", "hello world", "hello world, hello there", "a"]


@pytest.fixture(scope="module")
def service(ray_session, tmp_path_factory):
    engine = {"kv_cache_bytes": 16 << 20, "num_cpu_threads": 1, "page_size": 4}
    models = {}
    for name, model in ((BART, tiny_bart()), (WHISPER, tiny_whisper())):
        folder = make_byte_level_folder(tmp_path_factory.mktemp(name), chat_template=None)
        model.save_pretrained(folder)
        if name == WHISPER:
            tiny_extractor().save_pretrained(folder)
        models[name] = {"engine": {**engine, "model": str(folder)}}
    with running_service(APP, 18360, models=models) as running:
        yield running


def completion(service, prompt):
    answer = service.openai().completions.create(
        model=BART, prompt=prompt, max_tokens=24, temperature=0
    )
    return answer.choices[0].text


def transcript(service, sound):
    file = ("sound.wav", sound)
    return service.openai().audio.transcriptions.create(model=WHISPER, file=file).text


def test_texts_of_sources_do_not_depend_on_who_asks_beside(service):
    alone = [completion(service, prompt) for prompt in PROMPTS]
    assert len(set(alone)) == len(PROMPTS)
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda prompt: completion(service, prompt), PROMPTS * 4))
    assert together == alone * 4


def test_a_source_is_one_over_grpc_too(service):
    request = grpc_request(PROMPTS[0], 24)
    request.model = BART
    with grpc.insecure_channel(service.grpc_address) as channel:
        answer = inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=60)
    assert answer.choices[0].text == completion(service, PROMPTS[0])


def test_sounds_at_another_rate_are_heard(service):
    alone = [transcript(service, sound) for sound in SOUNDS]
    assert len(set(alone)) > 1
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda sound: transcript(service, sound), SOUNDS * 4))
    assert together == alone * 4
