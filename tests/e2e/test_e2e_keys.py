"""What gateway and conductor predict is what the engine makes: the same tokens, the same keys, found in etcd."""

from pathlib import Path

import httpx
import pytest
from transformers import AutoTokenizer

from halfmoon.bus.codec import Decoder
from halfmoon.bus.endpoint import call
from halfmoon.bus.protocol import BusMessage
from halfmoon.chunks.keys import Namespace, chunk_keys
from halfmoon.schemas import subjects
from halfmoon.schemas.registry import LookedUp, Lookup
from halfmoon.schemas.splits import DecodeHalf, PrefillHalf
from support.halves import halves
from support.system import System
from support.wait import until_awaited

pytestmark = [pytest.mark.timeout(300), pytest.mark.model]

MODEL = "SmolLM2-135M-Instruct"
CHUNK_TOKENS = 64
MESSAGES = [
    {"role": "system", "content": "You are a keeper of lighthouses, and answer briefly."},
    {"role": "user", "content": "Tell me about fog, lamps, lenses and the sea. " * 12},
    {"role": "assistant", "content": "Fog hides, lamps show."},
    {"role": "user", "content": "And the sea?"},
]

_HALF = Decoder[PrefillHalf | DecodeHalf](PrefillHalf | DecodeHalf)


async def test_a_chat_request_has_the_keys_that_everybody_expects(shm_system: System, model: Path) -> None:
    expected_tokens = AutoTokenizer.from_pretrained(model).apply_chat_template(
        MESSAGES, add_generation_prompt=True, return_dict=False
    )
    halves_heard: list[PrefillHalf | DecodeHalf] = []

    async def hear(message: BusMessage) -> None:
        if message.subject.startswith("halfmoon.request.split.") and b"split." in message.data[:40]:
            halves_heard.append(_HALF.decode(message.data))

    async with halves(shm_system.nats_url) as driver:
        subscription = await driver.bus.subscribe(subjects.SPLIT_ALL, hear)
        async with httpx.AsyncClient(base_url=shm_system.url, timeout=60) as client:
            body = {"model": MODEL, "messages": MESSAGES, "max_tokens": 1, "temperature": 0}
            first = (await client.post("/v1/chat/completions", json=body)).json()
            second = (await client.post("/v1/chat/completions", json=body)).json()
        await subscription.unsubscribe()
        root = Namespace.of(driver.card, tenant_salt="default").root()
        keys = chunk_keys(root, expected_tokens, CHUNK_TOKENS)
        found: list[LookedUp] = []

        async def has_all() -> bool:
            question = Lookup(keys=tuple(keys))
            found.append(await call(driver.bus, subjects.registry("lookup"), question, LookedUp, timeout_s=5.0))
            return all(found[-1].placements)

        await until_awaited(has_all, what="the registry has every chunk")
    assert len(keys) >= 2
    assert {half.tokens for half in halves_heard} == {tuple(expected_tokens)}
    assert {half.root for half in halves_heard} == {root}
    chunks = [placements[0].chunk for placements in found[-1].placements]
    assert [chunk.key for chunk in chunks] == keys
    assert [chunk.index for chunk in chunks] == list(range(len(keys)))
    assert {chunk.num_bytes for chunk in chunks} == {CHUNK_TOKENS * driver.card.kv_bytes_per_token}
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == len(keys) * CHUNK_TOKENS
    assert first["choices"] == second["choices"]
