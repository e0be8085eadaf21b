"""The broker's topics, limits, schemas and callers, as the Flight service uses them.

Flight reads and appends in threads. Topics are found and made on the loop, where they are served;
messages then go straight into the log from the thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from ister import kernels
from ister.base.limits import LOAD_SECONDS, MANY_ROWS, MIB
from ister.base.model import AckLevel, Codec
from ister.broker.publish.admission import StagedGate, admission_of_rows
from ister.broker.security.guard import Caller, Guard, current_caller, entered
from ister.broker.security.rights import Permission
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.time_searches import TimeSearches
from ister.broker.topics.topics import Topics
from ister.config import Config
from ister.errors import InvalidRequestError, UnauthenticatedError, UnavailableError
from ister.topic.dedup import SequencedTopic

if TYPE_CHECKING:
    import pyarrow as pa

    from ister.format.payloads import Payloads
    from ister.topic.batches import AppendedBatch, StagedBatch

_OPEN_SECONDS: Final = 60.0
# How often a thread that waits looks whether its caller has left.
_LOOK_SECONDS: Final = 0.1

Answer = TypeVar("Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class FlightLimits:
    """What one service takes on."""

    streams_max: int = 1024
    """Reads and publishes under way; each may use a thread. A setting, as the next one."""
    streams_per_caller_max: int = 256
    """Reads and publishes of one authenticated caller."""
    batch_rows_max: int = 65_536
    batch_bytes_max: int = 32 * MIB
    """Of one batch, or as much as one message may have."""
    unacked_bytes_max: int = 64 * MIB
    """Of one stream: what is appended and not yet answered. More is not read from the network."""
    topics_max: int = 10_000
    """Topics in one question."""

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise InvalidRequestError(f"{name} is {getattr(self, name)}", hint="at least 1")


class BrokerSource:
    """The broker's topics, for Flight. Thread-safe; not to be called on the loop."""

    def __init__(self, topics: Topics, loop: asyncio.AbstractEventLoop) -> None:
        self._topics = topics
        self._loop = loop
        self._ending = threading.Event()

    @property
    def config(self) -> Config:
        """The broker's settings; clients see a part of them."""
        return self._topics.config

    @property
    def searches(self) -> TimeSearches:
        """Where searches for a time run."""
        return self._topics.searches

    def open(
        self,
        name: str,
        *,
        creator: FlightCaller | None = None,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
    ) -> SequencedTopic:
        """A topic with a log; made with these settings for `creator` if it does not exist.

        Raises:
            NotFoundError: It does not exist, and is not to be made.
            IsterError: It cannot be opened here.
        """
        topic = self._topics.find_open(name)
        if topic is None:
            topic = self._on_loop(
                self._topics.get(name)
                if creator is None
                else self._topics.get_or_create(
                    name,
                    is_reliable=True,
                    ack=ack,
                    codec=codec,
                    check_growth=lambda base: creator.check(Permission.MANAGE_TOPIC, topic=base),
                )
            )
        if topic.sequenced is None:
            raise InvalidRequestError(
                "the topic is not reliable: it has no log", topic=name, hint="use gRPC"
            )
        return topic.sequenced

    def names(self) -> list[str]:
        """The names of all topics that have a log."""
        return self._topics.log.topics()

    def append_staged(
        self,
        name: str,
        staged: StagedBatch,
        principal: str,
        is_gone: Callable[[], bool],
    ) -> AppendedBatch:
        """As `Log.append_staged`, for rows that the topic admits."""
        self.open(name)
        if staged.rows >= MANY_ROWS:
            kernels.load_cached(LOAD_SECONDS)
        gate = StagedGate(
            admission=self._topics.admission,
            topic=self._served(name),
            principal=principal,
            now=self._loop.time,
            pause=partial(self._pause, is_gone),
        )
        return self._topics.log.append_staged(name, staged, gate)

    def admit(
        self,
        topic: SequencedTopic,
        batch: pa.RecordBatch | Payloads,
        *,
        producer: str | None,
        principal: str,
        is_gone: Callable[[], bool],
    ) -> None:
        """Checks rows before they are appended, and waits for the topic's rate; blocks.

        `producer` is None if it does not number its rows. The wait ends if `is_gone` says that the
        caller has left.
        """
        served = self._served(topic.topic.name)
        if served.sequenced is not topic:
            raise UnavailableError("the topic is being reopened; retry", topic=served.name)
        admission = self._topics.admission
        admission.check(served, admission_of_rows(batch, producer), principal)
        pause = partial(self._pause, is_gone)
        admission.wait(served, batch.num_rows, now=self._loop.time, pause=pause)

    def _pause(self, is_gone: Callable[[], bool], seconds: float) -> bool:
        """Waits that long; True as soon as the broker is ending, or the caller has disconnected."""
        end = self._loop.time() + seconds
        while (left := end - self._loop.time()) > 0:
            if self._ending.wait(min(left, _LOOK_SECONDS)) or is_gone():
                return True
        return False

    def _served(self, name: str) -> ServedTopic:
        served = self._topics.find_open(name)
        if served is None:
            raise UnavailableError("the topic is being reopened; retry", topic=name)
        return served

    def admits_at_once(
        self, topic: SequencedTopic, *, producer: str | None, principal: str
    ) -> bool:
        """Whether `admit` takes no time worth a thread, so that the loop may call it.

        The topic has no rate, and its checks call no store and no schema.
        """
        served = self._topics.find_open(topic.topic.name)
        return (
            served is not None
            and not served.publish_rate.per_second
            and self._topics.admission.is_quick(served, producer, principal)
        )

    def count_appended(self, topic: SequencedTopic, batch: pa.RecordBatch | Payloads) -> None:
        """Counts rows that were appended."""
        served = self._topics.find_open(topic.topic.name)
        if served is not None:
            served.counters.count_batch(batch)

    def publishing(
        self, topic: SequencedTopic, producer: str | None
    ) -> AbstractContextManager[None]:
        """Counts a producer for as long as it publishes."""
        served = self._topics.find_open(topic.topic.name)
        return served.counters.publishing(producer) if served is not None else nullcontext()

    def end(self) -> None:
        """Ends all waiting."""
        self._ending.set()

    def _on_loop(self, work: Coroutine[object, None, Answer]) -> Answer:
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(_OPEN_SECONDS)
        except TimeoutError as error:
            future.cancel()
            raise UnavailableError("the topic could not be opened in time") from error


class FlightAccess:
    """Identifies callers; `GrpcGuard` has let them in."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    def caller(self) -> FlightCaller:
        """Returns the caller of the call that the current task serves."""
        caller = current_caller()
        if caller is None:
            if self._guard.is_needed:
                raise UnauthenticatedError("the caller was not authenticated")
            caller = self._guard.enter({})
        return FlightCaller(self._guard, caller)


class FlightCaller:
    """The caller of a Flight call, and its rights. Thread-safe."""

    def __init__(self, guard: Guard, caller: Caller) -> None:
        self._guard = guard
        self._caller = caller

    @property
    def name(self) -> str:
        """The caller's principal; "" with auth off."""
        return str(self._caller.principal) if self._guard.is_on else ""

    def check(self, permission: Permission, *, topic: str | None = None) -> None:
        """Checks a permission of the caller."""
        self._caller.verify()
        with entered(self._caller):
            self._guard.check(self._caller.principal, permission, topic=topic)

    def allows(self, permission: Permission, *, topic: str | None = None) -> bool:
        """Whether the caller may; raises UnavailableError as `check` does."""
        return self._guard.allows(self._caller.principal, permission, topic=topic)
