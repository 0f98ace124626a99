"""Prompts as text and as chat messages, straight over NATS: the gateway's tokens."""

import json
from pathlib import Path

import pytest

from halfmoon.lifecycle import StartupError
from halfmoon.schemas.wire import ErrorCode
from halfmoon.text import TextCodec
from support.buses import BusMaker
from support.conductors import MODEL, SPLIT_PAIR, Stage, conductor_on
from support.tiny_tokenizer import byte_level
from support.wait import until


async def test_text_and_chat_become_the_tokens_that_the_gateway_makes(bus_maker: BusMaker, tmp_path: Path) -> None:
    model = byte_level(tmp_path / "model")
    codec = TextCodec.load(model)
    stage = Stage(bus_maker)
    try:
        await stage.open(*SPLIT_PAIR, model=model, model_name=MODEL)
        decode = stage.workers["d1"]
        chat = [{"role": "user", "content": "hello moon"}]
        await stage.client.submit_raw(json.dumps({"request_id": "text", "prompt": "hello world"}).encode())
        await stage.client.submit_raw(json.dumps({"request_id": "chat", "messages": chat}).encode())
        await until(lambda: len(decode.decodes) == 2)
        tokens = {half.request_id: list(half.tokens) for half in decode.decodes}
        assert tokens == {"text": codec.encode("hello world"), "chat": codec.encode_chat(chat)}
    finally:
        await stage.close()


async def test_messages_that_the_template_refuses_are_an_invalid_request(bus_maker: BusMaker, tmp_path: Path) -> None:
    stage = Stage(bus_maker)
    try:
        await stage.open(*SPLIT_PAIR, model=byte_level(tmp_path / "model"), model_name=MODEL)
        await stage.client.submit_raw(json.dumps({"messages": [{"role": "tool", "content": "my secret"}]}).encode())
        await until(lambda: bool(stage.client.events))
        error = stage.client.failure()
        assert error.code is ErrorCode.INVALID_REQUEST
        assert "secret" not in error.message
        assert stage.workers["d1"].decodes == []
    finally:
        await stage.close()


async def test_a_model_without_a_tokenizer_stops_the_start_with_its_reason(bus_maker: BusMaker, tmp_path: Path) -> None:
    conductor, _, _ = conductor_on(await bus_maker(), model=tmp_path)
    with pytest.raises(StartupError, match=r"tokenizer\.json"):
        await conductor.start()
    await conductor.stop()
    await conductor.telemetry.aclose()
