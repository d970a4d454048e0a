"""Whatever HTTP takes, gRPC takes: a new parameter of one goes to the other or is explained."""

import pytest

from service.api.openai.chat import ChatCompletionRequest, ChatMessage
from service.api.openai.completions import CompletionRequest
from service.api.openai.constraints import StructuredOutputs
from service.api.openai.embeddings import EmbeddingRequest
from service.api.openai.scores import RerankRequest, ScoreRequest
from service.api.openai.tokenize import DetokenizeRequest, TokenizeRequest
from service.proto import inference_pb2 as pb

# Names in the proto where they are others.
RENAMED = {
    "prompt": "text",
    "messages": "chat",
    "max_completion_tokens": "max_tokens",
    "top_logprobs": "logprobs",
    "chat_template_kwargs": "template_kwargs_json",
    "return_token_ids": "return_prompt_token_ids",
    "return_token_strs": "return_tokens",
    "stream_options": "continuous_usage_stats",
    "tokens": "token_ids",
    "response_format": "json_schema",
    "structured_outputs": "grammar",
    "guided_json": "json_schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_": "json_schema",
    "text_1": "queries",
    "text_2": "documents",
    "data_1": "queries",
    "data_2": "documents",
    "items": "documents",
    "query": "queries",
    "speculative": "max_draft_tokens",
}
NOT_IN_GRPC = {
    "stream": "a method of its own",
    "user": "changes nothing",
    "safety_identifier": "changes nothing",
    "prompt_cache_key": "changes nothing",
    "session_id": "changes nothing in the body; metadata can carry what routing reads",
    "metadata": "changes nothing; gRPC has metadata of its own",
    "service_tier": "there is only one",
    "reasoning": "another name of reasoning_content",
    "spaces_between_special_tokens": "changes nothing",
    "return_tokens_as_token_ids": "log probabilities have token ids already",
    "encoding_format": "floats are binary",
    "embed_dtype": "there is only one",
    "endianness": "floats are binary",
    "padding": "changes nothing",
    "use_activation": "another name of normalize; scores come with their activation",
    "top_n": "who asks sorts the scores",
    "return_documents": "who asks has them",
    "structural_tag": "tools, reasoning and grammars say the same",
}
OPERATIONS = {
    "/v1/completions": "GenerateStream",
    "/v1/chat/completions": "GenerateStream",
    "/v1/embeddings": "Embed",
    "/v1/score": "Score",
    "/score": "Score",
    "/v1/rerank": "Score",
    "/v2/rerank": "Score",
    "/rerank": "Score",
    "/tokenize": "Tokenize",
    "/detokenize": "Detokenize",
    "/v1/models": "ListModels",
    "/v1/models/{model_id}": "GetModel",
}
ONLY_HTTP = {
    "/generate": "SGLang's shape of what Generate does",
    "/pooling": "vLLM's shape of what Embed does",
    "/v1/messages": "Anthropic's shape of what Generate does with a chat",
    "/v1/messages/count_tokens": "Tokenize gives the tokens",
    "/v1/responses": "OpenAI's shape of what Generate does; its store is for their clients",
    "/v1/responses/{response_id}": "of that store",
    "/v1/responses/{response_id}/cancel": "of that store; a call of gRPC is cancelled",
    "/v1/responses/{response_id}/input_items": "of that store",
    "/v1/audio/transcriptions": "a form with a file, as OpenAI's clients send it",
    "/health": "grpc.health.v1",
    "/health/live": "grpc.health.v1",
    "/health/ready": "grpc.health.v1",
    "/ping": "grpc.health.v1",
    "/load": "for monitors; metrics have it",
    "/get_load": "for monitors; metrics have it",
    "/version": "for monitors; metrics have it",
}


def fields_of(descriptor):
    """Names of a message's fields and of those inside it."""
    for field in descriptor.fields:
        yield field.name
        if field.message_type is not None:
            yield from fields_of(field.message_type)


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        (CompletionRequest, pb.GenerateRequest),
        (ChatCompletionRequest, pb.GenerateRequest),
        (ChatMessage, pb.Message),
        (StructuredOutputs, pb.GenerateRequest),
        (EmbeddingRequest, pb.EmbedRequest),
        (ScoreRequest, pb.ScoreRequest),
        (RerankRequest, pb.ScoreRequest),
        (TokenizeRequest, pb.TokenizeRequest),
        (DetokenizeRequest, pb.DetokenizeRequest),
    ],
    ids=lambda item: item.__name__,
)
def test_every_parameter_of_http_is_one_of_grpc_or_has_a_reason(schema, message):
    wanted = {RENAMED.get(name, name) for name in schema.model_fields} - set(NOT_IN_GRPC)
    assert wanted <= set(fields_of(message.DESCRIPTOR))


def test_no_reason_outlives_its_parameter():
    models = (
        *(CompletionRequest, ChatCompletionRequest, ChatMessage, StructuredOutputs),
        *(EmbeddingRequest, RerankRequest),
    )
    known = {name for model in models for name in model.model_fields}
    assert set(NOT_IN_GRPC) <= known


def test_every_operation_of_http_is_a_method_of_grpc_or_has_a_reason(app):
    paths = {path for path in app.openapi()["paths"] if not path.startswith("/models/")}
    assert paths == OPERATIONS.keys() | ONLY_HTTP.keys()
    methods = {method.name for method in pb.DESCRIPTOR.services_by_name["Inference"].methods}
    # Generate is GenerateStream at once.
    assert methods - {"Generate"} == set(OPERATIONS.values())
