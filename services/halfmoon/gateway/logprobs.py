"""Log probabilities in the two shapes that the API has for them."""

from halfmoon.gateway.openai_types import ChatLogprobs, CompletionLogprobs, LogprobAlternative, LogprobEntry
from halfmoon.schemas.requests import TokenLogprob
from halfmoon.text import TextCodec


def chat_logprobs(logprobs: tuple[TokenLogprob, ...], codec: TextCodec) -> ChatLogprobs:
    return ChatLogprobs(
        content=[
            LogprobEntry(
                token=entry.text,
                logprob=entry.logprob,
                bytes=list(codec.token_bytes(entry.token)),
                top_logprobs=[
                    LogprobAlternative(token=top.text, logprob=top.logprob, bytes=list(codec.token_bytes(top.token)))
                    for top in entry.top
                ],
            )
            for entry in logprobs
        ]
    )


class CompletionLogprobWriter:
    """One choice's, in order: keeps the place in the text between the chunks of a stream."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._written = b""
        self._offset = 0

    def write(self, logprobs: tuple[TokenLogprob, ...]) -> CompletionLogprobs:
        offsets: list[int] = []
        for entry in logprobs:
            offsets.append(self._offset)
            self._advance(self._codec.token_bytes(entry.token))
        with_top = any(entry.top for entry in logprobs)
        return CompletionLogprobs(
            text_offset=offsets,
            token_logprobs=[entry.logprob for entry in logprobs],
            tokens=[entry.text for entry in logprobs],
            top_logprobs=[{top.text: top.logprob for top in entry.top} for entry in logprobs] if with_top else None,
        )

    def _advance(self, token: bytes) -> None:
        """Count whole characters only: one that is spread over tokens belongs where it began."""
        self._written += token
        whole = self._written.decode(errors="ignore")
        self._offset += len(whole)
        self._written = self._written[len(whole.encode()) :]
