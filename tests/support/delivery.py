"""A `Delivery` beside a plain model of it: every event goes to both, and every send is judged.

The model is slow and simple: a state for each offset, no queues, no heaps. It knows what may be
sent and what has to be, when messages fail, and where the cursor is; see `_check_send` and
`_check_nothing_is_forgotten`.
"""

import json
from dataclasses import dataclass, field

import pytest

from ister.errors import ConflictError
from ister.subscription.delivery import Delivery
from ister.subscription.entries import AckResult, DeadLetter, Drop, Send
from ister.subscription.keys import HashRing, KeyFilter
from ister.subscription.policy import FailurePolicy, PoisonPolicy, SubscriptionKind

SINGLE = (SubscriptionKind.EXCLUSIVE, SubscriptionKind.FAILOVER)


@dataclass
class _Person:
    filters: tuple[str, ...] = ()
    is_attached: bool = False
    room: int = 0
    reports: bool = False
    is_stalled: bool = False
    heard_at: float = 0.0
    unseen: list[int] = field(default_factory=list)


@dataclass
class Rig:
    """One subscription, its log, and what is known about both."""

    kind: SubscriptionKind
    window: int = 3
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    cursor: int = 0

    def __post_init__(self) -> None:
        self.kind = SubscriptionKind(self.kind)
        self.now = 100.0
        self.log = ["old"] * self.cursor
        self.people: dict[int, _Person] = {}
        self.order: list[int] = []
        self._rings: dict[frozenset[int], HashRing] = {}
        self.lives = 1
        self.sends = 0
        self.complete: set[int] = set(range(self.cursor))
        self.failures: dict[int, int] = {}
        self._begin(self.cursor, None)
        self.flush()

    def _begin(self, cursor: int, saved) -> None:
        self.delivery = Delivery(
            kind=self.kind,
            policy=self.policy,
            window=self.window,
            cursor=cursor,
            saved=saved,
            end=len(self.log),
        )
        self.offered_end = self.delivery.next_offset
        # Offsets that were offered and are not complete: queued, sent, waiting, judged, handed,
        # postponed.
        self.status: dict[int, str] = {}
        self.holder: dict[int, int] = {}
        self.seen_at: dict[int, float] = {}
        self.due: dict[int, float] = {}
        self.was_sent: set[int] = set()
        self.last_fresh = -1

    # -- what the model knows ---------------------------------------------------------------

    @property
    def is_keyed(self) -> bool:
        return self.kind is SubscriptionKind.KEY_SHARED

    def in_flight(self) -> list[int]:
        return sorted(o for o, status in self.status.items() if status == "sent")

    def handed(self) -> list[int]:
        return sorted(o for o, status in self.status.items() if status == "handed")

    def is_exhausted(self, offset: int) -> bool:
        return self.failures.get(offset, 0) > self.policy.max_redelivery_count

    def is_blocking(self, offset: int) -> bool:
        return (
            self.status.get(offset) in ("queued", "judged")
            and self.is_exhausted(offset)
            and self.policy.poison is PoisonPolicy.BLOCK
        )

    def charged(self, consumer: int) -> int:
        return sum(holder == consumer for holder in self.holder.values())

    def can_take(self, consumer: int) -> bool:
        person = self.people[consumer]
        return person.room > 0 and self.charged(consumer) < (
            1 if person.is_stalled else self.window
        )

    def takes(self, consumer: int, key: str) -> bool:
        filters = self.people[consumer].filters
        return not filters or KeyFilter(filters).matches(key)

    def is_unwanted(self, key: str) -> bool:
        return bool(self.people) and not any(self.takes(c, key) for c in self.people)

    def first_of_key(self, offset: int) -> int:
        key = self.log[offset]
        return min(o for o in self.status if self.log[o] == key)

    def route(self, key: str) -> int | None:
        members = frozenset(self.order)
        if members not in self._rings:
            self._rings[members] = HashRing()
            for consumer in members:
                self._rings[members].add(consumer)
        return self._rings[members].find(key, lambda consumer: self.takes(consumer, key))

    # -- events -----------------------------------------------------------------------------

    def publish(self, *keys: str) -> None:
        self.log += keys

    def attach(self, consumer: int, *filters: str, reports: bool = False) -> bool:
        if self.kind is SubscriptionKind.EXCLUSIVE and set(self.order) - {consumer}:
            with pytest.raises(ConflictError):
                self.delivery.attach(consumer, filters=filters, now=self.now)
            return False
        self.delivery.attach(consumer, filters=filters, reports=reports, now=self.now)
        self._take_back(consumer)
        self.people[consumer] = _Person(filters=filters, is_attached=True, reports=reports)
        if consumer not in self.order:
            self.order.append(consumer)
        return True

    def detach(self, consumer: int) -> None:
        self.delivery.detach(consumer, now=self.now)
        self._leave(consumer)

    def forget(self, consumer: int) -> None:
        self.delivery.forget(consumer, now=self.now)
        self._leave(consumer)
        self.people.pop(consumer, None)

    def _leave(self, consumer: int) -> None:
        self._take_back(consumer)
        if consumer in self.order:
            self.order.remove(consumer)
            person = self.people[consumer]
            person.is_attached = person.is_stalled = False
            person.room = 0

    def _take_back(self, consumer: int) -> None:
        for offset in [o for o, holder in self.holder.items() if holder == consumer]:
            del self.holder[offset]
            if self.status[offset] == "sent":
                self._requeue(offset)
        if consumer in self.people:
            self.people[consumer].unseen.clear()

    def _requeue(self, offset: int) -> None:
        self.status[offset] = "queued"
        self.seen_at.pop(offset, None)

    def set_room(self, consumer: int, messages: int) -> None:
        self.delivery.set_room(consumer, messages)
        if consumer in self.order:
            self.people[consumer].room = messages

    def offer(self, limit: int | None = None) -> int:
        """Reads what the machine wants; how many messages."""
        start = self.delivery.next_offset
        assert start == self.offered_end
        count = min(self.delivery.wanted(), len(self.log) - start)
        count = count if limit is None else min(count, limit)
        batch = [(offset, self.log[offset]) for offset in range(start, start + count)]
        self.delivery.offer(batch, now=self.now)
        for offset, key in batch:
            if offset in self.complete:
                continue
            has_lane = any(self.log[o] == key for o in self.status)
            if self.is_keyed and not has_lane and self.is_unwanted(key):
                self._complete(offset)
            else:
                self.status[offset] = "queued"
        self.offered_end = start + count
        return count

    def _hear(self, consumer: int) -> None:
        person = self.people.get(consumer)
        if person is not None and person.is_attached:
            person.heard_at, person.is_stalled = self.now, False

    def _see(self, offset: int) -> None:
        """Who has a message has what it was sent before, too."""
        person = self.people[self.holder[offset]]
        if offset in person.unseen:
            end = person.unseen.index(offset) + 1
            for one in person.unseen[:end]:
                self.seen_at[one] = self.now
            del person.unseen[:end]

    def received(self, consumer: int, offset: int) -> None:
        self.delivery.received(consumer, offset, now=self.now)
        self._hear(consumer)
        if self.status.get(offset) == "sent" and self.holder[offset] == consumer:
            self._see(offset)

    def _answer(self, offset: int, consumer: int | None) -> None:
        holder = self.holder[offset] if self.status.get(offset) == "sent" else None
        if holder is not None and consumer in (None, holder):
            self._hear(holder)
            self._see(offset)
        elif consumer is not None:
            self._hear(consumer)

    def _lose(self, offset: int) -> None:
        """A message is no longer out; the next one of its consumer may become the oldest."""
        self.seen_at.pop(offset, None)
        person = self.people.get(self.holder.get(offset, -1))
        if person is not None and offset in person.unseen:
            if person.unseen[0] == offset:
                person.heard_at = self.now
            person.unseen.remove(offset)

    def ack(self, offset: int, consumer: int | None = None) -> AckResult:
        result = self.delivery.ack(
            offset,
            end=len(self.log),
            now=self.now,
            consumer=consumer,
            attempt=self.failures.get(offset, 0) + 1,
        )
        if offset < len(self.log):
            self._answer(offset, consumer)
        if offset >= len(self.log):
            assert result is AckResult.REFUSED
        elif offset in self.complete:
            assert result is AckResult.LATE
        else:
            assert result is AckResult.ACCEPTED
            self._complete(offset)
        return result

    def nack(self, offset: int, delay_ms: int | None = None, consumer: int | None = None) -> None:
        counted = self.delivery.nack(
            offset,
            consumer=consumer,
            attempt=self.failures.get(offset, 0) + 1,
            delay_ms=delay_ms,
            reason="no",
            now=self.now,
        )
        is_out = self.status.get(offset) == "sent"
        assert counted == (is_out and consumer in (None, self.holder[offset]))
        if counted:
            self._answer(offset, consumer)
            self._fail(offset, delay_ms)

    def resolve(self, offset: int) -> None:
        self.delivery.resolve(offset, now=self.now)
        if self.status.get(offset) in ("handed", "postponed"):
            self._complete(offset)

    def unresolved(self, offset: int, delay_ms: int = 500) -> None:
        self.delivery.unresolved(offset, now=self.now, delay_ms=delay_ms)
        if self.status.get(offset) == "handed":
            self.status[offset] = "postponed"
            self.due[offset] = self.now + delay_ms / 1000

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.delivery.tick(self.now)
        timeout = self.policy.ack_timeout_ms / 1000
        for offset in [o for o, seen_at in self.seen_at.items() if seen_at + timeout <= self.now]:
            self._fail(offset, None)
        for _, consumer in sorted((self.people[c].heard_at, c) for c in self.order):
            person = self.people[consumer]
            if person.unseen and person.heard_at + timeout <= self.now:
                self._end_silence(consumer, person)
        for offset, due in list(self.due.items()):
            if due <= self.now:
                self._end_pause(offset)
        deadline = self.delivery.deadline()
        times = [seen_at + timeout for seen_at in self.seen_at.values()] + list(self.due.values())
        times += [person.heard_at + timeout for person in self.people.values() if person.unseen]
        assert deadline == (min(times) if times else None)

    def _end_silence(self, consumer: int, person: _Person) -> None:
        person.heard_at = self.now
        if not person.reports:
            self._fail(person.unseen.pop(0), None)
        others = [self.people[one] for one in self.order if one != consumer]
        if self.kind is SubscriptionKind.SHARED and not all(one.is_stalled for one in others):
            person.is_stalled = True
            for offset in person.unseen:
                del self.holder[offset]
                self._requeue(offset)
            person.unseen.clear()

    def _end_pause(self, offset: int) -> None:
        del self.due[offset]
        self.holder.pop(offset, None)
        is_judged = self.status[offset] == "postponed" and self.is_exhausted(offset)
        self.status[offset] = "judged" if is_judged else "queued"

    def set_policy(self, **changes) -> None:
        fields = {**self.policy.to_json(), **changes}
        if fields["poison"] == "dead_letter":
            fields["dead_letter_topic"] = "/default/dead"
        self.policy = FailurePolicy.from_json(fields)
        self.delivery.set_policy(self.policy, self.now)
        for offset, status in self.status.items():
            if status == "judged" and not self.is_exhausted(offset):
                self.status[offset] = "queued"

    def set_window(self, window: int) -> None:
        self.window = window
        self.delivery.set_window(window)

    def seek(self, offset: int) -> None:
        self.delivery.seek(offset, now=self.now)
        self.complete = set(range(offset))
        self.failures.clear()
        self.offered_end = offset
        self._forget_messages()

    def _forget_messages(self) -> None:
        for container in (self.status, self.holder, self.seen_at, self.due, self.was_sent):
            container.clear()
        for person in self.people.values():
            person.unseen.clear()
        self.last_fresh = -1

    def flush(self) -> None:
        """What the store would have now."""
        text = json.dumps(self.delivery.saved())
        self.stored = (self.delivery.cursor, text, set(self.complete), dict(self.failures))

    def restart(self) -> None:
        """Everything but what was flushed is gone."""
        cursor, text, self.complete, self.failures = self.stored
        self.complete, self.failures = set(self.complete), dict(self.failures)
        self.lives += 1
        self._begin(cursor, json.loads(text))
        self.order.clear()
        for consumer, person in self.people.items():
            person.is_attached, person.room, person.is_stalled = False, 0, False
            person.unseen.clear()
            self.delivery.remember(consumer, filters=person.filters)
        assert self.delivery.cursor == self.lowest_owed()

    def lowest_owed(self) -> int:
        offset = 0
        while offset in self.complete:
            offset += 1
        return offset

    def take(self) -> list:
        """Takes what is to be done, and judges it."""
        self._pass_over()
        instructions = self.delivery.take(self.now)
        for instruction in instructions:
            if isinstance(instruction, Send):
                self._check_send(instruction)
            else:
                self._check_handed(instruction)
        for offset in self.delivery._redelivery.blocked:
            self.status[offset] = "judged"
        self.check()
        self._check_nothing_is_forgotten()
        return instructions

    def check(self) -> None:
        self.delivery.validate_state()
        assert self.delivery.cursor == self.lowest_owed()
        stats = self.delivery.stats()
        assert stats.in_flight == len(self.in_flight())
        assert stats.waiting_retry == list(self.status.values()).count("waiting")
        assert stats.consumers == len(self.order)

    # -- judging ----------------------------------------------------------------------------

    def _pass_over(self) -> None:
        if not self.is_keyed:
            return
        is_passed: dict[str, bool] = {}
        for offset in sorted(self.status):
            key = self.log[offset]
            if key not in is_passed:
                is_passed[key] = self.status[offset] == "queued" and self.is_unwanted(key)
            if is_passed[key]:
                self._complete(offset)

    def _complete(self, offset: int) -> None:
        self.complete.add(offset)
        self.failures.pop(offset, None)
        self._lose(offset)
        for container in (self.status, self.holder, self.due):
            container.pop(offset, None)

    def _fail(self, offset: int, requested: int | None) -> None:
        self.failures[offset] = self.failures.get(offset, 0) + 1
        self._lose(offset)
        if self.is_exhausted(offset):
            del self.holder[offset]
            self.status[offset] = "judged"
            return
        delay = self.policy.delay_ms(self.failures[offset], requested)
        if delay == 0:
            del self.holder[offset]
            self.status[offset] = "queued"
        else:
            self.status[offset] = "waiting"
            self.due[offset] = self.now + delay / 1000

    def _is_held_back(self, offset: int) -> bool:
        """Whether a block may keep it from being sent, in a line."""
        return (
            self.policy.poison is PoisonPolicy.BLOCK
            and offset not in self.was_sent
            and any(self.is_blocking(other) for other in self.status if other < offset)
        )

    def _check_send(self, send: Send) -> None:
        consumer, offset, attempt = send
        key = self.log[offset]
        self.sends += 1
        assert self.status[offset] == "queued", f"{offset} was {self.status[offset]}"
        assert offset < len(self.log)
        assert not self.is_exhausted(offset)
        assert attempt == self.failures.get(offset, 0) + 1
        assert self.people[consumer].is_attached
        assert self.can_take(consumer), f"{consumer} is full"
        if self.is_keyed:
            assert self.first_of_key(offset) == offset, "overtakes another of its key"
            assert self.route(key) == consumer
        else:
            is_fresh = offset not in self.was_sent and offset not in self.failures
            assert not (is_fresh and self._is_held_back(offset)), "sent behind a blocked one"
            for other, status in self.status.items():
                if other < offset and status == "queued" and not self.is_exhausted(other):
                    assert self._is_held_back(other), f"{offset} was sent before {other}"
            if is_fresh:
                assert offset > self.last_fresh
                self.last_fresh = offset
        if self.kind in SINGLE:
            assert consumer == self.order[0] == self.delivery.active
        self.status[offset] = "sent"
        self.holder[offset] = consumer
        self.was_sent.add(offset)
        person = self.people[consumer]
        person.room -= 1
        if not person.unseen:
            person.heard_at = self.now
        person.unseen.append(offset)

    def _check_handed(self, instruction: DeadLetter | Drop) -> None:
        wanted = DeadLetter if self.policy.poison is PoisonPolicy.DEAD_LETTER else Drop
        assert isinstance(instruction, wanted)
        assert self.policy.poison is not PoisonPolicy.BLOCK
        offset = instruction.offset
        assert self.status[offset] in ("queued", "judged")
        assert self.is_exhausted(offset)
        assert instruction.attempt == self.failures[offset]
        if self.is_keyed:
            assert self.first_of_key(offset) == offset
        self.status[offset] = "handed"

    def _check_nothing_is_forgotten(self) -> None:
        """What can be sent has been."""
        may_block = self.policy.poison is PoisonPolicy.BLOCK
        seen: set[str] = set()
        for offset, status in sorted(self.status.items()):
            is_first = self.log[offset] not in seen
            seen.add(self.log[offset])
            if status == "judged":
                assert may_block, f"{offset} was not handed out"
            if status != "queued":
                continue
            if self.is_keyed:
                if not is_first:
                    continue
                route = self.route(self.log[offset])
                takers = [] if route is None else [route]
            else:
                if self._is_held_back(offset):
                    continue
                takers = self.order[:1] if self.kind in SINGLE else self.order
            free = [consumer for consumer in takers if self.can_take(consumer)]
            assert not free, f"{offset} is not sent, and {free} can take it"

    # -- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """With a consumer that takes everything, and time, every message is dealt with."""
        self.set_policy(poison="drop")
        for consumer in list(self.people):
            self.forget(consumer)
        self.attach(99)
        for _ in range(10 * len(self.log) + 100):
            self.set_room(99, 1000)
            self.offer()
            for instruction in self.take():
                if isinstance(instruction, Send):
                    self.ack(instruction.offset)
            for offset in self.handed():
                self.resolve(offset)
            if self.delivery.cursor == len(self.log):
                break
            self.pass_time(1.0)
        assert self.delivery.cursor == len(self.log)
        self.check()
        assert self.delivery.stats().pending == 0
        assert self.delivery.saved()["acked"] == self.delivery.saved()["failed"] == []
