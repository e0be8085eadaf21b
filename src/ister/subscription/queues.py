"""Which message is sent next, and to whom: in one line, or one lane for each key.

Owns: the order of messages that wait to be sent, turns, and the routes of keys. Does not own: what
becomes of a message once it was sent (`delivery`), and time.

Invariants:

- a message in state QUEUED is in the queue once; others may have left traces there, which are
  passed over when met and are removed by `sweep`;
- messages leave a line for the first time in the order of offsets: those that are sent again are
  lower than all new ones;
- of a lane only the first message has been sent: the next one of a key waits, as an offset, until
  the one before it is done;
- a consumer that can take a message, and could get one, is in the rotation.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from heapq import heapify, heappop, heappush
from typing import Final, NamedTuple

from ister.errors import check
from ister.subscription.keys import HashRing, KeyFilter

__all__ = ["Consumer", "Entry", "Lanes", "Line", "Send", "State"]

_ROUTES_MAX: Final = 65_536
"""Routes of keys that are remembered, so that a key is hashed once and not for each message."""

# Numbers at the beginning of a lane's runs that are used up, before they are removed.
_RUNS_USED_UP: Final = 256


class State(Enum):
    """Where a message is that was read and is not acknowledged."""

    QUEUED = "queued"
    """To be sent as soon as somebody can take it."""
    SENT = "sent"
    """In flight to a consumer."""
    WAITING = "waiting"
    """It failed, and its pause is not over."""
    BLOCKED = "blocked"
    """It failed too often, and the policy is to stop."""
    HANDED = "handed"
    """It failed too often, and is being dropped or dead-lettered."""
    POSTPONED = "postponed"
    """Dropping or dead-lettering did not work; tried again later."""
    DONE = "done"
    """Acknowledged; only traces of it are left."""


_QUEUED: Final = State.QUEUED
_SENT: Final = State.SENT


class Entry:
    """A message that was read and is not acknowledged."""

    __slots__ = (
        "consumer",
        "due",
        "failures",
        "is_seen",
        "is_written",
        "key",
        "number",
        "offset",
        "reason",
        "sent_at",
        "state",
    )

    def __init__(self, offset: int, key: str) -> None:
        self.offset = offset
        self.key = key
        self.state = _QUEUED
        self.consumer: Consumer | None = None
        """In whose window it is: who has it, or failed with it and is waiting with it."""
        self.failures = 0
        self.reason: str | None = None
        self.sent_at = 0.0
        """When its wait began: to be written to the stream or, once seen, for an answer."""
        self.is_written = False
        """Whether it has left for its consumer, and not only been handed to its stream."""
        self.number = 0
        """The number of its sending; later sendings have higher numbers."""
        self.is_seen = False
        """Whether the consumer's program is known to have it."""
        self.due = 0.0

    def __repr__(self) -> str:
        return f"<{self.offset} {self.key!r:.20} {self.state.value} failed {self.failures}>"


class Consumer:
    """A consumer as the subscription knows it."""

    __slots__ = (
        "elsewhere",
        "excuses",
        "filter",
        "flight",
        "heard_at",
        "id",
        "is_attached",
        "is_in_rotation",
        "is_stalled",
        "is_watched",
        "ready",
        "reports",
        "room",
        "unseen",
    )

    def __init__(self, id: int, filter: KeyFilter) -> None:
        self.id = id
        self.filter = filter
        self.is_attached = False
        self.room = 0
        """How many more messages its outbound queue takes."""
        self.flight: dict[int, Entry] = {}
        """What counts against its window: in flight to it, or failed there and waiting."""
        self.reports = False
        """Whether it reports which messages its program has received."""
        self.unseen: deque[tuple[int, Entry]] = deque()
        """Messages sent to it that its program may not have yet, each with its number."""
        self.heard_at = 0.0
        """When it last answered or reported, or the oldest of `unseen` became the oldest."""
        self.elsewhere: Callable[[], float] | None = None
        """Returns when its program last answered at another partition; None without partitions."""
        self.excuses = 0
        """Ack timeouts that `elsewhere` has excused since it answered."""
        self.is_watched = False
        """Whether its silence has a timer."""
        self.is_stalled = False
        """Whether it was silent, its messages went to others, and it has not answered since."""
        self.is_in_rotation = False
        self.ready: list[tuple[int, str]] = []
        """A heap of the lanes whose first message is for it, by offset."""

    def can_take(self, window: int) -> bool:
        """Whether it may be sent another message now; one that is stalled gets one at a time."""
        return self.room > 0 and len(self.flight) < (1 if self.is_stalled else window)


class Send(NamedTuple):
    """Send the message at `offset` to a consumer."""

    consumer: int
    offset: int
    attempt: int
    """1 for the first; failures count, disconnects do not."""


class Line:
    """One line, in the order of offsets: for one consumer, or for all in turn."""

    def __init__(
        self, entries: Mapping[int, Entry], *, judge: Callable[[Entry], None], is_shared: bool
    ) -> None:
        self._entries = entries
        self._judge = judge
        self._is_shared = is_shared
        self._fresh: deque[Entry] = deque()
        self._again: list[int] = []
        self._rotation: deque[Consumer] = deque()
        self.block_at: int | None = None
        """Messages after this offset that were never sent stay where they are."""

    @property
    def has_messages(self) -> bool:
        """Whether there are some to be sent, or traces of some."""
        return bool(self._fresh or self._again)

    def add(self, entry: Entry) -> None:
        """Takes in a message that was just read."""
        self._fresh.append(entry)

    def put_back(self, entry: Entry) -> None:
        """Takes in a message that is to be sent again."""
        heappush(self._again, entry.offset)

    def attach(self, consumer: Consumer) -> None:
        """A consumer gets messages from now on."""

    def detach(self, consumer: Consumer) -> None:
        """A consumer gets no more messages."""
        _leave_rotation(self._rotation, consumer)

    def note_known(self, known: Mapping[int, Consumer]) -> None:
        """Other consumers, or other filters, are known than before."""

    def note_free(self, consumer: Consumer) -> None:
        """A consumer may be able to take messages again."""
        if self._is_shared and not consumer.is_in_rotation:
            consumer.is_in_rotation = True
            self._rotation.append(consumer)

    def send(
        self, active: Consumer | None, *, window: int, failures_max: int, now: float
    ) -> tuple[list[Send], list[Entry]]:
        """Sends all that can be sent; what, and the messages themselves.

        Args:
            active: Who gets messages, if only one does.
            window: How many unacknowledged messages a consumer may have.
            failures_max: A message that has failed more often is judged instead.
            now: Seconds.
        """
        sends: list[Send] = []
        sent: list[Entry] = []
        if not self._fresh and not self._again:
            return sends, sent
        while (consumer := self._next_turn(window) if self._is_shared else active) is not None:
            flight = consumer.flight
            # All it can take, or one: then it is the next one's turn.
            room = min(consumer.room, window - len(flight))
            if self._is_shared:
                room = min(room, 1)
            while room > 0 and (entry := self._pop()) is not None:
                if entry.failures > failures_max:
                    self._judge(entry)
                    continue
                offset = entry.offset
                entry.state = _SENT
                entry.consumer = consumer
                entry.sent_at = now
                entry.is_written = entry.is_seen = False
                flight[offset] = entry
                consumer.room -= 1
                room -= 1
                sends.append(Send(consumer.id, offset, entry.failures + 1))
                sent.append(entry)
            if room > 0 or not self._is_shared:
                # Nothing more to send (its turn is kept), or nobody else to send it to.
                if self._is_shared:
                    self._rotation.appendleft(consumer)
                    consumer.is_in_rotation = True
                break
            self.note_free(consumer)
        return sends, sent

    def _next_turn(self, window: int) -> Consumer | None:
        while self._rotation:
            consumer = self._rotation.popleft()
            consumer.is_in_rotation = False
            if consumer.can_take(window):
                return consumer
        return None

    def _pop(self) -> Entry | None:
        """The lowest message that may be sent."""
        again = self._again
        while again:
            entry = self._entries.get(heappop(again))
            if entry is not None and entry.state is _QUEUED:
                return entry
        fresh, block_at = self._fresh, self.block_at
        while fresh:
            entry = fresh[0]
            if entry.state is _QUEUED and block_at is not None and entry.offset > block_at:
                return None
            del fresh[0]
            if entry.state is _QUEUED:
                return entry
        return None

    def reset(self) -> None:
        """Forgets every message."""
        self._fresh.clear()
        self._again.clear()
        self.block_at = None

    def sweep(self) -> None:
        """Removes the traces of messages that are done."""
        self._fresh = deque(entry for entry in self._fresh if entry.state is _QUEUED)
        self._again = [offset for offset in self._again if self._is_queued(offset)]
        heapify(self._again)

    def _is_queued(self, offset: int) -> bool:
        entry = self._entries.get(offset)
        return entry is not None and entry.state is _QUEUED

    def validate(self, attached: Mapping[int, Consumer], window: int) -> None:
        """Checks the invariants.

        Raises:
            InvariantError: One does not hold.
        """
        fresh = [entry.offset for entry in self._fresh if entry.state is _QUEUED]
        again = [offset for offset in self._again if self._is_queued(offset)]
        check(fresh == sorted(set(fresh)), "new messages are out of order")
        check(not fresh or max(again, default=-1) < fresh[0], "a new one before one sent again")
        queued = [offset for offset in self._entries if self._is_queued(offset)]
        check(sorted(fresh + again) == sorted(queued), "a queued message is not in line once")
        _check_rotation(self._rotation)
        if self._is_shared:
            for consumer in attached.values():
                check(
                    consumer.is_in_rotation or not consumer.can_take(window),
                    f"consumer {consumer.id} can take messages and gets no turn",
                )


class _Route(Enum):
    """Where a key's messages go when they go to no consumer."""

    KEPT = "kept"
    """The consumers that take the key are not attached, or nobody is known yet."""
    UNWANTED = "unwanted"
    """No known consumer takes the key: its messages are passed over."""


class _Lane:
    """The messages of one key: the one that has been sent, if any, and those that wait behind it.

    The waiting ones are stored as runs of offsets: a million may wait for a consumer that is away.
    """

    __slots__ = ("at", "head", "runs")

    def __init__(self) -> None:
        self.head: Entry | None = None
        """Sent, or to be sent again; the others wait for it."""
        self.runs: array[int] = array("Q")
        """Start and end of each run of neighbours that were never sent, ascending."""
        self.at = 0
        """Where the first run is; those before it have been used up."""

    def append(self, offset: int) -> None:
        runs = self.runs
        if self.at < len(runs) and runs[-1] == offset:
            runs[-1] = offset + 1
        else:
            runs.extend((offset, offset + 1))

    def pop(self) -> None:
        """Takes the first offset away."""
        runs, at = self.runs, self.at
        runs[at] += 1
        if runs[at] == runs[at + 1]:
            self.at = at = at + 2
            if at >= _RUNS_USED_UP and 2 * at >= len(runs):
                del runs[:at]
                self.at = 0

    @property
    def first(self) -> int | None:
        """The first offset that was never sent."""
        return self.runs[self.at] if self.at < len(self.runs) else None

    def waiting(self) -> Iterator[tuple[int, int]]:
        """The runs that were never sent."""
        return zip(self.runs[self.at :: 2], self.runs[self.at + 1 :: 2], strict=True)


class Lanes:
    """A lane for each key; the first message of each goes where the ring says.

    Only messages that have been sent are entries. The others of a lane are offsets, and become
    entries when they are sent, so that a waiting message takes little memory.
    """

    def __init__(
        self,
        entries: Mapping[int, Entry],
        *,
        judge: Callable[[Entry], None],
        pass_over: Callable[[int, int], None],
        is_acked: Callable[[int], bool],
        make: Callable[[int, str], Entry],
    ) -> None:
        """Lanes without messages.

        Args:
            entries: All that have been sent and are not done.
            judge: What to do with one that has failed too often.
            pass_over: Counts a range of messages that match no filter as done.
            is_acked: Whether a message is done.
            make: Makes a message an entry, because it is about to be sent.
        """
        self._entries = entries
        self._judge = judge
        self._pass_over = pass_over
        self._is_acked = is_acked
        self._make = make
        self._lanes: dict[str, _Lane] = {}
        self.waiting = 0
        """Messages that were never sent, including those acknowledged meanwhile."""
        self._ring = HashRing()
        self._attached: dict[int, Consumer] = {}
        self._known: Mapping[int, Consumer] = {}
        self._routes: dict[str, Consumer | _Route] = {}
        self._is_stale = False
        self._unwanted: list[str] = []
        self._rotation: deque[Consumer] = deque()
        self.block_at: int | None = None
        """The first of the messages that hold up their lanes. Nothing here depends on it."""

    @property
    def key_count(self) -> int:
        """How many keys have messages here."""
        return len(self._lanes)

    def add(self, offset: int, key: str) -> bool:
        """Takes in a message that was just read; False, and it is not, if nobody takes its key."""
        lane = self._lanes.get(key)
        if lane is None:
            if self._route(key) is _Route.UNWANTED:
                return False
            lane = self._lanes[key] = _Lane()
            lane.append(offset)
            self._list(key, lane)
        else:
            lane.append(offset)
        self.waiting += 1
        return True

    def put_back(self, entry: Entry) -> None:
        """Takes in a message that is to be sent again; it is the first of its lane."""
        self._list(entry.key, self._lanes[entry.key])

    def leave(self, entry: Entry) -> None:
        """A message is done: the next one of its lane comes up."""
        lane = self._lanes.get(entry.key)
        if lane is not None and lane.head is entry:
            lane.head = None
            if self._skip_acked(lane) is None:
                del self._lanes[entry.key]
            else:
                self._list(entry.key, lane)

    def _skip_acked(self, lane: _Lane) -> int | None:
        """The first message of a lane that was never sent and is not acknowledged, or None."""
        while (offset := lane.first) is not None and self._is_acked(offset):
            lane.pop()
            self.waiting -= 1
        return offset

    def attach(self, consumer: Consumer) -> None:
        """A consumer gets messages from now on."""
        self._ring.add(consumer.id)
        self._attached[consumer.id] = consumer
        self._forget_routes()

    def detach(self, consumer: Consumer) -> None:
        """A consumer gets no more messages."""
        self._ring.remove(consumer.id)
        self._attached.pop(consumer.id, None)
        consumer.ready.clear()
        _leave_rotation(self._rotation, consumer)
        self._forget_routes()

    def note_known(self, known: Mapping[int, Consumer]) -> None:
        """Other consumers, or other filters, are known than before."""
        self._known = known
        self._forget_routes()

    def note_free(self, consumer: Consumer) -> None:
        """A consumer may be able to take messages again."""
        if consumer.ready and not consumer.is_in_rotation:
            consumer.is_in_rotation = True
            self._rotation.append(consumer)

    def send(
        self,
        active: Consumer | None,
        *,
        window: int,
        failures_max: int,
        now: float,
    ) -> tuple[list[Send], list[Entry]]:
        """Sends all that can be sent; see `Line.send`."""
        sends: list[Send] = []
        sent: list[Entry] = []
        if self._is_stale:
            self._list_all()
        while self._unwanted:
            self._drop_lane(self._unwanted.pop())
        rotation = self._rotation
        while rotation:
            consumer = rotation.popleft()
            consumer.is_in_rotation = False
            while consumer.ready and consumer.can_take(window):
                entry = self._first(heappop(consumer.ready))
                if entry is None:
                    continue
                if entry.failures > failures_max:
                    self._judge(entry)
                    continue
                entry.state = _SENT
                entry.consumer = consumer
                entry.sent_at = now
                entry.is_written = entry.is_seen = False
                consumer.flight[entry.offset] = entry
                consumer.room -= 1
                sends.append(Send(consumer.id, entry.offset, entry.failures + 1))
                sent.append(entry)
        return sends, sent

    def _drop_lane(self, key: str) -> None:
        """Passes over all messages of a key that matches no filter, if none is in flight."""
        lane = self._lanes.get(key)
        if lane is None or (lane.head is not None and lane.head.state is not _QUEUED):
            return
        for start, end in lane.waiting():
            self.waiting -= end - start
            self._pass_over(start, end)
        lane.runs, lane.at = array("Q"), 0
        if lane.head is None:
            del self._lanes[key]
        else:
            self._pass_over(lane.head.offset, lane.head.offset + 1)

    def reset(self) -> None:
        """Forgets every message."""
        self._lanes.clear()
        self.waiting = 0
        self._unwanted.clear()
        self.block_at = None
        for consumer in self._attached.values():
            consumer.ready.clear()

    def sweep(self) -> None:
        """Removes the traces of messages that are done."""
        self.waiting = 0
        for lane in self._lanes.values():
            left = [(start, end) for start, end in lane.waiting()]
            lane.runs, lane.at = array("Q"), 0
            for start, end in left:
                for offset in range(start, end):
                    if not self._is_acked(offset):
                        lane.append(offset)
                        self.waiting += 1
        self._is_stale = True

    def _route(self, key: str) -> Consumer | _Route:
        route = self._routes.get(key)
        if route is None:
            attached = self._attached
            found = self._ring.find(key, lambda member: attached[member].filter.matches(key))
            if found is not None:
                route = attached[found]
            elif not self._known or any(c.filter.matches(key) for c in self._known.values()):
                route = _Route.KEPT
            else:
                route = _Route.UNWANTED
            if len(self._routes) >= _ROUTES_MAX:
                self._routes.clear()
            self._routes[key] = route
        return route

    def _forget_routes(self) -> None:
        self._routes.clear()
        # Not at once: of 200 consumers that come together each would do it.
        self._is_stale = True

    def _list(self, key: str, lane: _Lane) -> None:
        """Offers the first message of a lane to the one it is for."""
        if self._is_stale:
            return
        offset = lane.first if lane.head is None else lane.head.offset
        if offset is None or (lane.head is not None and lane.head.state is not _QUEUED):
            return
        route = self._route(key)
        if route is _Route.UNWANTED:
            self._unwanted.append(key)
        elif isinstance(route, Consumer):
            heappush(route.ready, (offset, key))
            self.note_free(route)

    def _list_all(self) -> None:
        self._is_stale = False
        self._unwanted.clear()
        for consumer in self._attached.values():
            consumer.ready.clear()
        for key, lane in list(self._lanes.items()):
            if lane.head is None and self._skip_acked(lane) is None:
                del self._lanes[key]
            else:
                self._list(key, lane)

    def _first(self, listed: tuple[int, str]) -> Entry | None:
        """The message that was listed, if it still is the first of its lane and waits."""
        listed_at, key = listed
        lane = self._lanes.get(key)
        if lane is None:
            return None
        if lane.head is not None:
            head = lane.head
            return head if head.offset == listed_at and head.state is _QUEUED else None
        offset = self._skip_acked(lane)
        if offset is None:
            del self._lanes[key]
            return None
        if offset < listed_at:
            return None  # another listing is for it
        lane.pop()
        self.waiting -= 1
        lane.head = self._make(offset, key)
        return lane.head

    def offsets(self) -> Iterator[int]:
        """All messages that were never sent and are not done; looks at each."""
        for lane in self._lanes.values():
            for start, end in lane.waiting():
                yield from (at for at in range(start, end) if not self._is_acked(at))

    def validate(self, attached: Mapping[int, Consumer], window: int) -> None:
        """Checks the invariants.

        Raises:
            InvariantError: One does not hold.
        """
        check(self._attached == attached, "the ring has other consumers")
        check(len(self._ring) == len(attached), "the ring has other members")
        heads: list[int] = []
        count = 0
        for key, lane in self._lanes.items():
            runs = [bound for run in lane.waiting() for bound in run]
            check(runs == sorted(set(runs)), f"lane {key!r} is out of order")
            count += sum(end - start for start, end in lane.waiting())
            if lane.head is not None:
                check(lane.head.key == key, f"lane {key!r} has another key")
                check(not runs or lane.head.offset < runs[0], f"lane {key!r} is out of order")
                heads.append(lane.head.offset)
        check(count == self.waiting, f"{count} messages wait, and {self.waiting} are counted")
        check(sorted(heads) == sorted(self._entries), "a message is not in its lane once")
        _check_rotation(self._rotation)
        if not self._is_stale:
            self._validate_lists(attached, window)

    def _validate_lists(self, attached: Mapping[int, Consumer], window: int) -> None:
        for key, lane in self._lanes.items():
            if lane.head is not None and lane.head.state is not _QUEUED:
                continue
            offset = lane.head.offset if lane.head is not None else self._skip_acked(lane)
            if offset is None:
                continue
            lists = [
                consumer.id
                for consumer in attached.values()
                if any(one_key == key and at <= offset for at, one_key in consumer.ready)
            ]
            route = self._route(key)
            wanted = [route.id] if isinstance(route, Consumer) else []
            check(lists == wanted, f"{offset} is offered to {lists} and belongs to {wanted}")
            check(
                route is not _Route.UNWANTED or key in self._unwanted,
                f"{offset} is for nobody and is kept",
            )
        for consumer in attached.values():
            check(
                consumer.is_in_rotation or not (consumer.ready and consumer.can_take(window)),
                f"consumer {consumer.id} can take messages and gets no turn",
            )


def _leave_rotation(rotation: deque[Consumer], consumer: Consumer) -> None:
    if consumer.is_in_rotation:
        consumer.is_in_rotation = False
        rotation.remove(consumer)


def _check_rotation(rotation: deque[Consumer]) -> None:
    ids = [consumer.id for consumer in rotation]
    check(len(ids) == len(set(ids)), f"a consumer has two turns: {ids}")
    check(
        all(consumer.is_in_rotation and consumer.is_attached for consumer in rotation),
        "a turn of one who is not there",
    )
