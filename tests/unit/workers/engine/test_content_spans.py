"""A real model: prompts whose placeholders stand for unlike content, from the wire to the pool."""

from service.channel.messages import Submit, decode_ingress_message, encode
from tests.fakes.tiny_models import NATIVE, random_prompt, save_tiny_model
from workers import Engine
from workers.config import EngineConfig
from workers.engine.content import ContentSpan
from workers.engine.protocol import GenerateRequest
from workers.sampling.params import SamplingParams

PROMPT = random_prompt(40)
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def received(request_id: str, *digests: bytes) -> GenerateRequest:
    """As it comes over a channel. Each digest of 3 placeholders, from token 20 on."""
    spans = [ContentSpan(20 + 3 * i, 3, digest) for i, digest in enumerate(digests)]
    request = GenerateRequest(request_id, PROMPT, GREEDY, content_spans=spans)
    message = decode_ingress_message(encode(Submit(1, [request])))
    assert isinstance(message, Submit)
    assert message.requests == [request]
    return message.requests[0]


def num_cached(engine: Engine, request: GenerateRequest) -> int:
    engine.submit(request)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    engine.check_integrity()
    return outputs[0].num_cached_tokens


def test_equal_tokens_of_unlike_content_share_what_stands_before_it(tmp_path) -> None:
    folder = str(save_tiny_model(NATIVE["llama3"], tmp_path))
    engine = Engine.from_config(EngineConfig(model=folder, page_size=4))
    cat, dog = b"c" * 16, b"d" * 16
    requests = [(), (cat,), (dog,), (cat,), (dog, cat), (dog, dog), (dog, cat)]
    found = [
        num_cached(engine, received(f"r{index}", *digests))
        for index, digests in enumerate(requests)
    ]
    engine.close()
    assert found == [0, 20, 20, 36, 20, 20, 36]
