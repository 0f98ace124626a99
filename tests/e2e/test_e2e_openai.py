"""The gateway on the real system, through the unchanged `openai` client."""

from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from halfmoon.bus.nats import NatsBus, NatsSettings
from halfmoon.bus.protocol import BusMessage
from halfmoon.schemas import subjects
from support.system import System

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
QUESTION: Any = [{"role": "user", "content": "Name three colours, and say hello with an emoji 🌙👋🏽."}]


@pytest.fixture
def client(shm_system: System) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{shm_system.url}/v1", api_key="unused", max_retries=0, timeout=60) as client:
        yield client


def test_streamed_text_equals_the_whole(client: openai.OpenAI) -> None:
    arguments: Any = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**arguments)
    stream = client.chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason] == [
        whole.choices[0].finish_reason
    ]
    assert chunks[-1].choices == []
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens == 12
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens


def test_emoji_come_whole(client: openai.OpenAI) -> None:
    """The model continues a row of emoji, each of which is several tokens."""
    arguments: Any = {"model": MODEL, "prompt": "🌙👋🏽🚀🌙👋🏽🚀🌙👋🏽🚀🌙👋🏽🚀", "max_tokens": 16, "temperature": 0}
    whole = client.completions.create(**arguments).choices[0].text
    pieces = [chunk.choices[0].text for chunk in client.completions.create(**arguments, stream=True)]
    assert "".join(pieces) == whole
    assert any(ord(character) > 0xFFFF for character in whole)
    assert not any("\ufffd" in piece for piece in pieces[:-1])


def test_one_token_is_one_token(client: openai.OpenAI) -> None:
    answer = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=1, temperature=0)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 1
    assert answer.choices[0].text == " or"


def test_a_list_of_prompts_and_two_choices_each(client: openai.OpenAI) -> None:
    prompts = ["One, two,", "The capital of France is"]
    alone = [
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0).choices[0].text
        for prompt in prompts
    ]
    together = client.completions.create(model=MODEL, prompt=prompts, max_tokens=3, temperature=0, n=2)
    assert [choice.index for choice in together.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in together.choices] == [alone[0], alone[0], alone[1], alone[1]]


def test_seeds_decide_and_choices_differ(client: openai.OpenAI) -> None:
    def ask(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=QUESTION, max_tokens=6, temperature=1.5, seed=seed, n=2
        )
        return [choice.message.content for choice in answer.choices]

    first, again, other = ask(1), ask(1), ask(2)
    assert first == again
    assert first[0] != first[1]
    assert first != other


def test_stop_strings_end_the_text_before_them(client: openai.OpenAI) -> None:
    answer = client.completions.create(
        model=MODEL, prompt="One, two, three, four,", max_tokens=16, temperature=0, stop=[" seven", "never"]
    )
    assert answer.choices[0].text == " five, six,"
    assert answer.choices[0].finish_reason == "stop"


def test_a_logprob_for_every_token_the_first_included(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=7, temperature=0, logprobs=True, top_logprobs=2
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert answer.usage is not None
    assert len(logprobs.content) == answer.usage.completion_tokens == 7
    said = b"".join(bytes(entry.bytes or ()) for entry in logprobs.content)
    assert said.decode(errors="replace") == answer.choices[0].message.content
    assert all(entry.logprob == entry.top_logprobs[0].logprob for entry in logprobs.content)


def test_usage_shows_what_was_cached(client: openai.OpenAI) -> None:
    prompt = "A long story about the moon and the tides, told slowly. " * 14  # three whole chunks of 64 tokens
    arguments: Any = {"model": MODEL, "prompt": prompt, "max_tokens": 2, "temperature": 0}
    cold = client.completions.create(**arguments).usage
    warm = client.completions.create(**arguments).usage
    stream = client.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    streamed = list(stream)[-1].usage
    assert cold is not None
    assert warm is not None
    assert streamed is not None
    assert cold.prompt_tokens_details is not None
    assert warm.prompt_tokens_details is not None
    assert streamed.prompt_tokens_details is not None
    assert cold.prompt_tokens_details.cached_tokens == 0
    whole_chunks = cold.prompt_tokens // 64 * 64
    assert whole_chunks >= 64
    assert warm.prompt_tokens_details.cached_tokens == whole_chunks
    assert streamed.prompt_tokens_details.cached_tokens == whole_chunks
    assert warm.total_tokens == warm.prompt_tokens + warm.completion_tokens


async def test_an_over_long_prompt_is_refused_before_anybody_hears_of_it(shm_system: System) -> None:
    heard: list[str] = []

    async def hear(message: BusMessage) -> None:
        heard.append(message.subject)

    bus = await NatsBus.connect(NatsSettings(url=shm_system.nats_url))
    try:
        for subject in (subjects.SPLIT_ALL, subjects.REQUEST_ALL):
            await bus.subscribe(subject, hear)
        async with httpx.AsyncClient(base_url=shm_system.url, timeout=30) as http:
            body = {"model": MODEL, "prompt": [[5] * 8193], "max_tokens": 1}
            answer = await http.post("/v1/completions", json=body)
        await bus.flush()
        mine = [subject for subject in heard if "request" in subject]
    finally:
        await bus.close()
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "8193" in error["message"]
    assert "8192" in error["message"]
    assert error["code"] == "context_length_exceeded"
    assert mine == []


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "JSON"),
        (b'{"model": 5}', 400, "model"),
        (b'{"model": "SmolLM2-135M-Instruct", "messages": []}', 400, "messages"),
        (b'{"model": "gpt-9", "messages": [{"role": "user", "content": "x"}]}', 404, "gpt-9"),
        (
            b'{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "x"}], "max_tokens": 0}',
            400,
            "max_tokens",
        ),
        (
            b'{"model": "SmolLM2-135M-Instruct", "messages": [{"role": "user", "content": "x"}], "temperature": "hot"}',
            400,
            "temperature",
        ),
    ],
)
def test_bad_requests_get_clear_errors(shm_system: System, body: bytes, status: int, words: str) -> None:
    answer = httpx.post(
        f"{shm_system.url}/v1/chat/completions", content=body, headers={"content-type": "application/json"}, timeout=30
    )
    assert answer.status_code == status
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert words in error["message"]
    assert "Traceback" not in answer.text


def test_health_readiness_models_and_metrics(shm_system: System, client: openai.OpenAI) -> None:
    assert httpx.get(f"{shm_system.url}/health").status_code == 200
    assert httpx.get(f"{shm_system.url}/ready").status_code == 200
    assert [model.id for model in client.models.list().data] == [MODEL]
    metrics = httpx.get(f"{shm_system.url}/metrics").text
    assert "halfmoon_gateway_ttft_seconds_bucket" in metrics
