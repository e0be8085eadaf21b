"""All topics of this broker: partitions, moves, take-overs, deletion, start and shutdown.

Owns: what is done with whole topics. Does not own: opening them (`open_topics`), names (`names`),
what is done with an open one (`served_topic`), and which node owns it (`ister.bucket.claim`).

Names are compared whole, everywhere: `/default/t` is neither `/default/t2` nor a part of it. A
partitioned topic is the topics `<name>-part-0`, `<name>-part-1`, …; a plain one of the same name
excludes them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from ister.base.model import AckLevel, Codec, TopicName
from ister.base.partitions import PARTITIONS_MAX, parse_partition, partition_name
from ister.broker.policies import Policies
from ister.broker.topics.open_topics import ElsewhereError, OpenTopics
from ister.broker.topics.tasks import finish, run_to_completion
from ister.config import StorageMode
from ister.errors import (
    AlreadyExistsError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    TopicNameError,
    UnavailableError,
)
from ister.topic.read_only import ReadOnlyTopic

_log = logging.getLogger("ister.broker.topics.topics")

_OPEN_AT_ONCE: Final = 8
# How long an end waits for deletions and the like; a store may not answer.
_FINISH_SECONDS: Final = 3.0
# How long a caller waits for another broker to hand a topic over.
_MOVE_SECONDS: Final = 30.0
_MOVE_POLL_SECONDS: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """What a take-over gives up: messages from `offset` on that only the disk of `node` has."""

    topic: str
    node: str
    offset: int


class Topics(OpenTopics):
    """The topics of one broker. Used on its loop alone."""

    # -- partitions -------------------------------------------------------------------------

    async def create_partitioned(
        self,
        name: str,
        count: int,
        *,
        is_reliable: bool,
        ack: AckLevel | None = None,
        codec: Codec | None = None,
        is_growing: bool = False,
    ) -> list[str]:
        """Creates a topic of `count` partitions, unless it exists.

        The first partition of a new topic is created last: while it is missing, the topic is
        incomplete, and the same call completes it.

        Args:
            name: The topic's name.
            count: The number of partitions.
            is_reliable: Whether new partitions have a log.
            ack: The ack level of new partitions.
            codec: The codec of new partitions.
            is_growing: Whether to add partitions to a topic that has fewer. Which partition a key
                goes to depends on their number, so this has to be asked for.

        Raises:
            InvalidRequestError: Not a number of partitions.
            AlreadyExistsError: It has another number of partitions.
            NotFoundError: `is_growing`, and there is no such partitioned topic.
            As `get_or_create`.
        """
        if not 1 <= count <= PARTITIONS_MAX:
            raise InvalidRequestError(f"a topic has 1 to {PARTITIONS_MAX} partitions")
        async with self._lock_of(f"partitions {name}"):
            TopicName.parse(name)
            known = (await self._listing.cached(0.0)).partitions_of(name)
            if not known and is_growing:
                raise NotFoundError(f"there is no partitioned topic {name}", topic=name)
            last = parse_partition(known[-1]) if known else None
            has = count if last is None else last[1] + 1
            if has > count or (has < count and not is_growing):
                raise AlreadyExistsError(
                    f"{name} has {has} partitions, not {count}",
                    topic=name,
                    hint="`ister topics grow` adds partitions; most keys then move to another one"
                    if has < count
                    else "partitions cannot be removed",
                )
            names = [partition_name(name, number) for number in range(count)]
            for one in names if is_growing else reversed(names):
                await self.create_anywhere(one, is_reliable=is_reliable, ack=ack, codec=codec)
            return names

    async def create_anywhere(
        self, name: str, *, is_reliable: bool, ack: AckLevel | None, codec: Codec | None
    ) -> None:
        """Creates a topic at the broker that should have it.

        Raises:
            As `get_or_create`.
        """
        try:
            await self.get_or_create(
                name,
                is_reliable=is_reliable,
                ack=ack,
                codec=codec,
                is_implied=False,
                is_exact=True,
                check_growth=lambda _: None,
            )
        except ElsewhereError as error:
            if self.peers is None:
                raise
            await self.peers.create_topic(
                error.member, name, is_reliable=is_reliable, ack=ack, codec=codec
            )
            self._listing.record(name, exists=True)

    # -- changing, moving and deleting ------------------------------------------------------

    async def set_topic_policies(self, name: str, policies: dict[str, int]) -> Policies:
        """Replaces a topic's own policies; returns the policies in force."""
        topic = await self.get(name)
        await asyncio.to_thread(self.records.set_topic_policies, topic.parsed, policies)
        return await self._refresh_policies(topic)

    async def unload(self, name: str, *, to: str | None = None, reason: str = "unloaded") -> None:
        """Hands a topic over to another broker, if there is one.

        Appends continue while what is in local files is uploaded and checked. Then streams end,
        the rest and all cursors go to the stores, and the other broker opens the topic.

        Args:
            name: The topic.
            to: The other broker's node; the one with the least load by default.
            reason: Why, for the assignment.

        Raises:
            ConflictError: The log is in memory, so the topic would be lost.
            NotFoundError: It is not open here.
            UnavailableError: A store does not respond; the topic is still this broker's.
        """
        if name in self._moving:
            raise UnavailableError("the topic is being handed over", topic=name)
        self._moving.add(name)
        try:
            await run_to_completion(self._unload(name, to, reason))
        finally:
            self._moving.discard(name)

    async def _unload(self, name: str, to: str | None, reason: str) -> None:
        topic = await self.get(name)
        if self.config.storage.mode is StorageMode.MEMORY:
            raise ConflictError(
                "storage.mode is memory: a topic that is unloaded would be gone", topic=name
            )
        if to is None:
            placement = await asyncio.to_thread(self.cluster.placement)
            to = placement.choose(name)
        assured: set[tuple[str, int]] = set()
        bucket = topic.topic.bucket if topic.topic is not None else None
        if bucket is not None and not topic.is_read_only:
            # Before its streams end: it may take long, and clients do not notice.
            try:
                assured = await asyncio.to_thread(bucket.prepare_seal)
            except CorruptDataError:
                if self._served.get(name) is not topic:
                    # Nothing is corrupt: it was deleted meanwhile.
                    raise _not_open_here(name) from None
                raise
        async with self._lock_of(name):
            if self._served.get(name) is not topic or self.is_draining:
                raise _not_open_here(name)
            # Cursors, now and again when the streams have ended: no other broker can write them.
            await topic.flush()
            if to is not None:
                # Before the hand-over, so that look-ups already lead there; and again after it,
                # because that is when the other broker can open it.
                await asyncio.to_thread(self.cluster.assign, name, to, reason)
            reason_text = "the topic is being moved to another broker"
            await self._drop(topic, UnavailableError(reason_text, topic=name))
            await topic.flush()
            if topic.is_read_only or not topic.is_reliable:
                await asyncio.to_thread(self._release, topic)
            else:
                await asyncio.to_thread(partial(self.log.seal, name, assured=assured))
                self.sequenced.forget(name)
            if to is not None:
                await asyncio.to_thread(self.cluster.assign, name, to, reason)
                self.moved_total += 1

    async def hand_over(self) -> int:
        """Hands all topics over to other brokers, several at a time; takes none from now on.

        A topic that cannot be handed over stays this node's.

        Returns:
            How many topics were handed over; 0 if there is no other broker.

        Raises:
            UnavailableError: The metadata store does not answer.
        """
        await asyncio.to_thread(self.cluster.drain)
        moved, _ = await self.hand_over_topics([topic.name for topic in self.served])
        return len(moved)

    async def hand_over_topics(
        self, names: Sequence[str], *, at_once: int = _OPEN_AT_ONCE, timeout: float | None = None
    ) -> tuple[list[str], list[str]]:
        """Hands topics over to other brokers, each to the one with the least load.

        Args:
            names: The topics.
            at_once: How many at a time.
            timeout: Seconds after which no further topic is handed over; None for no limit.

        Returns:
            Those that were handed over, and those that could not be.

        Raises:
            UnavailableError: The metadata store does not answer.
        """
        placement = await asyncio.to_thread(self.cluster.placement)
        loop, gate = asyncio.get_running_loop(), asyncio.Semaphore(at_once)
        end_at = float("inf") if timeout is None else loop.time() + timeout
        moved: list[str] = []
        failed: list[str] = []

        async def leave(name: str, to: str) -> None:
            async with gate:
                if loop.time() >= end_at:
                    return
                try:
                    await self.unload(name, to=to, reason="its broker is drained")
                    moved.append(name)
                except IsterError as error:
                    failed.append(name)
                    _log.warning(
                        "topic not handed over", extra={"topic": name, "error": str(error)}
                    )

        chosen = [(name, placement.choose(name)) for name in names]
        await asyncio.gather(*(leave(name, to) for name, to in chosen if to is not None))
        return moved, failed

    async def move(self, name: str, to: str) -> None:
        """Moves a topic to another broker, whichever broker has it; returns when it is there.

        A later move of the same topic replaces this one.

        Raises:
            NotFoundError: The topic or the broker does not exist.
            ConflictError: The broker takes no topics, or the topic was assigned to another one.
            UnavailableError: The topic is not there in time, or a store does not respond.
        """
        parsed = TopicName.parse(name)
        members = {one.node: one for one in await asyncio.to_thread(self.cluster.brokers)}
        target = members.get(to)
        if target is None:
            raise NotFoundError(f"there is no broker {to}", hint="ister brokers list")
        if not target.takes_topics:
            why = f"is {target.state}" if not target.is_active else "has no room on its disk"
            raise ConflictError(f"the broker {to} {why}")
        found = await asyncio.to_thread(self._route, parsed)
        if found.node == to:
            # A move that is under way, or cannot be made, would still take it away.
            await asyncio.to_thread(self.cluster.keep, name, to, "moved")
        elif found.node == self.cluster.own.node:
            await self.unload(name, to=to, reason="moved")
        else:
            await asyncio.to_thread(self.cluster.assign, name, to, "moved")
        await self._wait_for_owner(parsed, to)

    async def _wait_for_owner(self, name: TopicName, node: str) -> None:
        loop = asyncio.get_running_loop()
        give_up_at = loop.time() + _MOVE_SECONDS
        while (await asyncio.to_thread(self.cluster.owner_node, name)) != node:
            assigned = await asyncio.to_thread(self.cluster.assigned_node, str(name))
            if assigned != node:
                raise ConflictError(
                    f"the topic was assigned to the broker {assigned} meanwhile"
                    if assigned is not None
                    else "the topic was deleted meanwhile",
                    topic=str(name),
                )
            if loop.time() > give_up_at:
                raise UnavailableError(
                    f"the broker {node} does not have the topic after {_MOVE_SECONDS:.0f} seconds",
                    topic=str(name),
                    hint="it is assigned to that broker, and moves when both brokers can",
                )
            await asyncio.sleep(_MOVE_POLL_SECONDS)

    async def find_lost_tail(self, name: str) -> GivenUp:
        """What a take-over of a topic would give up.

        Raises:
            NotFoundError: It does not exist.
            ConflictError: A broker has it, or its last broker is up.
        """
        return await asyncio.to_thread(self._find_lost_tail, TopicName.parse(name))

    def _find_lost_tail(self, name: TopicName) -> GivenUp:
        stores = self.log.stores
        if stores is None:
            raise ConflictError("this broker has no bucket to continue from", topic=str(name))
        catalog = stores.catalog(name)
        found, owner = catalog.record(), self.cluster.owner_node(name)
        if found is None or not found[0].is_open:
            if self.records.topic(name) is not None:
                raise ConflictError(
                    "the topic is not reliable: no disk has messages of it", topic=str(name)
                )
            raise NotFoundError(f"topic {name} does not exist", topic=str(name))
        node = owner if owner is not None else found[0].node
        if owner is not None or any(one.node == node for one in self.cluster.brokers()):
            raise ConflictError(
                f"the broker {node}, which has the topic, is up, or its lease has not ended yet",
                topic=str(name),
                hint=f"ister topics move {name} --to NODE moves it without a loss",
            )
        last = catalog.last()
        return GivenUp(topic=str(name), node=node, offset=last.end if last is not None else 0)

    async def take_over(self, name: str) -> GivenUp:
        """Opens a topic whose newest messages are on a lost disk; returns what it gives up.

        Raises:
            As `find_lost_tail`, and `Log.topic`.
        """
        return await run_to_completion(self._take_over(TopicName.parse(name)))

    async def _take_over(self, name: TopicName) -> GivenUp:
        text = str(name)
        async with self._lock_of(text):
            given_up = await asyncio.to_thread(self._find_lost_tail, name)
            served = self._served.get(text)
            if served is not None:
                ended = UnavailableError("the topic is being taken over", topic=text)
                await self._drop(served, ended)
                await asyncio.to_thread(self._release, served)
            await asyncio.to_thread(self.log.topic, text, take_over=True)
            await asyncio.to_thread(self.cluster.assign, text, self.cluster.own.node, "taken over")
        _log.warning(
            "topic taken over",
            extra={"topic": text, "node": given_up.node, "offset": given_up.offset},
        )
        await self.get(text)
        return given_up

    async def give_up_tails(self) -> None:
        """Takes over topics that have waited for their broker for as long as the settings allow."""
        after = self.config.broker.cluster.failover.give_up_tail_after_seconds
        if after is None:
            return
        now = self._context.clock.boottime()
        for topic in self.served:
            core = topic.topic
            if isinstance(core, ReadOnlyTopic) and now - core.opened_at >= after:
                try:
                    await self.take_over(topic.name)
                except IsterError as error:
                    _log.warning(
                        "topic not taken over", extra={"topic": topic.name, "error": str(error)}
                    )

    async def delete(self, name: str) -> None:
        """Deletes a topic for good, or all partitions of one.

        Raises:
            NotFoundError: It does not exist.
            As `Log.delete`.
        """
        await run_to_completion(self._delete_all(name))

    async def _delete_all(self, name: str) -> None:
        self._listing.expire()  # all partitions have to be found
        partitions = await self.partitions(name)
        if not partitions:
            raise NotFoundError(f"topic {name} does not exist", topic=name)
        for one in partitions:
            await self._delete(one)

    async def _delete(self, name: str) -> None:
        try:
            await self.get(name)
        except ElsewhereError as error:
            if self.peers is None:
                raise
            await self.peers.delete_topic(error.member, name)
            self._listing.record(name, exists=False)
            # This broker has settings of it in a cache.
            await asyncio.to_thread(self._forget_schema, name)
            return
        async with self._lock_of(name):
            topic = self._served.get(name)
            if topic is None:
                raise NotFoundError(f"topic {name} does not exist", topic=name)
            if isinstance(topic.topic, ReadOnlyTopic):
                # Before anything of it is removed: its broker comes back with it.
                raise topic.topic.refused_error()
            await self._drop(
                topic, NotFoundError(f"the topic {name} was deleted", topic=name), flush=False
            )

            def remove() -> None:
                # The log last: as long as it exists, a failed deletion can be repeated.
                self.store.delete_all(topic.parsed)
                self._forget_schema(name)
                if topic.is_reliable:
                    self.log.delete(name)
                self.records.delete_topic(topic.parsed)
                self.cluster.release_unlogged(topic.parsed)
                self.cluster.forget(name)

            await asyncio.to_thread(remove)
            self.unopened.pop(name, None)
            self._listing.record(name, exists=False)
            self.sequenced.forget(name)
            self.consumers.forget_subscription(name)

    def _forget_schema(self, name: str) -> None:
        if self._schemas is not None:
            self._schemas.forget_topic(name)

    # -- life -------------------------------------------------------------------------------

    async def open_all(self) -> None:
        """Opens every topic that is this node's, so that the first call finds it recovered."""
        own = await asyncio.to_thread(self.cluster.own_topics)
        names = sorted(await self.names() if own is None else own)
        gate = asyncio.Semaphore(_OPEN_AT_ONCE)
        self.opening = (0, len(names))

        async def open_one(name: str) -> None:
            async with gate:
                try:
                    await self.get(name)
                except (UnavailableError, NotFoundError, TopicNameError) as error:
                    _log.info("topic not opened", extra={"topic": name, "why": str(error)})
                except (IsterError, CorruptDataError) as error:
                    # One bad topic must not keep the others from their users.
                    self.unopened[name] = str(error)
                    _log.error("topic not opened", extra={"topic": name, "error": str(error)})
                self.opening = (self.opening[0] + 1, len(names))

        await asyncio.gather(*(open_one(name) for name in names))

    async def close(self) -> None:
        """Ends every stream and writes every cursor; no topic is opened any more."""
        self.is_draining = True
        await asyncio.to_thread(self.searches.close)
        await finish(_FINISH_SECONDS)
        reason = UnavailableError("the broker is shutting down")
        flush = self.cluster.is_leased
        await asyncio.gather(*(self._drop(topic, reason, flush=flush) for topic in self.served))
        await asyncio.gather(*self._tasks, return_exceptions=True)


def _not_open_here(name: str) -> NotFoundError:
    return NotFoundError(f"the topic {name} is not open here", topic=name)
