"""One end of a reliable connection (RC), with a completion queue of its own. For one thread at a time."""

import secrets
import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from halfmoon.schemas.rdma import LinkLayer, QueuePairEnd
from halfmoon.transport.rdma.device import Device, Region

_MAX_READS = 16
"""On their way at once, where both devices can do as many. More gains nothing once the wire is full."""
_TIMEOUT_CODE = 15
"""An answer is waited for 4.096 µs · 2^15 = 134 ms, and then asked for again."""
_RETRIES = 6
"""So a peer that is silent for about a second is taken for dead. Not 7, the most: Soft-RoCE reads that as for ever."""
_NOT_READY_RETRIES = 7
_POLL_AT_ONCE = 32
_BIND_S = 5.0
_HOP_LIMIT = 64
_MTUS_BYTES = (256, 512, 1024, 2048, 4096)


class Status(Enum):
    OK = auto()
    NO_ACCESS = auto()
    """The other side refused: the key opens nothing, or not this range."""
    NO_ANSWER = auto()
    """The other side is gone."""
    DROPPED = auto()
    """Not done, because something before it failed."""
    BROKEN = auto()


@dataclass(frozen=True, slots=True)
class Completion:
    token: int
    status: Status
    detail: str


class QueuePairError(Exception):
    """A queue pair that can't be made, connected or used."""


@dataclass(frozen=True, slots=True)
class Window:
    """A range of memory that the other end of one queue pair may read, until `close`."""

    handle: Any
    key: int

    def close(self) -> None:
        self.handle.close()


class QueuePair:
    """Made, then connected, then used, then closed. Errors of the library come out as `QueuePairError`."""

    def __init__(self, device: Device, *, max_posted: int) -> None:
        """`max_posted`: operations that may be outstanding."""
        verbs = device.verbs
        self.device = device
        self.max_posted = max_posted
        self._verbs = verbs
        self._sequence = secrets.randbits(24)
        self._is_open = True
        try:
            self._completions: Any = verbs.cq.CQ(device.context, max_posted + 1, None, None, 0)
            capacity = verbs.qp.QPCap(max_send_wr=max_posted, max_recv_wr=1, max_send_sge=1, max_recv_sge=1)
            wanted = verbs.qp.QPInitAttr(
                qp_type=verbs.enums.IBV_QPT_RC,
                scq=self._completions,
                rcq=self._completions,
                cap=capacity,
                sq_sig_all=0,
            )
            self._pair: Any = verbs.qp.QP(device.domain, wanted)
        except verbs.error as error:
            raise QueuePairError(f"{device.port.device} makes no queue pair: {error}") from None

    @property
    def end(self) -> QueuePairEnd:
        return QueuePairEnd(port=self.device.port, number=int(self._pair.qp_num), first_sequence=self._sequence)

    def connect(self, peer: QueuePairEnd, *, is_readable: bool) -> None:
        """Ready for use; `is_readable`: the peer may read what it is given keys for. Nobody may ever write."""
        if (reason := _misfit(peer)) is not None:
            raise QueuePairError(f"what the peer says of its queue pair can't be: {reason}")
        verbs, own, theirs = self._verbs, self.device.port, peer.port
        enums = verbs.enums
        attributes = verbs.qp.QPAttr(port_num=own.port)
        attributes.qp_access_flags = int(enums.IBV_ACCESS_REMOTE_READ) if is_readable else 0
        attributes.path_mtu = (min(own.mtu_bytes, theirs.mtu_bytes) // 128).bit_length() - 1
        attributes.dest_qp_num = peer.number
        attributes.rq_psn = peer.first_sequence
        attributes.sq_psn = self._sequence
        attributes.max_rd_atomic = min(_MAX_READS, own.max_initiated_reads, theirs.max_reads)
        attributes.max_dest_rd_atomic = min(_MAX_READS, own.max_reads)
        attributes.timeout = _TIMEOUT_CODE
        attributes.retry_cnt = _RETRIES
        attributes.rnr_retry = _NOT_READY_RETRIES
        attributes.min_rnr_timer = 12
        try:
            attributes.ah_attr = verbs.addr.AHAttr(
                port_num=own.port,
                dlid=theirs.lid,
                is_global=int(own.link_layer is LinkLayer.ETHERNET),
                gr=verbs.addr.GlobalRoute(
                    dgid=verbs.addr.GID(_gid_text(theirs.gid)), sgid_index=own.gid_index, hop_limit=_HOP_LIMIT
                ),
            )
            self._pair.to_rts(attributes)
        except verbs.error as error:
            raise QueuePairError(f"{own.device} doesn't connect to {theirs.device} of the peer: {error}") from None

    def post_read(
        self, token: int, local_address: int, local_key: int, num_bytes: int, remote_address: int, remote_key: int
    ) -> None:
        """Begin a READ; a `Completion` with this token follows."""
        verbs = self._verbs
        work = verbs.wr.SendWR(
            wr_id=token,
            opcode=verbs.enums.IBV_WR_RDMA_READ,
            num_sge=1,
            sg=[verbs.wr.SGE(local_address, num_bytes, local_key)],
            send_flags=verbs.enums.IBV_SEND_SIGNALED,
        )
        work.set_wr_rdma(remote_key, remote_address)
        self._post(work)

    def open_windows(self, region: Region, ranges: list[tuple[int, int]]) -> list[Window]:
        """A window on each `(address, bytes)` of the region, for the other end of this queue pair alone.

        `len(ranges)` is at most `max_posted`. Each is a window of its own: pyverbs can't bind one again, since it
        doesn't let the key be renewed. Raises `QueuePairError`; then none is open.
        """
        verbs, windows = self._verbs, list[Window]()
        try:
            for index, (address, num_bytes) in enumerate(ranges):
                handle = verbs.mr.MW(self.device.domain, verbs.enums.IBV_MW_TYPE_2)
                work = verbs.wr.SendWR(
                    wr_id=index,
                    opcode=verbs.enums.IBV_WR_BIND_MW,
                    num_sge=0,
                    send_flags=verbs.enums.IBV_SEND_SIGNALED if index == len(ranges) - 1 else 0,
                )
                scope = verbs.mr.MWBindInfo(region.handle, address, num_bytes, verbs.enums.IBV_ACCESS_REMOTE_READ)
                work.set_bind_wr(handle, scope)
                windows.append(Window(handle, int(work.rkey)))
                self._post(work)
            if ranges:
                self._await_binding()
        except (QueuePairError, verbs.error) as error:
            for window in windows:
                window.close()
            raise QueuePairError(f"{self.device.port.device} opens no window: {error}") from None
        return windows

    def poll(self) -> list[Completion]:
        """What is done by now; doesn't wait."""
        try:
            _, done = self._completions.poll(_POLL_AT_ONCE)
        except self._verbs.error as error:
            raise QueuePairError(str(error)) from None
        return [Completion(int(each.wr_id), *self._status(int(each.status))) for each in done or ()]

    def fail(self) -> None:
        """Stop: what is outstanding is dropped, and completes as such."""
        try:
            self._pair.modify(
                self._verbs.qp.QPAttr(qp_state=self._verbs.enums.IBV_QPS_ERR), self._verbs.enums.IBV_QP_STATE
            )
        except self._verbs.error as error:
            raise QueuePairError(str(error)) from None

    def close(self) -> None:
        """When it returns, the device touches no memory on behalf of this queue pair any more. Idempotent."""
        if self._is_open:
            self._is_open = False
            self._pair.close()
            self._completions.close()

    def _post(self, work: Any) -> None:
        try:
            self._pair.post_send(work)
        except self._verbs.error as error:
            raise QueuePairError(str(error)) from None

    def _await_binding(self) -> None:
        limit_s = time.monotonic() + _BIND_S
        while time.monotonic() < limit_s:
            for done in self.poll():
                if done.status is not Status.OK:
                    raise QueuePairError(done.detail)
                return
            time.sleep(0)
        raise QueuePairError(f"no answer from the device within {_BIND_S:g} s")

    def _status(self, code: int) -> tuple[Status, str]:
        enums = self._verbs.enums
        known = {
            int(enums.IBV_WC_SUCCESS): (Status.OK, ""),
            int(enums.IBV_WC_REM_ACCESS_ERR): (Status.NO_ACCESS, "the peer's device refuses the key or the range"),
            int(enums.IBV_WC_REM_INV_REQ_ERR): (Status.NO_ACCESS, "the peer's device refuses the request"),
            int(enums.IBV_WC_RETRY_EXC_ERR): (Status.NO_ANSWER, "the peer's device doesn't answer"),
            int(enums.IBV_WC_RNR_RETRY_EXC_ERR): (Status.NO_ANSWER, "the peer's device isn't ready"),
            int(enums.IBV_WC_WR_FLUSH_ERR): (Status.DROPPED, "dropped"),
        }
        return known.get(code, (Status.BROKEN, f"work completion status {code}"))


def _misfit(end: QueuePairEnd) -> str | None:
    """What about a peer's end is out of the bounds of the specification; None where nothing is."""
    port = end.port
    if not 0 <= end.number < 1 << 24 or not 0 <= end.first_sequence < 1 << 24:
        return f"number {end.number} or first sequence {end.first_sequence} of over 24 bits"
    if port.mtu_bytes not in _MTUS_BYTES:
        return f"an MTU of {port.mtu_bytes} bytes"
    if len(port.gid) != 16 or not 0 <= port.lid < 1 << 16:
        return f"a GID of {len(port.gid)} bytes, and LID {port.lid}"
    if port.max_reads < 1 or port.max_initiated_reads < 1 or port.max_message_bytes < 1:
        return "a limit below 1"
    return None


def _gid_text(gid: bytes) -> str:
    return ":".join(gid[start : start + 2].hex() for start in range(0, 16, 2))
