"""Streams over core messages: the JetStream API is request-reply on `$JS.API.>`, in JSON.

Reference: https://docs.nats.io/reference/reference-protocols/nats_api_reference
"""

import asyncio
from collections.abc import Mapping
from typing import Final

import msgspec

from halfmoon.bus.errors import BusError, BusTimeout, BusUnavailable, NoResponders, NoStream, StreamFull, StreamGap
from halfmoon.bus.protocol import Bus, Retention, StreamSpec

API: Final = "$JS.API"
API_TIMEOUT_S: Final = 5.0
HEADER_MSG_ID: Final = "Nats-Msg-Id"
NS_PER_S: Final = 1_000_000_000

_PUBLISH_ATTEMPT_S = 2.0
_RETRY_PAUSE_S = 0.1

_MESSAGE_NOT_FOUND = 10037
_STREAM_NOT_FOUND = 10059
_STREAM_NAME_IN_USE = 10058
_NOT_ENABLED = (10039, 10076)


class ApiError(BusError):
    """JetStream refused a request."""

    def __init__(self, description: str, code: int, err_code: int) -> None:
        super().__init__(f"JetStream: {description} (code {err_code or code})")
        self.description = description
        self.code = code
        self.err_code = err_code


class _ErrorBody(msgspec.Struct):
    code: int = 0
    err_code: int = 0
    description: str = ""


class Bounds(msgspec.Struct):
    """What a stream holds: first to last sequence. Empty where first is after last, or both are 0."""

    first_seq: int = 0
    last_seq: int = 0


class _StreamConfig(msgspec.Struct):
    retention: str = ""


class _Answer(msgspec.Struct):
    """The fields that we need of all the answers that there are."""

    error: _ErrorBody | None = None
    state: Bounds = msgspec.field(default_factory=Bounds)
    config: _StreamConfig = msgspec.field(default_factory=_StreamConfig)
    name: str = ""
    seq: int = 0


class JetStream:
    def __init__(self, bus: Bus) -> None:
        self.bus = bus
        self._decoder = msgspec.json.Decoder(_Answer)

    async def call(self, verb: str, body: Mapping[str, object] | None = None) -> _Answer:
        """One API request. Raises `ApiError`, `BusTimeout`, and `BusUnavailable` where JetStream is off."""
        data = msgspec.json.encode(body) if body is not None else b""
        try:
            reply = await self.bus.request(f"{API}.{verb}", data, timeout_s=API_TIMEOUT_S)
        except NoResponders as error:
            raise BusUnavailable(
                "the NATS server has no JetStream: start it with `nats-server -js`, or enable it for this account"
            ) from error
        answer = self._decoder.decode(reply.data)
        if answer.error is not None:
            found = answer.error
            if found.err_code in _NOT_ENABLED:
                raise BusUnavailable(f"JetStream is not enabled for this account ({found.description})")
            raise ApiError(found.description, found.code, found.err_code)
        return answer

    async def bounds(self, stream: str) -> Bounds:
        """Raises `NoStream`."""
        try:
            return (await self.call(f"STREAM.INFO.{stream}")).state
        except ApiError as error:
            raise _stream_error(error, stream) from error

    async def has(self, stream: str, seq: int) -> bool:
        """Raises `NoStream`."""
        try:
            await self.call(f"STREAM.MSG.GET.{stream}", {"seq": seq})
        except ApiError as error:
            if error.err_code == _MESSAGE_NOT_FOUND:
                return False
            raise _stream_error(error, stream) from error
        return True

    async def ensure_stream(self, spec: StreamSpec) -> None:
        config: dict[str, object] = {
            "name": spec.name,
            "subjects": list(spec.subjects),
            "retention": spec.retention.value,
            "storage": "file",
            "discard": "new" if spec.retention is Retention.WORK_QUEUE else "old",
            "max_age": int(spec.max_age_s * NS_PER_S),
            "max_bytes": spec.max_bytes,
            "max_msgs": -1,
            "max_msg_size": -1,
            "max_consumers": -1,
            "max_msgs_per_subject": -1,
            "num_replicas": spec.num_replicas,
            "duplicate_window": int(spec.duplicate_window_s * NS_PER_S),
        }
        try:
            await self.call(f"STREAM.CREATE.{spec.name}", config)
        except ApiError as error:
            if error.err_code != _STREAM_NAME_IN_USE:
                raise BusError(f"stream {spec.name!r} can't be created: {error.description}") from error
            try:
                await self.call(f"STREAM.UPDATE.{spec.name}", config)
            except ApiError as refused:
                raise BusError(
                    f"stream {spec.name!r} exists with other settings that can't be changed to these: "
                    f"{refused.description}; delete it (`nats stream rm {spec.name}`), or use another NATS account"
                ) from refused

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None,
        msg_id: str | None,
        timeout_s: float,
    ) -> int:
        sent = dict(headers or {})
        if msg_id is not None:
            sent[HEADER_MSG_ID] = msg_id
        deadline = asyncio.get_running_loop().time() + timeout_s
        while True:
            left_s = deadline - asyncio.get_running_loop().time()
            # A repeat is harmless only where the broker can tell that it is one.
            attempt_s = max(0.001, min(_PUBLISH_ATTEMPT_S, left_s) if msg_id is not None else left_s)
            last = msg_id is None or left_s <= _PUBLISH_ATTEMPT_S
            try:
                reply = await self.bus.request(subject, data, timeout_s=attempt_s, headers=sent)
            except NoResponders as error:
                if last or not self.bus.is_connected:
                    raise NoStream(subject) from error
                # A broker that has just started listens before its streams do.
                await asyncio.sleep(_RETRY_PAUSE_S)
            except BusTimeout as error:
                if last:
                    raise BusTimeout(subject, timeout_s) from error
            else:
                return self._published(subject, reply.data)

    def _published(self, subject: str, data: bytes) -> int:
        try:
            answer = self._decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise NoStream(subject) from error
        if answer.error is None:
            if not answer.seq:
                raise NoStream(subject)
            return answer.seq
        description = answer.error.description
        if "maximum" in description or "insufficient" in description:
            raise StreamFull(f"the stream behind {subject!r} is full ({description}); try again later")
        raise ApiError(description, answer.error.code, answer.error.err_code)

    async def create_consumer(self, stream: str, config: Mapping[str, object]) -> None:
        try:
            await self.call(f"CONSUMER.CREATE.{stream}.{config['name']}", {"stream_name": stream, "config": config})
        except ApiError as error:
            raise _stream_error(error, stream) from error

    async def delete_consumer(self, stream: str, name: str) -> None:
        """Tidy up; an ephemeral consumer that stays behind goes by itself."""
        try:
            await self.call(f"CONSUMER.DELETE.{stream}.{name}")
        except BusError:
            return

    async def check_reach(self, stream: str, needed_seq: int) -> None:
        """Raises `StreamGap` unless the stream has `needed_seq`, or will have it next."""
        state = await self.bounds(stream)
        if needed_seq < state.first_seq or needed_seq > state.last_seq + 1:
            raise StreamGap(stream, needed_seq, state.first_seq, state.last_seq)


def _stream_error(error: ApiError, stream: str) -> BusError:
    return NoStream(stream) if error.err_code == _STREAM_NOT_FOUND else error
