"""What the API refuses, and how it says so: always OpenAI's error shape, and nothing is published."""

import asyncio
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from halfmoon.lifecycle import StartupError
from halfmoon.schemas.wire import ErrorCode
from halfmoon.text import TextCodec
from support import tiny_tokenizer
from support.fake_cluster import MODEL, Answering, saying
from support.gateway import Stand, standing
from support.wait import until, until_awaited

KEYS = {"key-a": "acme", "key-b": "bolt"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_tokenizer.byte_level(tmp_path_factory.mktemp("level"))


@pytest.fixture(scope="module")
def codec(model: Path) -> TextCodec:
    return TextCodec.load(model)


@pytest.fixture
async def stand(model: Path, codec: TextCodec) -> AsyncIterator[Stand]:
    async with standing(model, saying(codec, "moon"), max_body_bytes=20_000, max_prompts=4, max_choices=3) as stand:
        yield stand


def _asked(stand: Stand) -> list[Any]:
    return [request for request in stand.cluster.seen if request.tenant != "halfmoon-probe"]


def _error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert "Traceback" not in body["error"]["message"]
    error: dict[str, Any] = body["error"]
    return error


CHAT_REFUSALS: list[tuple[dict[str, Any], str | None, str]] = [
    ({"messages": []}, "messages", "must not be empty"),
    ({"messages": "hi"}, "messages", "Expected `array`"),
    ({"messages": [{"role": "user"}]}, "messages", "messages[0].content"),
    ({"messages": [{"role": "tool", "content": "x"}]}, "messages", "chat template"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages", "only 'text' parts"),
    ({"temperature": "hot"}, "temperature", "Expected `float | null`"),
    ({"temperature": 3}, "temperature", "between 0 and 2"),
    ({"top_p": 0}, "top_p", "above 0"),
    ({"max_tokens": 0}, "max_tokens", "at least 1"),
    ({"max_tokens": 1.5}, "max_tokens", "Expected `int | null`"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens", "differ"),
    ({"max_tokens": 256}, "messages", "max_tokens is 256"),
    ({"n": 0}, "n", "between 1 and 3"),
    ({"n": 4}, "n", "between 1 and 3"),
    ({"stop": ""}, "stop", "none of them empty"),
    ({"stop": ["a", 1]}, "stop[1]", "Expected `str`"),
    ({"stop": ["x"] * 17}, "stop", "at most 16"),
    ({"seed": 2**64}, "seed", "64 bits"),
    ({"seed": 2**200}, "seed", ""),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "between 0 and 20"),
    ({"top_logprobs": 2}, "top_logprobs", "needs 'logprobs'"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "'stream': true"),
    ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
    ({"frequency_penalty": -1}, "frequency_penalty", "not supported"),
    ({"tools": [{"type": "function"}]}, "tools", "not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
    ({"temprature": 1}, "temprature", "Unknown parameter"),
    ({"model": 5}, "model", "Expected `str`"),
    ({"stream": "yes"}, "stream", "Expected `bool | null`"),
]


@pytest.mark.parametrize(("parameters", "param", "said"), CHAT_REFUSALS, ids=lambda value: str(value)[:40])
async def test_chat_parameters(stand: Stand, parameters: dict[str, Any], param: str | None, said: str) -> None:
    error = _error(await stand.chat(**parameters), 400)
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert said in error["message"]
    assert _asked(stand) == []


@pytest.mark.parametrize(
    ("parameters", "param", "said"),
    [
        ({"prompt": ""}, "prompt", "empty"),
        ({"prompt": []}, "prompt", "must not be empty"),
        ({"prompt": [[]]}, "prompt", "empty"),
        ({"prompt": ["a", 1]}, "prompt", "must be a string, a list"),
        ({"prompt": ["a", [1]]}, "prompt", "must be a string, a list"),
        ({"prompt": [1, -1]}, "prompt", "from 0 to 999"),
        ({"prompt": [1000]}, "prompt", "from 0 to 999"),
        ({"prompt": [2**70]}, "prompt", ""),
        ({"prompt": ["a"] * 5}, "prompt", "at most 4 prompts"),
        ({"prompt": None}, "prompt", "Expected"),
        ({"prompt": [True]}, "prompt[0]", "Expected"),
        ({"logprobs": 21}, "logprobs", "between 0 and 20"),
        ({"logprobs": True}, "logprobs", "Expected `int | null`"),
        ({"echo": True}, "echo", "not supported"),
        ({"best_of": 2}, "best_of", "not supported"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"messages": []}, "messages", "Unknown parameter"),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_completion_parameters(stand: Stand, parameters: dict[str, Any], param: str, said: str) -> None:
    error = _error(await stand.complete(**parameters), 400)
    assert error["param"] == param
    assert said in error["message"]
    assert _asked(stand) == []


async def test_what_clients_send_unasked_is_no_error(stand: Stand) -> None:
    harmless = {
        "metadata": {"a": "b"},
        "store": False,
        "user": "me",
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "presence_penalty": 0.0,
        "frequency_penalty": 0,
        "response_format": {"type": "text"},
        "tools": [],
        "tool_choice": "auto",
        "logit_bias": {},
        "functions": None,
        "stop": None,
        "n": None,
        "seed": None,
        "stream_options": None,
    }
    assert (await stand.chat(**harmless)).status_code == 200


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b'{"model": "\xff"}', "not valid JSON"),
        (b"[1]", "must be a JSON object"),
        (b"[" * 15_000, "not valid JSON"),
        (b'{"messages": []}', "Missing required parameter: 'model'"),
        (b'{"model": "tiny"}', "Missing required parameter: 'messages'"),
        (b'{"model": "tiny", "messages": [{"role": "user", "content": "\\ud800"}]}', "JSON"),
    ],
)
async def test_bodies_that_are_none(stand: Stand, body: bytes, said: str) -> None:
    error = _error(await stand.http.post("/v1/chat/completions", content=body), 400)
    assert said in error["message"]


async def test_the_limit_is_exact_and_both_numbers_are_said(stand: Stand) -> None:
    """Prompt and completion together: 256 here."""
    assert (await stand.complete(prompt=[5] * 255, max_tokens=1)).status_code == 200
    error = _error(await stand.complete(prompt=[5] * 255, max_tokens=2), 400)
    assert error["code"] == "context_length_exceeded"
    error = _error(await stand.complete(prompt=[5] * 256, max_tokens=1), 400)
    assert error["code"] == "context_length_exceeded"
    assert "256 tokens" in error["message"]
    assert "255 at most" in error["message"]
    error = _error(await stand.complete(prompt=[[1], [5] * 300]), 400)
    assert "300 tokens" in error["message"]
    assert len(_asked(stand)) == 1


async def test_an_unknown_model(stand: Stand) -> None:
    error = _error(await stand.chat(model="gpt-4o"), 404)
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "'tiny'" in error["message"]
    _error(await stand.http.get("/v1/models/gpt-4o"), 404)


async def test_unknown_routes_and_methods(stand: Stand) -> None:
    assert _error(await stand.http.get("/v1/nothing"), 404)["code"] == "unknown_url"
    response = await stand.http.get("/v1/chat/completions")
    assert _error(response, 405)["code"] == "method_not_allowed"
    assert response.headers["allow"] == "POST"


async def test_bodies_that_are_too_large(stand: Stand) -> None:
    declared = await stand.http.post("/v1/completions", content=b" " * 20_001)
    assert _error(declared, 413)["code"] == "body_too_large"

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(30):
            yield b" " * 1000

    assert _error(await stand.http.post("/v1/completions", content=parts()), 413)["code"] == "body_too_large"
    assert (await stand.chat()).status_code == 200


async def test_keys_and_tenants(model: Path, codec: TextCodec) -> None:
    async with standing(model, saying(codec, "moon"), api_keys=KEYS) as stand:
        body = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
        for headers in ({}, {"authorization": "Bearer nope"}, {"authorization": "Basic key-a"}):
            response = await stand.http.post("/v1/chat/completions", json=body, headers=headers)
            error = _error(response, 401)
            assert error["code"] == "invalid_api_key"
            assert response.headers["www-authenticate"] == "Bearer"
            assert "nope" not in error["message"]
            _error(await stand.http.get("/v1/models", headers=headers), 401)
        for key, tenant in KEYS.items():
            headers = {"authorization": f"Bearer {key}"}
            assert (await stand.http.post("/v1/chat/completions", json=body, headers=headers)).status_code == 200
            assert _asked(stand)[-1].tenant == tenant
        assert len(_asked(stand)) == 2
        assert (await stand.http.get("/health")).status_code == 200


async def test_a_service_tier_is_a_class_of_service_and_a_tenant_may_have_one_for_all(
    model: Path, codec: TextCodec
) -> None:
    async with standing(model, saying(codec, "moon"), api_keys=KEYS, tenant_classes={"bolt": "batch"}) as stand:
        body = {"model": MODEL, "prompt": "hello"}
        found = {}
        for key, tenant in KEYS.items():
            for tier in (None, "default", "flex"):
                headers = {"authorization": f"Bearer {key}"}
                answer = await stand.http.post("/v1/completions", json=body | {"service_tier": tier}, headers=headers)
                assert answer.status_code == 200
                found[tenant, tier] = _asked(stand)[-1].service_class
        assert found == {
            ("acme", None): None,
            ("acme", "default"): "interactive",
            ("acme", "flex"): "batch",
            ("bolt", None): "batch",
            ("bolt", "default"): "batch",
            ("bolt", "flex"): "batch",
        }
        headers = {"authorization": f"Bearer {next(iter(KEYS))}"}
        answer = await stand.http.post("/v1/completions", json=body | {"service_tier": "gold"}, headers=headers)
        error = _error(answer, 400)
        assert error["param"] == "service_tier"
        assert "there is 'auto', 'default', 'flex', 'priority', 'scale'" in error["message"]


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (ErrorCode.OVERLOADED, 429, True),
        (ErrorCode.BUSY, 429, True),
        (ErrorCode.NO_WORKERS, 503, True),
        (ErrorCode.UNAVAILABLE, 503, True),
        (ErrorCode.WORKER_LOST, 503, True),
        (ErrorCode.NO_SPACE, 503, True),
        (ErrorCode.DEADLINE, 504, False),
        (ErrorCode.CANCELLED, 409, False),
        (ErrorCode.MODEL_NOT_FOUND, 404, False),
        (ErrorCode.PROMPT_TOO_LONG, 400, False),
        (ErrorCode.INVALID_REQUEST, 400, False),
        (ErrorCode.INVALID_MESSAGE, 400, False),
        (ErrorCode.STALE, 500, False),
        (ErrorCode.INTERNAL, 500, False),
    ],
)
async def test_each_error_of_the_system_has_its_status(stand: Stand, code: ErrorCode, status: int, retry: bool) -> None:
    async def refuse(answering: Answering) -> None:
        await answering.fail(code, "why and what to do")

    stand.cluster.script = refuse
    for stream in (False, True):
        response = await stand.chat(stream=stream)
        assert _error(response, status)["message"] == "why and what to do"
        assert ("retry-after" in response.headers) is retry
    assert set(ErrorCode) == set(ErrorCode.__members__.values())


async def test_without_workers_it_is_503_at_once_and_nobody_hears_of_it(stand: Stand) -> None:
    await stand.cluster.leave("prefill")
    await until(lambda: stand.gateway._cluster.serving(MODEL).missing)
    response = await stand.chat()
    error = _error(response, 503)
    assert error["code"] == "no_workers"
    assert "prefill worker" in error["message"]
    assert int(response.headers["retry-after"]) >= 1
    await stand.cluster.leave("conductor")
    await until(lambda: "conductor" in stand.gateway._cluster.serving(MODEL).missing)
    assert _error(await stand.chat(), 503)["code"] == "unavailable"
    assert _asked(stand) == []


async def test_without_a_broker_it_is_503_at_once(stand: Stand) -> None:
    await stand.runtime.bus.close()
    assert _error(await stand.chat(), 503)["code"] == "unavailable"
    assert (await stand.http.get("/health")).status_code == 200
    assert "message broker" in (await stand.http.get("/ready")).json()["missing"]


async def test_what_should_not_happen_is_500_without_its_details(stand: Stand, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("secret details")

    monkeypatch.setattr("halfmoon.gateway.policy.fan_out", broken)
    response = await stand.chat()
    error = _error(response, 500)
    assert "secret" not in error["message"]
    assert response.headers["x-request-id"] in error["message"]
    monkeypatch.setattr(stand.runtime.metrics, "registry", None)
    monkeypatch.setattr("halfmoon.gateway.app.generate_latest", broken)
    assert "secret" not in _error(await stand.http.get("/metrics"), 500)["message"]


async def test_readiness_follows_a_real_generation(model: Path, codec: TextCodec) -> None:
    working = saying(codec, "moon")

    async def broken(answering: Answering) -> None:
        await answering.fail(ErrorCode.INTERNAL, "no luck")

    async with standing(model, broken, cluster_up=False) as stand:

        async def ready() -> tuple[int, dict[str, Any]]:
            response = await stand.http.get("/ready")
            return response.status_code, response.json()

        status, body = await ready()
        assert status == 503
        assert body["missing"] == ["conductor", "prefill worker", "decode worker"]
        await stand.cluster.start()
        # Everything heartbeats, but nothing generates: that is not ready.
        await _until_ready(stand, 503, "no luck")
        stand.cluster.script = working
        await _until_ready(stand, 200, "passed end to end")
        assert stand.metric("halfmoon_gateway_ready") == 1
        num_probes = len(stand.cluster.seen)
        await stand.cluster.leave("decode")
        await _until_ready(stand, 503, "")
        assert (await ready())[1]["missing"] == ["decode worker"]
        stand.cluster.script = broken
        await stand.cluster.come("decode")
        await _until_ready(stand, 503, "no luck")
        stand.cluster.script = working
        await _until_ready(stand, 200, "passed end to end")
        assert len(stand.cluster.seen) > num_probes + 1
        assert {request.tenant for request in stand.cluster.seen} == {"halfmoon-probe"}


async def _until_ready(stand: Stand, status: int, detail: str) -> None:
    async def says_so() -> bool:
        response = await stand.http.get("/ready")
        return response.status_code == status and detail in response.json()["detail"]

    await until_awaited(says_so, what=f"/ready answers {status}, {detail}")


async def test_a_port_in_use_is_said_with_the_setting(model: Path, codec: TextCodec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartupError, match=rf"127\.0\.0\.1:{port}: .*HALFMOON_GATEWAY_PORT"):
            await _start(model, codec, port=port)


async def test_no_model_is_said_with_the_setting(codec: TextCodec, tmp_path: Path) -> None:
    for model in (None, tmp_path):
        with pytest.raises(StartupError, match="HALFMOON_MODEL"):
            await _start(model, codec)


async def _start(model: Path | None, codec: TextCodec, **settings: Any) -> None:
    async with standing(model, saying(codec, "moon"), **settings):
        pass


async def test_a_drain_finishes_what_runs_and_refuses_the_rest(stand: Stand) -> None:
    going_on = asyncio.Event()

    async def slow(answering: Answering) -> None:
        await answering.tokens([1], "The")
        await going_on.wait()
        await answering.finish()

    stand.cluster.script = slow
    asking = asyncio.create_task(stand.chat())
    await until(lambda: _asked(stand))
    draining = asyncio.create_task(stand.gateway.drain())
    await until(lambda: msgspec.structs.asdict(stand.gateway.heartbeat()).get("state") == "draining")
    assert _error(await stand.chat(), 503)["code"] == "unavailable"
    assert not draining.done()
    going_on.set()
    assert (await asking).json()["choices"][0]["message"]["content"] == "The"
    await asyncio.wait_for(draining, 5)


async def test_a_stop_cancels_what_still_runs(stand: Stand) -> None:
    async def endless(answering: Answering) -> None:
        await answering.tokens([1], "The")
        await asyncio.Event().wait()

    stand.cluster.script = endless
    asking = asyncio.create_task(stand.chat())
    await until(lambda: _asked(stand))
    await stand.gateway.stop()
    # The readiness probe may have been at work as well.
    await until(lambda: stand.cluster.cancelled.count(_asked(stand)[0].request_id) == 1)
    await asyncio.gather(asking, return_exceptions=True)
    await stand.gateway.stop()
