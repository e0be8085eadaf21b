"""The order in which messages are sent with key_shared: a queue for each key.

Owns: the queues, whose turn it is, and which consumer a key is routed to. Does not own: what
becomes of a message once it was sent (`delivery`), and time.

Invariants: only the first message of a key has been sent; the next one waits, as an offset, until
the one before it is done. A consumer that can take a message, and is announced one, is in the
rotation.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from heapq import heappop, heappush
from typing import Final

from ister.errors import check
from ister.subscription.entries import ConsumerState, Entry, Send, State
from ister.subscription.keys import HashRing
from ister.subscription.offset_queue import check_rotation, leave_rotation

_ROUTES_MAX: Final = 65_536
"""Routes of keys that are cached, so that a key is hashed once and not for each message."""

# Numbers at the beginning of a queue's runs that are used up, before they are removed.
_RUNS_USED_UP: Final = 256

_QUEUED: Final = State.QUEUED
_SENT: Final = State.SENT


class _Route(Enum):
    """Special routes for keys without a consumer."""

    KEPT = "kept"
    """The consumers that take the key are not attached, or none is known yet."""
    UNWANTED = "unwanted"
    """No known consumer takes the key: its messages are passed over."""


class _KeyQueue:
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


class KeyQueues:
    """A queue for each key; the first message of each goes where the ring says.

    Only messages that have been sent are entries. The others of a queue are offsets, and become
    entries when they are sent, so that a waiting message takes little memory.
    """

    def __init__(
        self,
        entries: Mapping[int, Entry],
        *,
        apply_policy: Callable[[Entry], None],
        pass_over: Callable[[int, int], None],
        is_acked: Callable[[int], bool],
        make: Callable[[int, str], Entry],
    ) -> None:
        """Makes empty queues.

        `entries` are all messages that have been sent and are not done. `apply_policy` handles a
        message that has failed too often, `pass_over` counts a range of messages that match no
        filter as done, `is_acked` says whether a message is done, and `make` makes the entry of a
        message that is about to be sent.
        """
        self._entries = entries
        self._apply_policy = apply_policy
        self._pass_over = pass_over
        self._is_acked = is_acked
        self._make = make
        self._queues: dict[str, _KeyQueue] = {}
        self.waiting = 0
        """Messages that were never sent, including those acknowledged meanwhile."""
        self._ring = HashRing()
        self._attached: dict[int, ConsumerState] = {}
        self._known: Mapping[int, ConsumerState] = {}
        self._routes: dict[str, ConsumerState | _Route] = {}
        self._is_stale = False
        self._unwanted: list[str] = []
        self._rotation: deque[ConsumerState] = deque()
        self.block_at: int | None = None
        """The first of the messages that hold up their queues. Nothing here depends on it."""

    @property
    def has_work(self) -> bool:
        """Whether `send` has something to do."""
        return bool(self._rotation or self._unwanted or self._is_stale)

    @property
    def key_count(self) -> int:
        """How many keys have messages here."""
        return len(self._queues)

    def add(self, offset: int, key: str) -> bool:
        """Adds a message that was just read; False if no known consumer takes its key."""
        queue = self._queues.get(key)
        if queue is None:
            if self._route(key) is _Route.UNWANTED:
                return False
            queue = self._queues[key] = _KeyQueue()
            queue.append(offset)
            self._announce(key, queue)
        else:
            queue.append(offset)
        self.waiting += 1
        return True

    def add_again(self, entry: Entry) -> None:
        """Adds a message that is to be sent again; it is the first of its queue."""
        self._announce(entry.key, self._queues[entry.key])

    def leave(self, entry: Entry) -> None:
        """Removes a message that is done; the next one of its queue comes up."""
        queue = self._queues.get(entry.key)
        if queue is not None and queue.head is entry:
            queue.head = None
            if self._skip_acked(queue) is None:
                del self._queues[entry.key]
            else:
                self._announce(entry.key, queue)

    def _skip_acked(self, queue: _KeyQueue) -> int | None:
        """The first message of a queue that was never sent and is not acknowledged, or None."""
        while (offset := queue.first) is not None and self._is_acked(offset):
            queue.pop()
            self.waiting -= 1
        return offset

    def attach(self, consumer: ConsumerState) -> None:
        """Adds a consumer."""
        self._ring.add(consumer.id)
        self._attached[consumer.id] = consumer
        self._forget_routes()

    def detach(self, consumer: ConsumerState) -> None:
        """Removes a consumer."""
        self._ring.remove(consumer.id)
        self._attached.pop(consumer.id, None)
        consumer.ready.clear()
        leave_rotation(self._rotation, consumer)
        self._forget_routes()

    def set_known(self, known: Mapping[int, ConsumerState]) -> None:
        """Sets all known consumers, attached or not: messages that they take are kept."""
        self._known = known
        self._forget_routes()

    def give_turn(self, consumer: ConsumerState) -> None:
        """Puts a consumer that may be able to take messages into the rotation."""
        if consumer.ready and not consumer.is_in_rotation:
            consumer.is_in_rotation = True
            self._rotation.append(consumer)

    def send(
        self, active: ConsumerState | None, *, window: int, failures_max: int, now: float
    ) -> tuple[list[Send], list[Entry]]:
        """Assigns all messages that can be sent now, as `OffsetQueue.send`."""
        sends: list[Send] = []
        sent: list[Entry] = []
        if self._is_stale:
            self._announce_all()
        while self._unwanted:
            self._drop_queue(self._unwanted.pop())
        rotation = self._rotation
        while rotation:
            consumer = rotation.popleft()
            consumer.is_in_rotation = False
            while consumer.ready and consumer.can_take(window):
                entry = self._first(heappop(consumer.ready))
                if entry is None:
                    continue
                if entry.failures > failures_max:
                    self._apply_policy(entry)
                    continue
                entry.state = _SENT
                entry.consumer = consumer
                entry.sent_at = now
                entry.is_written = entry.is_received = False
                consumer.flight[entry.offset] = entry
                consumer.room -= 1
                sends.append(Send(consumer.id, entry.offset, entry.failures + 1))
                sent.append(entry)
        return sends, sent

    def _drop_queue(self, key: str) -> None:
        """Passes over all messages of a key that matches no filter, if none is in flight."""
        queue = self._queues.get(key)
        if queue is None or (queue.head is not None and queue.head.state is not _QUEUED):
            return
        for start, end in queue.waiting():
            self.waiting -= end - start
            self._pass_over(start, end)
        queue.runs, queue.at = array("Q"), 0
        if queue.head is None:
            del self._queues[key]
        else:
            self._pass_over(queue.head.offset, queue.head.offset + 1)

    def reset(self) -> None:
        """Forgets every message."""
        self._queues.clear()
        self.waiting = 0
        self._unwanted.clear()
        self.block_at = None
        for consumer in self._attached.values():
            consumer.ready.clear()

    def sweep(self) -> None:
        """Removes offsets that were acknowledged meanwhile."""
        self.waiting = 0
        for queue in self._queues.values():
            left = [(start, end) for start, end in queue.waiting()]
            queue.runs, queue.at = array("Q"), 0
            for start, end in left:
                for offset in range(start, end):
                    if not self._is_acked(offset):
                        queue.append(offset)
                        self.waiting += 1
        self._is_stale = True

    def _route(self, key: str) -> ConsumerState | _Route:
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
        # Announced anew by the next `send`: 200 consumers may come at the same time.
        self._is_stale = True

    def _announce(self, key: str, queue: _KeyQueue) -> None:
        """Announces the first message of a queue to the consumer that it is for."""
        if self._is_stale:
            return
        offset = queue.first if queue.head is None else queue.head.offset
        if offset is None or (queue.head is not None and queue.head.state is not _QUEUED):
            return
        route = self._route(key)
        if route is _Route.UNWANTED:
            self._unwanted.append(key)
        elif isinstance(route, ConsumerState):
            heappush(route.ready, (offset, key))
            self.give_turn(route)

    def _announce_all(self) -> None:
        self._is_stale = False
        self._unwanted.clear()
        for consumer in self._attached.values():
            consumer.ready.clear()
        for key, queue in list(self._queues.items()):
            if queue.head is None and self._skip_acked(queue) is None:
                del self._queues[key]
            else:
                self._announce(key, queue)

    def _first(self, announced: tuple[int, str]) -> Entry | None:
        """The message that was announced, if it still is the first of its queue and waits."""
        announced_at, key = announced
        queue = self._queues.get(key)
        if queue is None:
            return None
        if queue.head is not None:
            head = queue.head
            return head if head.offset == announced_at and head.state is _QUEUED else None
        offset = self._skip_acked(queue)
        if offset is None:
            del self._queues[key]
            return None
        if offset < announced_at:
            return None  # it was announced separately
        queue.pop()
        self.waiting -= 1
        queue.head = self._make(offset, key)
        return queue.head

    def offsets(self) -> Iterator[int]:
        """All messages that were never sent and are not done; slow, for tests."""
        for queue in self._queues.values():
            for start, end in queue.waiting():
                yield from (at for at in range(start, end) if not self._is_acked(at))

    def validate(self, attached: Mapping[int, ConsumerState], window: int) -> None:
        """Raises InvariantError if an invariant does not hold."""
        check(self._attached == attached, "the ring has other consumers")
        check(len(self._ring) == len(attached), "the ring has other members")
        heads: list[int] = []
        count = 0
        for key, queue in self._queues.items():
            runs = [bound for run in queue.waiting() for bound in run]
            check(runs == sorted(set(runs)), f"queue {key!r} is out of order")
            count += sum(end - start for start, end in queue.waiting())
            if queue.head is not None:
                check(queue.head.key == key, f"queue {key!r} has another key")
                check(not runs or queue.head.offset < runs[0], f"queue {key!r} is out of order")
                heads.append(queue.head.offset)
        check(count == self.waiting, f"{count} messages wait, and {self.waiting} are counted")
        check(sorted(heads) == sorted(self._entries), "a message is not in its queue once")
        check_rotation(self._rotation)
        if not self._is_stale:
            self._validate_announced(attached, window)

    def _validate_announced(self, attached: Mapping[int, ConsumerState], window: int) -> None:
        for key, queue in self._queues.items():
            if queue.head is not None and queue.head.state is not _QUEUED:
                continue
            offset = queue.head.offset if queue.head is not None else self._skip_acked(queue)
            if offset is None:
                continue
            lists = [
                consumer.id
                for consumer in attached.values()
                if any(one_key == key and at <= offset for at, one_key in consumer.ready)
            ]
            route = self._route(key)
            wanted = [route.id] if isinstance(route, ConsumerState) else []
            check(lists == wanted, f"{offset} is offered to {lists} and belongs to {wanted}")
            check(
                route is not _Route.UNWANTED or key in self._unwanted,
                f"no consumer takes {offset}, and it is kept",
            )
        for consumer in attached.values():
            check(
                consumer.is_in_rotation or not (consumer.ready and consumer.can_take(window)),
                f"consumer {consumer.id} can take messages and gets no turn",
            )
