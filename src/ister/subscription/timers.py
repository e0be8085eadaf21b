"""The times of a subscription: ack timeouts, silent consumers, redelivery delays.

Owns: when something is due. Does not own: what happens then (`delivery`), clocks (times are
seconds, given with each call). Does no I/O.

Invariants: a message in flight has an ack timeout, or is unreceived at a consumer whose silence is
watched; a message that waits or is postponed has a delay. Containers may still refer to messages
that are done; such references are skipped, and removed by `sweep`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final

from ister.errors import check
from ister.subscription.entries import ConsumerState, Entry, State

_NEVER: Final = float("inf")
_SENT: Final = State.SENT


class Timers:
    """When messages and consumers of one subscription are due.

    `entries` are all messages that are held, by offset; `timeout` is the ack timeout in seconds.
    """

    def __init__(self, entries: Mapping[int, Entry], timeout: float) -> None:
        self._entries = entries
        self.timeout = timeout
        self.now = float("-inf")
        """The time of the last event."""
        self.due_at = _NEVER
        """Before this time nothing is due. Not later than `deadline`."""
        self.waits: deque[tuple[float, Entry]] = deque()
        """Messages that wait to be written or, once received, to be answered; and since when."""
        self._silences: list[tuple[float, int, ConsumerState]] = []
        self._delays: list[tuple[float, int]] = []
        self._last_number = 0

    # -- messages in flight -------------------------------------------------------------------

    def expect_write(self, entries: Iterable[Entry]) -> None:
        """Starts the timeouts of messages that were handed to streams, and not written yet."""
        self.waits.extend([(self.now, entry) for entry in entries])
        self._expect_timeout()

    def write(self, entry: Entry, consumer: ConsumerState) -> None:
        """Numbers a message that is written to its consumer's stream, and watches the consumer."""
        self._last_number += 1
        entry.is_written = True
        entry.number = self._last_number
        if not _trim(consumer.unreceived):
            consumer.last_contact_at = self.now
            self._expect_timeout()
        consumer.unreceived.append((entry.number, entry))
        if not consumer.is_watched:
            consumer.is_watched = True
            heappush(self._silences, (consumer.last_contact_at, consumer.id, consumer))

    def mark_received(self, consumer: ConsumerState, last: int, but: Entry | None = None) -> None:
        """Starts the ack timeouts of messages up to a number: the program has them."""
        unreceived, now = consumer.unreceived, self.now
        while unreceived and unreceived[0][0] <= last:
            number, entry = unreceived.popleft()
            if entry is not but and entry.number == number and entry.state is _SENT:
                entry.is_received = True
                entry.sent_at = now
                self.waits.append((now, entry))
                self._expect_timeout()

    def _expect_timeout(self) -> None:
        due = self.now + self.timeout
        if due < self.due_at:  # noqa: PLR1730 - `min` takes three times as long
            self.due_at = due

    def start_delay(self, entry: Entry, delay_ms: int) -> None:
        """Starts the delay of a message that waits for its redelivery, or is postponed."""
        entry.due = self.now + max(0, delay_ms) / 1000
        heappush(self._delays, (entry.due, entry.offset))
        self.due_at = min(self.due_at, entry.due)

    # -- what is due --------------------------------------------------------------------------

    def pop_timed_out(self) -> Entry | None:
        """Removes and returns a message that was not written, or not answered, in time."""
        since = self._oldest_wait()
        if since is None or since + self.timeout > self.now:
            return None
        return self.waits.popleft()[1]

    def silent_consumer(self) -> ConsumerState | None:
        """A consumer with unreceived messages that is silent; the first of them is in flight."""
        silence = self._first_silence()
        if silence is None or silence[0] + self.timeout > self.now:
            return None
        return silence[2]

    def pop_delayed(self) -> Entry | None:
        """Removes and returns a message whose delay has passed."""
        due = self._next_delay()
        if due is None or due > self.now:
            return None
        return self._entries[heappop(self._delays)[1]]

    def deadline(self) -> float | None:
        """When something is due next; None if nothing is."""
        wait, silence, due = self._oldest_wait(), self._first_silence(), self._next_delay()
        times = [] if due is None else [due]
        if wait is not None:
            times.append(wait + self.timeout)
        if silence is not None:
            times.append(silence[0] + self.timeout)
        return min(times, default=None)

    def reschedule(self) -> None:
        """Sets `due_at` after all that was due was handled."""
        deadline = self.deadline()
        self.due_at = _NEVER if deadline is None else deadline

    def _oldest_wait(self) -> float | None:
        waits = self.waits
        while waits:
            since, entry = waits[0]
            if _is_timed(since, entry):
                return since
            waits.popleft()
        return None

    def _first_silence(self) -> tuple[float, int, ConsumerState] | None:
        silences = self._silences
        while silences:
            since, name, consumer = silences[0]
            if not _trim(consumer.unreceived):
                heappop(silences)
                consumer.is_watched = False
            elif consumer.last_contact_at > since:
                heapreplace(silences, (consumer.last_contact_at, name, consumer))
            else:
                return silences[0]
        return None

    def _next_delay(self) -> float | None:
        delays = self._delays
        while delays:
            if self._is_running(delays[0]):
                return delays[0][0]
            heappop(delays)
        return None

    def _is_running(self, delay: tuple[float, int]) -> bool:
        entry = self._entries.get(delay[1])
        return (
            entry is not None
            and entry.state in (State.WAITING, State.POSTPONED)
            and entry.due == delay[0]
        )

    # -- upkeep -------------------------------------------------------------------------------

    def forget(self, consumer: ConsumerState) -> None:
        """Stops watching a consumer that does not come back."""
        if consumer.is_watched:
            self._silences = [one for one in self._silences if one[2] is not consumer]
            heapify(self._silences)

    def clear(self) -> None:
        """Forgets every message; consumers are still watched."""
        self.waits.clear()
        self._delays.clear()

    def sweep(self) -> None:
        """Removes references to messages that are done."""
        self._delays = [delay for delay in self._delays if self._is_running(delay)]
        heapify(self._delays)
        self.sweep_waits()

    def sweep_waits(self) -> None:
        """Removes references to messages that do not wait any more."""
        self.waits = deque((since, one) for since, one in self.waits if _is_timed(since, one))

    def validate(self, known: Mapping[int, ConsumerState]) -> None:
        """Raises InvariantError if an invariant does not hold."""
        timeouts = {(entry.offset, since) for since, entry in self.waits}
        times = [since for since, _ in self.waits]
        check(times == sorted(times), "timeouts are out of order")
        deadline = self.deadline()
        check(deadline is None or self.due_at <= deadline, f"{deadline} is not waited for")
        delays = {(offset, due) for due, offset in self._delays}
        unreceived: set[tuple[int, int]] = set()
        watched = [name for _, name, _ in self._silences]
        check(len(watched) == len(set(watched)), f"watched twice: {watched}")
        for name, consumer in known.items():
            numbers = [number for number, _ in consumer.unreceived]
            check(numbers == sorted(set(numbers)), f"unreceived out of order at {name}")
            check(not numbers or consumer.is_watched, f"{name} may be silent for ever")
            check(consumer.is_watched == (name in watched), f"{name} is half watched")
            unreceived.update((entry.offset, number) for number, entry in consumer.unreceived)
        for offset, entry in self._entries.items():
            if entry.state is State.SENT and entry.is_written and not entry.is_received:
                check((offset, entry.number) in unreceived, f"{entry} is neither received nor not")
            elif entry.state is State.SENT:
                check((offset, entry.sent_at) in timeouts, f"{entry} never times out")
            elif entry.state in (State.WAITING, State.POSTPONED):
                check((offset, entry.due) in delays, f"{entry} waits for ever")


def _is_timed(since: float, entry: Entry) -> bool:
    """Whether a message has waited since then: to be written or, once received, for an answer."""
    return entry.state is _SENT and entry.sent_at == since and entry.is_written == entry.is_received


def is_unreceived(number: int, entry: Entry) -> bool:
    """Whether a message that was sent under a number is in flight, and not known as received."""
    return entry.number == number and entry.state is _SENT and not entry.is_received


def _trim(unreceived: deque[tuple[int, Entry]]) -> bool:
    """Removes messages that are no longer in flight from the front; whether one is left."""
    while unreceived and not is_unreceived(*unreceived[0]):
        unreceived.popleft()
    return bool(unreceived)
