"""What the API answers: OpenAI's shapes, over real HTTP, read by plain HTTP and by OpenAI's own client."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIError, AsyncOpenAI, NotFoundError, RateLimitError

from halfmoon.schemas.requests import FinishReason
from halfmoon.schemas.wire import ErrorCode
from halfmoon.text import TextCodec
from support import tiny_tokenizer
from support.fake_cluster import MODEL, Answering, saying
from support.gateway import Stand, events_of, standing
from support.wait import until

TEXT = "The moon 😀 rises, नमस्ते"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("level"))


@pytest.fixture(scope="module")
def codec(model: Path) -> TextCodec:
    return TextCodec.load(model)


@pytest.fixture
async def stand(model: Path, codec: TextCodec) -> AsyncIterator[Stand]:
    async with standing(model, saying(codec, TEXT, cached=4)) as stand:
        yield stand


@pytest.fixture
async def openai(stand: Stand) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{stand.gateway.address}/v1", api_key="any", max_retries=0) as client:
        yield client


def _asked(stand: Stand) -> list[Any]:
    return [request for request in stand.cluster.seen if request.tenant != "halfmoon-probe"]


async def test_a_chat_whole(stand: Stand, codec: TextCodec) -> None:
    response = await stand.chat()
    body = response.json()
    num_tokens = len(codec.encode(TEXT))
    (request,) = _asked(stand)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"] == request.request_id
    assert body.pop("id") == f"chatcmpl-{request.request_id.removeprefix('req-')}"
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": MODEL,
        "system_fingerprint": f"fp_{stand.cluster.card.fingerprint[:12]}",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": TEXT, "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": len(request.tokens),
            "completion_tokens": num_tokens,
            "total_tokens": len(request.tokens) + num_tokens,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    assert list(request.tokens) == codec.encode_chat([{"role": "user", "content": "hello"}])
    assert request.tenant == "default"


async def test_a_chat_streamed_is_the_chat_whole(stand: Stand) -> None:
    whole = (await stand.chat()).json()
    response = await stand.chat(stream=True, stream_options={"include_usage": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.headers["x-request-id"]
    *chunks, last, done = await events_of(response)
    assert done == "[DONE]"
    assert last["choices"] == []
    assert last["usage"] == whole["usage"]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in [*chunks, last]}) == 1
    assert all(chunk["usage"] is None for chunk in chunks)
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert chunks[-1]["choices"] == [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop"}]
    texts = [chunk["choices"][0]["delta"].get("content", "") for chunk in chunks]
    assert "".join(texts) == whole["choices"][0]["message"]["content"] == TEXT
    assert not any("\ufffd" in text for text in texts)
    assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks[:-1])


async def test_without_stream_options_no_chunk_speaks_of_usage(stand: Stand) -> None:
    *chunks, done = await events_of(await stand.chat(stream=True))
    assert done == "[DONE]"
    assert all("usage" not in chunk and len(chunk["choices"]) == 1 for chunk in chunks)


async def test_completions_whole_and_streamed(stand: Stand) -> None:
    whole = (await stand.complete()).json()
    (choice,) = whole["choices"]
    assert whole["object"] == "text_completion"
    assert whole["id"].startswith("cmpl-")
    assert choice == {"index": 0, "text": TEXT, "logprobs": None, "finish_reason": "stop"}
    *chunks, done = await events_of(await stand.complete(stream=True))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == TEXT
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]


async def test_max_tokens_one_is_one_token_and_length(stand: Stand) -> None:
    for body in (
        (await stand.chat(max_tokens=1)).json(),
        (await stand.chat(max_completion_tokens=1)).json(),
        (await stand.complete(max_tokens=1)).json(),
    ):
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 1


async def test_completions_stop_after_sixteen_tokens_unless_told(stand: Stand) -> None:
    body = (await stand.http.post("/v1/completions", json={"model": MODEL, "prompt": "hello"})).json()
    assert body["usage"]["completion_tokens"] == 16


async def test_two_choices_have_their_own_seeds_and_ids(stand: Stand) -> None:
    response = await stand.chat(n=2, seed=7)
    body = response.json()
    assert [(choice["index"], choice["message"]["content"]) for choice in body["choices"]] == [
        (0, f"{TEXT} 7"),
        (1, f"{TEXT} 8"),
    ]
    base = response.headers["x-request-id"]
    requests = _asked(stand)
    assert sorted(request.request_id for request in requests) == [f"{base}-0", f"{base}-1"]
    usage = body["usage"]
    assert usage["prompt_tokens"] == len(requests[0].tokens)
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 4


async def test_two_choices_streamed(stand: Stand) -> None:
    response = await stand.chat(n=2, seed=7, stream=True, stream_options={"include_usage": True})
    *chunks, last, _ = await events_of(response)
    texts = {0: "", 1: ""}
    roles = {0: 0, 1: 0}
    reasons: dict[int, str] = {}
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice["delta"].get("content", "")
        roles[choice["index"]] += "role" in choice["delta"]
        if choice["finish_reason"]:
            reasons[choice["index"]] = choice["finish_reason"]
    assert texts == {0: f"{TEXT} 7", 1: f"{TEXT} 8"}
    assert roles == {0: 1, 1: 1}
    assert reasons == {0: "stop", 1: "stop"}
    assert last["usage"] == (await stand.chat(n=2, seed=7)).json()["usage"]


async def test_a_list_of_prompts_of_each_kind(stand: Stand, codec: TextCodec) -> None:
    prompts = ["hello", "moon"]
    as_tokens = [codec.encode(prompt) for prompt in prompts]
    for given in (prompts, as_tokens):
        stand.cluster.seen.clear()
        body = (await stand.complete(prompt=given, n=2, seed=0)).json()
        assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
        assert [choice["text"][-1] for choice in body["choices"]] == ["0", "1", "0", "1"]
        by_id = {request.request_id.rsplit("-", 1)[1]: list(request.tokens) for request in _asked(stand)}
        assert by_id == {"0": as_tokens[0], "1": as_tokens[0], "2": as_tokens[1], "3": as_tokens[1]}
        assert body["usage"]["prompt_tokens"] == sum(map(len, as_tokens))
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == 8
    stand.cluster.seen.clear()
    assert (await stand.complete(prompt=as_tokens[0])).status_code == 200
    assert list(_asked(stand)[0].tokens) == as_tokens[0]


async def test_chat_logprobs(stand: Stand, codec: TextCodec) -> None:
    whole = (await stand.chat(logprobs=True, top_logprobs=2)).json()
    content = whole["choices"][0]["logprobs"]["content"]
    assert len(content) == whole["usage"]["completion_tokens"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == TEXT
    assert content[0]["token"] == codec.token_text(codec.encode(TEXT)[0])
    assert [len(entry["top_logprobs"]) for entry in content] == [2] * len(content)
    *chunks, _ = await events_of(await stand.chat(logprobs=True, top_logprobs=2, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    assert [entry for part in parts for entry in part["content"]] == content


async def test_completion_logprobs(stand: Stand) -> None:
    whole = (await stand.complete(logprobs=1)).json()
    logprobs = whole["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == whole["usage"]["completion_tokens"]
    assert [len(top) for top in logprobs["top_logprobs"]] == [1] * len(logprobs["tokens"])
    offsets = logprobs["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[0] == 0
    assert offsets[-1] < len(TEXT)
    assert (await stand.complete(logprobs=0)).json()["choices"][0]["logprobs"]["top_logprobs"] is None
    *chunks, _ = await events_of(await stand.complete(logprobs=1, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in chunks if chunk["choices"][0]["logprobs"]]
    for field in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        assert [item for part in parts for item in part[field]] == logprobs[field]


async def test_stop_strings(stand: Stand) -> None:
    assert (await stand.chat(stop=" rises")).json()["choices"][0]["message"]["content"] == "The moon 😀"
    body = (await stand.complete(stop=["नम", "never"])).json()
    assert body["choices"][0]["text"] == "The moon 😀 rises, "
    assert body["choices"][0]["finish_reason"] == "stop"
    assert _asked(stand)[1].sampling.stop == ("नम", "never")


async def test_parameters_reach_the_workers(stand: Stand) -> None:
    await stand.chat(
        max_tokens=5, temperature=0, top_p=0.5, top_k=3, seed=-4, ignore_eos=True, logprobs=True, user="me", tools=None
    )
    (request,) = _asked(stand)
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k) == (5, 0.0, 0.5, 3)
    assert (sampling.seed, sampling.ignore_eos, sampling.logprobs) == (-4, True, 0)


async def test_models(stand: Stand) -> None:
    (body,) = (await stand.http.get("/v1/models")).json()["data"]
    assert body["id"] == MODEL
    assert body["object"] == "model"
    assert body["engine"] == "sim"
    assert body["max_model_len"] == 256
    assert (await stand.http.get(f"/v1/models/{MODEL}")).json() == body
    assert (await stand.http.get("/v1/models/org/other")).status_code == 404


async def test_openai_client_whole(openai: AsyncOpenAI) -> None:
    chat = await openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": [{"type": "text", "text": "hello"}]}], logprobs=True
    )
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert chat.usage.prompt_tokens_details.cached_tokens == 4
    assert chat.choices[0].logprobs is not None
    assert len(chat.choices[0].logprobs.content or []) == chat.usage.completion_tokens
    completion = await openai.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=100)
    assert [choice.text for choice in completion.choices] == [TEXT, TEXT]
    assert [listed.id async for listed in openai.models.list()] == [MODEL]


async def test_openai_client_streamed(openai: AsyncOpenAI) -> None:
    text, usage = "", None
    async with await openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "hello"}],
        stream=True,
        stream_options={"include_usage": True},
    ) as chunks:
        async for chunk in chunks:
            text += "".join(choice.delta.content or "" for choice in chunk.choices)
            usage = chunk.usage
    assert text == TEXT
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 4


async def test_openai_client_sees_errors_as_its_own(openai: AsyncOpenAI, stand: Stand) -> None:
    with pytest.raises(NotFoundError, match="does not exist"):
        await openai.chat.completions.create(model="other", messages=[{"role": "user", "content": "x"}])

    async def refuse(answering: Answering) -> None:
        await answering.fail(ErrorCode.OVERLOADED, "try later", 2.5)

    stand.cluster.script = refuse
    with pytest.raises(RateLimitError, match="try later") as caught:
        await openai.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": "x"}])
    assert caught.value.response.headers["retry-after"] == "3"

    async def break_off(answering: Answering) -> None:
        await answering.tokens([1], "The")
        await answering.fail(ErrorCode.WORKER_LOST, "the decode worker is gone")

    stand.cluster.script = break_off
    texts: list[str | None] = []

    async def read() -> None:
        nonlocal texts
        chunks = await openai.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "x"}], stream=True
        )
        async with chunks:
            async for chunk in chunks:
                texts += [choice.delta.content for choice in chunk.choices]

    with pytest.raises(APIError, match="the decode worker is gone"):
        await read()
    assert texts == ["", "The"]


async def test_a_stream_that_breaks_has_an_error_event_and_no_end(stand: Stand) -> None:
    async def break_off(answering: Answering) -> None:
        await answering.tokens([1], "The")
        await answering.fail(ErrorCode.WORKER_LOST, "the decode worker is gone")

    stand.cluster.script = break_off
    for response in (await stand.chat(stream=True), await stand.complete(stream=True)):
        assert response.status_code == 200
        *chunks, last = await events_of(response)
        assert last == {
            "error": {
                "message": "the decode worker is gone",
                "type": "server_error",
                "param": None,
                "code": "worker_lost",
            }
        }
        assert all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert (await stand.chat()).status_code == 503
    await until(lambda: stand.metric("halfmoon_gateway_requests_total", endpoint="chat", status="503") == 2)


async def test_one_choice_that_fails_takes_the_others_with_it(stand: Stand) -> None:
    async def one_fails(answering: Answering) -> None:
        if answering.request_id.endswith("-1"):
            await answering.fail(ErrorCode.NO_SPACE, "full")
        await asyncio.Event().wait()

    stand.cluster.script = one_fails
    response = await stand.chat(n=3)
    assert response.status_code == 503
    base = response.headers["x-request-id"]
    await until(lambda: {f"{base}-0", f"{base}-2"} <= set(stand.cluster.cancelled))


async def test_a_span_and_figures_for_each_request(stand: Stand) -> None:
    response = await stand.chat(stream=True)
    await events_of(response)
    (span,) = await stand.spans("gateway.request")
    assert span.attributes is not None
    assert span.attributes["halfmoon.request_id"] == response.headers["x-request-id"]
    ttft_ms = span.attributes["halfmoon.ttft_ms"]
    assert isinstance(ttft_ms, float)
    assert ttft_ms > 0
    assert [event.name for event in span.events] == ["first_token"]
    assert span.attributes["gen_ai.operation.name"] == "chat"
    assert span.attributes["gen_ai.request.model"] == MODEL
    assert span.attributes["gen_ai.response.finish_reasons"] == ("stop",)
    assert span.context is not None
    trace_id = f"{span.context.trace_id:032x}"
    assert any(trace_id in headers.get("traceparent", "") for headers in stand.cluster.headers)
    assert not any("hello" in str(value) or TEXT in str(value) for value in span.attributes.values())
    assert stand.metric("halfmoon_gateway_ttft_seconds_count") == 1
    assert stand.metric("halfmoon_gateway_requests_total", endpoint="chat", status="200") == 1
    assert stand.metric("halfmoon_gateway_requests_in_flight") == 0
    text = (await stand.http.get("/metrics")).text
    assert "halfmoon_gateway_ttft_seconds_bucket" in text
    assert 'halfmoon_gateway_tokens_total{kind="cached"} 4.0' in text


async def test_the_callers_trace_goes_on(stand: Stand) -> None:
    parent = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
    await stand.http.post("/v1/chat/completions", json=body, headers={"traceparent": parent})
    (span,) = await stand.spans("gateway.request")
    assert span.context is not None
    assert f"{span.context.trace_id:032x}" == "0123456789abcdef0123456789abcdef"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("first", [False, True])
async def test_a_client_that_leaves_is_noticed_at_once(stand: Stand, stream: bool, first: bool) -> None:
    """Streaming or not, before or after the first token: the cancel is out within a second."""

    async def slow(answering: Answering) -> None:
        if first:
            await answering.tokens([1], "The")
        await asyncio.Event().wait()

    stand.cluster.script = slow
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "stream": stream}
    async with httpx.AsyncClient(base_url=stand.gateway.address) as http:
        asking = asyncio.create_task(http.post("/v1/chat/completions", json=body))
        await until(lambda: _asked(stand))
        if first:
            await until(lambda: stand.metric("halfmoon_gateway_ttft_seconds_count") == 1)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
    await until(lambda: stand.cluster.cancelled == [_asked(stand)[0].request_id])
    await until(lambda: stand.metric("halfmoon_gateway_requests_total", endpoint="chat", status="499") == 1)
    assert stand.metric("halfmoon_gateway_requests_in_flight") == 0


async def test_an_answer_past_its_time_is_504_and_cancelled(model: Path, codec: TextCodec) -> None:
    async def stall(answering: Answering) -> None:
        if answering.request.tenant == "halfmoon-probe":
            await answering.finish(FinishReason.LENGTH)
        await asyncio.Event().wait()

    async with standing(model, stall, request_timeout_s=0.2) as stand:
        response = await stand.chat()
        assert response.status_code == 504
        assert response.json()["error"]["code"] == "deadline_exceeded"
        await until(lambda: response.headers["x-request-id"] in stand.cluster.cancelled)
        stand.cluster.script = stall
        assert (await stand.chat(stream=True)).status_code == 504
