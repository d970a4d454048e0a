"""`python tests/clients/vllm_bench.py http://127.0.0.1:8000`: what `vllm bench serve` sends.

vLLM has no wheel for machines without a GPU, so its requests are written down here (its
benchmarks/serve.py and lib/endpoint_request_func.py of 0.2x): the model and its root from
/v1/models, a probe that must stream a token, then streams of completions and of chats, whose chunks
it counts and whose usage it reads behind the last choice; /metrics before and after.
"""

import asyncio
import json
import sys

import aiohttp

OUTPUT_TOKENS = 16
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
EXTRA = {"temperature": 0.0, "ignore_eos": True}


async def first_model(session):
    async with session.get("/v1/models") as response:
        response.raise_for_status()
        model = (await response.json())["data"][0]
    return model["id"], model["root"]


async def stream(session, path, payload, request_id):
    """(number of chunks with a choice, text, usage) of one request."""
    headers = {"x-request-id": request_id}
    num_chunks, text, usage = 0, "", None
    async with session.post(path, json=payload, headers=headers) as response:
        assert response.status == 200, await response.text()
        async for message in messages_of(response):
            if message == "[DONE]":
                continue
            data = json.loads(message)
            if choices := data.get("choices"):
                num_chunks += 1
                choice = choices[0]
                text += choice.get("text") or choice.get("delta", {}).get("content") or ""
            elif data.get("usage"):
                usage = data["usage"]
    return num_chunks, text, usage


async def messages_of(response):
    """What stands behind `data: ` in events as they arrive, which may be cut anywhere."""
    kept = ""
    async for piece in response.content.iter_any():
        kept += piece.decode()
        while "\n\n" in kept:
            event, _, kept = kept.partition("\n\n")
            if not event.strip().startswith(":"):
                yield event.strip().removeprefix("data: ")


def completion(model, prompt):
    return {
        "model": model,
        "prompt": prompt,
        "repetition_penalty": 1.0,
        "max_tokens": OUTPUT_TOKENS,
        "logprobs": None,
        "stream": True,
        "stream_options": {"include_usage": True},
        **EXTRA,
    }


def chat(model, prompt):
    return {
        "model": model,
        "messages": [{"role": "user", "content": [{"type": "text", "text": prompt}]}],
        "max_completion_tokens": OUTPUT_TOKENS,
        "stream": True,
        "stream_options": {"include_usage": True},
        **EXTRA,
    }


async def check(session):
    model, root = await first_model(session)
    assert root
    await stream(session, COMPLETIONS, completion(model, "probe"), "probe")
    for path, payload_of in ((COMPLETIONS, completion), (CHATS, chat)):
        payloads = [payload_of(model, f"def number_{i}(") for i in range(12)]
        runs = (stream(session, path, p, f"bench-{i}") for i, p in enumerate(payloads))
        for num_chunks, text, usage in await asyncio.gather(*runs):
            assert text
            assert usage["completion_tokens"] == OUTPUT_TOKENS
            assert usage["prompt_tokens"] > 3
            # Its inter-token latencies are those of chunks: one a token, but for those that piled
            # up for a busy ingress, which are one chunk.
            assert num_chunks > 1
    by_ids = await stream(session, COMPLETIONS, completion(model, list(range(300, 340))), "ids")
    assert by_ids[2]["prompt_tokens"] == 40


async def main(url):
    async with aiohttp.ClientSession(url, trust_env=True) as session:
        await check(session)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
