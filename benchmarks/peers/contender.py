"""The interface of a contender: one server with its usual Python client, at one durability.

    start ─► open_topic ─► publish · publish_waiting · publish_many · consume · replay · follow
             kill ─► start again ─► stored                                            ─► stop

Two durabilities are compared. `synced`: a message is answered after it was synced to the disk.
`unsynced`: it is answered before that; the peer's default, and Ister's level `written`.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar


class MissingError(Exception):
    """This contender cannot be measured here; the text says why."""


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the page says about a contender."""

    server: str
    """Name and version."""
    client: str
    durability: str
    """What an answer means at this durability, and by which setting."""
    settings: str
    """Of the server and the client, as far as they are not the defaults."""
    consuming: str
    """What consumes, what an acknowledgement is, and what replays."""
    caveats: list[str] = field(default_factory=list)


class Quota:
    """How much of a backlog is read: a number of messages, or as many as fit into a time."""

    def __init__(self, messages: int, seconds: float) -> None:
        self.messages = messages
        self.count = 0
        self.elapsed = 0.0
        self._seconds = seconds
        self._began = 0.0

    def begin(self) -> None:
        """Starts the clock, once the consumer is open."""
        self._began = time.perf_counter()

    def take(self, count: int) -> bool:
        """Counts messages that were received; returns whether to read more."""
        self.count += count
        self.elapsed = time.perf_counter() - self._began
        return self.count < self.messages and self.elapsed < self._seconds

    def end(self) -> None:
        """Stops the clock, once everything is acknowledged."""
        self.elapsed = time.perf_counter() - self._began


class Contender(ABC):
    """A server with its client. All methods run on one event loop."""

    batches: ClassVar[bool] = True
    """Whether the client has a way to publish in bulk, and to replay."""
    consumes: ClassVar[bool] = True
    """Whether it has subscriptions."""
    restarts: ClassVar[bool] = True
    """Whether a restart is measured here."""

    lingers: ClassVar[tuple[float, ...]] = ()
    """How long a client that has such a setting may wait for more messages, in ms: with many
    senders the best of these is used, otherwise 0."""

    def __init__(self, directory: Path, cache: Path | None, durability: str) -> None:
        self.directory = directory
        self.cache = cache
        self.is_synced = durability == "synced"
        self.topic = ""
        self.linger = 0.0

    @abstractmethod
    def facts(self) -> Facts:
        """Versions and settings; called when everything is measured."""

    @abstractmethod
    async def start(self) -> None:
        """Starts the server on its directory and connects; the topic stays the one it was.

        Raises:
            MissingError: It cannot be measured here.
            StartError: The server did not start.
        """

    @abstractmethod
    async def open_topic(self, name: str) -> None:
        """Creates a topic, which all later calls use."""

    @abstractmethod
    async def stop(self) -> None:
        """Ends the client and the server, whatever state they are in."""

    @abstractmethod
    async def kill(self) -> None:
        """Ends the server as `kill -9` does, and drops the client."""

    @abstractmethod
    def pids(self) -> list[int]:
        """The processes whose memory is the server's."""

    @abstractmethod
    async def publish(self, payload: bytes) -> None:
        """Publishes a message and returns when it is answered."""

    async def publish_waiting(self, payloads: Iterable[bytes], senders: int) -> list[float]:
        """Publishes with that many senders, each of which waits for its answer before the next.

        Returns:
            How long each message took to its answer, in seconds.
        """
        times: list[float] = []
        shared = iter(payloads)

        async def send() -> None:
            clock, publish = time.perf_counter, self.publish
            for payload in shared:
                began = clock()
                await publish(payload)
                times.append(clock() - began)

        await asyncio.gather(*(send() for _ in range(senders)))
        return times

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        """Publishes as fast as the client can, and returns when everything is answered."""
        raise NotImplementedError

    @abstractmethod
    async def consume(self, name: str, quota: Quota) -> None:
        """Reads from the first message on, in a new subscription, and acknowledges."""

    async def replay(self, quota: Quota) -> None:
        """Reads from the first message on, and acknowledges nothing."""
        raise NotImplementedError

    @abstractmethod
    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        """Passes messages published from now on to `on_message`, and acknowledges them.

        Runs until it is cancelled.

        `ready` is set once the next message would be delivered.
        """

    @abstractmethod
    async def stored(self) -> int:
        """How many messages the topic has."""


def chunked(payloads: Iterable[bytes], size: int) -> Iterable[list[bytes]]:
    """Yields lists of at most `size` payloads."""
    iterator = iter(payloads)
    while chunk := list(itertools.islice(iterator, size)):
        yield chunk
