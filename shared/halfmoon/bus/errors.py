"""What can go wrong on a bus. Exceptions of client libraries are mapped to these in one place and never escape."""

from halfmoon.schemas.wire import Error


class BusError(Exception):
    """Base of all bus errors."""


class BusUnavailable(BusError):
    """No broker could be reached, or it refused us, or it lacks what we need. The message says what to do."""


class BusClosed(BusError):
    """The bus was closed, by us or for good."""


class BusDisconnected(BusError):
    """The connection is down, and the buffer for what waits to be sent is full. It comes back by itself."""


class BusTimeout(BusError):
    """No answer came in time. The request may have been carried out all the same."""

    def __init__(self, subject: str, timeout_s: float) -> None:
        super().__init__(f"no answer on {subject!r} within {timeout_s:g} s")
        self.subject = subject
        self.timeout_s = timeout_s


class NoResponders(BusError):
    """Nobody listens on this subject: known at once, without waiting."""

    def __init__(self, subject: str) -> None:
        super().__init__(f"nobody listens on {subject!r}")
        self.subject = subject


class PayloadTooLarge(BusError):
    """A message, headers included, is larger than the broker takes. Nothing was sent."""

    def __init__(self, num_bytes: int, limit_bytes: int) -> None:
        super().__init__(
            f"a message of {num_bytes:,} bytes is over the broker's limit of {limit_bytes:,}; "
            "raise max_payload in the NATS server's settings (halfmoon expects 8 MiB)"
        )
        self.num_bytes = num_bytes
        self.limit_bytes = limit_bytes


class BadSubject(BusError, ValueError):
    """A subject, queue group or header that the protocol doesn't allow."""


class NoStream(BusError):
    """No stream has this name, or captures this subject. `ensure_stream` makes one."""

    def __init__(self, name: str) -> None:
        super().__init__(f"no stream {name!r}, or none that captures it; create it with ensure_stream first")
        self.name = name


class StreamFull(BusError):
    """A work queue is at its limit. The message was not stored: try again later, or turn its sender away."""


class StreamGap(BusError):
    """A stream no longer holds a message that its follower still needed."""

    def __init__(self, stream: str, needed_seq: int, first_seq: int, last_seq: int) -> None:
        super().__init__(
            f"stream {stream!r} holds {first_seq} to {last_seq}, but {needed_seq} was needed next; "
            "take a new snapshot and follow from there"
        )
        self.stream = stream
        self.needed_seq = needed_seq
        self.first_seq = first_seq
        self.last_seq = last_seq


class Undecodable(BusError):
    """Bytes that are not the message they should be. The message says where they differ, for their sender to read."""


class RemoteError(BusError):
    """The other side answered with a typed error; or a handler raises it, to answer with one."""

    def __init__(self, error: Error) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.error = error
