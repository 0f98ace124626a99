"""What all conductors have promised and served, as each of them hears it: the outlook, and everyone's account. Pure.

It is told by the messages that `flights.py` is told by, and by none of its own; so the books of several conductors
agree as far as those messages were heard.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from halfmoon.scheduling.fairness import Share
from halfmoon.scheduling.outlook import Outlook
from halfmoon.scheduling.service_class import DEFAULT_CLASS
from halfmoon.scheduling.waiting import WaitingRoom
from halfmoon.schemas.ids import ModelName, RequestId, WorkerId
from halfmoon.schemas.members import WorkerHeartbeat
from halfmoon.schemas.splits import DecodeHalf, HalfEnded, Role

MAX_ACCOUNTS = 20_000
"""Requests whose tokens are being counted; of more, the oldest are served for nothing."""

Room = WaitingRoom[RequestId]


@dataclass(slots=True)
class _Account:
    model: ModelName
    share: Share
    num_generated: int = 0
    """Tokens charged so far."""


class Book:
    """One conductor's. Rooms are made as models are asked for."""

    def __init__(self, make_room: Callable[[], Room], max_accounts: int = MAX_ACCOUNTS) -> None:
        self.outlook = Outlook()
        self._make_room = make_room
        self._rooms: dict[ModelName, Room] = {}
        self._accounts: OrderedDict[RequestId, _Account] = OrderedDict()
        self._max_accounts = max_accounts

    def room(self, model: ModelName) -> Room:
        room = self._rooms.get(model)
        if room is None:
            room = self._rooms[model] = self._make_room()
        return room

    def waiting(self) -> Counter[Share]:
        """How many wait, on whose account, for whichever model."""
        return sum((Counter(room.waiting()) for room in self._rooms.values()), Counter[Share]())

    def rooms(self) -> Iterator[tuple[ModelName, Room]]:
        return iter(tuple(self._rooms.items()))

    @property
    def num_waiting(self) -> int:
        return sum(len(room) for room in self._rooms.values())

    def sent_decode(self, worker: WorkerId, half: DecodeHalf, now_s: float, *, is_own: bool) -> None:
        """A decode half was sent. `is_own`: by this conductor, whose room has charged the prompt already."""
        context_tokens = len(half.tokens) + len(half.known)
        self.outlook.placed(worker, half.request_id, context_tokens, now_s + (half.begins_in_s or 0.0), now_s)
        if half.request_id in self._accounts:
            return
        account = _Account(
            half.model, Share(service_class=half.service_class or DEFAULT_CLASS, tenant=half.tenant), len(half.known)
        )
        self._accounts[half.request_id] = account
        while len(self._accounts) > self._max_accounts:
            self._accounts.popitem(last=False)
        room = self._rooms.get(half.model)
        if room is not None and not is_own:
            room.charge_prompt(account.share, len(half.tokens))

    def heard(self, beat: WorkerHeartbeat, now_s: float) -> None:
        """A heartbeat of a worker that generates."""
        if beat.role is Role.PREFILL:
            return
        self.outlook.shown(beat.worker, {each.request_id: each.num_tokens for each in beat.requests}, now_s)
        for progress in beat.requests:
            self._charge(self._accounts.get(progress.request_id), progress.num_tokens)

    def ended(self, ended: HalfEnded, now_s: float) -> None:
        if ended.role is Role.PREFILL:
            return
        if ended.error is None:
            self.outlook.ended(ended.request_id, now_s)
        else:
            self.outlook.dropped(ended.request_id)
        self._charge(self._accounts.pop(ended.request_id, None), ended.num_generated_tokens)

    def refused(self, request_id: RequestId) -> None:
        """The decode worker that was asked didn't take it."""
        self.outlook.dropped(request_id)

    def lost(self, worker: WorkerId) -> None:
        self.outlook.lost(worker)

    def _charge(self, account: _Account | None, num_generated: int) -> None:
        if account is None or num_generated <= account.num_generated:
            return
        room = self._rooms.get(account.model)
        if room is not None:
            room.charge_output(account.share, num_generated - account.num_generated)
        account.num_generated = num_generated
