"""Bytes to requests: the same bytes give the same request, and no bytes give an exception."""

import json

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from halfmoon.bus.codec import encode
from halfmoon.bus.protocol import BusMessage
from halfmoon.conductor.intake import Reader, Refused, Submission
from halfmoon.schemas.ids import ModelName, RequestId
from halfmoon.schemas.requests import Encoding, RequestCancel, RequestSubmitted
from halfmoon.schemas.wire import ErrorCode

READER = Reader(120.0)
SUBJECT = "halfmoon.request.org/model-1%2E5"


def read(
    data: bytes, headers: dict[str, str] | None = None, *, seq: int = 1, now_ns: int = 1000
) -> Submission | RequestCancel | Refused:
    headers = {"halfmoon-reply": "r"} if headers is None else headers
    return READER.read(BusMessage(SUBJECT, data, headers), stream_seq=seq, now_ns=now_ns)


def submission(data: bytes, headers: dict[str, str] | None = None, *, seq: int = 1) -> Submission:
    found = read(data, headers, seq=seq)
    assert isinstance(found, Submission), found
    return found


def test_what_is_left_out_is_drawn_from_the_message() -> None:
    data = json.dumps({"prompt": "hello"}).encode()
    first, again, other = submission(data), submission(data), submission(data, seq=2)
    assert first.request_id == again.request_id != other.request_id
    assert first.seed == again.seed != other.seed
    assert first.model == "org/model-1.5"
    assert first.deadline_ns == 1000 + 120 * 10**9


def test_an_outside_client_writes_messagepack_with_a_plain_library() -> None:
    found = submission(msgpack.packb({"type": "request.submitted.v1", "tokens": [1, 2], "reply": "mine"}), {})
    assert (found.body.tokens, found.reply, found.encoding) == ((1, 2), "mine", Encoding.MSGPACK)


def test_headers_come_before_the_field_for_the_reply_and_after_it_for_the_deadline() -> None:
    data = encode(RequestSubmitted(tokens=(1,), reply="field", deadline_ns=7, model=ModelName("m")))
    found = submission(data, {"Halfmoon-Reply": "header", "Halfmoon-Deadline": "9"})
    assert (found.reply, found.deadline_ns, found.model) == ("header", 7, "m")
    data = encode(RequestSubmitted(tokens=(1,)))
    assert submission(data, {"halfmoon-reply": "r", "halfmoon-deadline": "9"}).deadline_ns == 9


def test_token_events_are_written_as_asked() -> None:
    data = encode(RequestSubmitted(tokens=(1,), encoding=Encoding.JSON))
    assert submission(data).encoding is Encoding.JSON
    assert submission(b'{"tokens": [1]}').encoding is Encoding.JSON


def test_a_cancel_in_the_queue_is_a_cancel() -> None:
    cancel = RequestCancel(request_id=RequestId("req-1"))
    assert read(encode(cancel)) == cancel


@pytest.mark.parametrize(
    ("data", "headers", "code", "reply"),
    [
        (b'{"request_id": "x", "reply": "r", "tokens": "no"}', {}, ErrorCode.INVALID_MESSAGE, "r"),
        (b'{"request_id": "x", "tokens": [1]}', {}, ErrorCode.INVALID_REQUEST, None),
        (b'{"request_id": "x", "tokens": [1], "reply": "a..b"}', {}, ErrorCode.INVALID_REQUEST, None),
        (b'{"request_id": "x", "tokens": [1], "reply": "a.*"}', {}, ErrorCode.INVALID_REQUEST, None),
        (
            b'{"request_id": "x", "tokens": [1]}',
            {"halfmoon-reply": "r", "halfmoon-deadline": "soon"},
            ErrorCode.INVALID_REQUEST,
            "r",
        ),
    ],
)
def test_what_is_wrong_is_said_to_whom_it_can_be(
    data: bytes, headers: dict[str, str], code: ErrorCode, reply: str | None
) -> None:
    refused = read(data, headers)
    assert isinstance(refused, Refused)
    assert (refused.error.code, refused.reply, refused.request_id) == (code, reply, "x")
    assert refused.encoding is Encoding.JSON


def test_an_error_does_not_quote_the_prompt() -> None:
    refused = read(b'{"prompt": "my secret", "tokens": "my other secret"}')
    assert isinstance(refused, Refused)
    assert "secret" not in refused.error.message


@given(st.one_of(st.binary(max_size=200), st.binary(max_size=100).map(lambda tail: b"{" + tail)))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(read(data), Submission | RequestCancel | Refused)


@given(
    st.dictionaries(
        st.sampled_from(["type", "request_id", "reply", "tokens", "prompt", "messages", "sampling", "deadline_ns"]),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(2**65), 2**65) | st.text(max_size=5) | st.floats(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
            max_leaves=5,
        ),
    )
)
def test_no_json_object_raises(body: dict[str, object]) -> None:
    assert isinstance(read(json.dumps(body).encode()), Submission | RequestCancel | Refused)
