"""Prompts given as text, made into tokens with the gateway's code."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from halfmoon.schemas.ids import ModelName
from halfmoon.schemas.requests import RequestSubmitted
from halfmoon.schemas.wire import Error, ErrorCode
from halfmoon.text import TextCodec, TextError


class Texts:
    """The tokenizer of one model, or none: then only prompts in tokens are taken."""

    def __init__(self, codec: TextCodec | None, model: ModelName | None) -> None:
        self._codec = codec
        self._model = model

    @classmethod
    async def load(cls, path: Path | None, name: str | None) -> "Texts":
        """Raises `TokenizerUnusable`."""
        if path is None:
            return cls(None, None)
        codec = await asyncio.to_thread(TextCodec.load, path)
        return cls(codec, ModelName(name or (path.stem if path.is_file() else path.name)))

    async def tokens(self, body: RequestSubmitted, model: ModelName) -> Sequence[int] | Error:
        """The prompt's tokens, however it was given; or why there are none."""
        if body.tokens is not None:
            return body.tokens
        if self._codec is None or self._model != model:
            has = f"one for {self._model!r}" if self._model is not None else "none"
            return Error(
                code=ErrorCode.INVALID_REQUEST,
                message=f"text for {model!r} needs a tokenizer, and this conductor has {has}: "
                "submit tokens, or set the conductor's HALFMOON_MODEL (and HALFMOON_MODEL_NAME)",
            )
        try:
            if body.prompt is not None:
                return await asyncio.to_thread(self._codec.encode, body.prompt)
            return await asyncio.to_thread(self._codec.encode_chat, body.messages or ())
        except TextError as error:
            return Error(code=ErrorCode.INVALID_REQUEST, message=str(error))
