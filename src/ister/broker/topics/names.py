"""The names of topics and namespaces, and the policies that belong to them.

Owns: listing, namespaces, which topics are behind a name, policies. Does not own: topics that are
open (`topics`), how names are cached (`listing`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Container, Mapping
from typing import Final

from ister.base.model import TopicName
from ister.broker.followed import Followed
from ister.broker.policies import Policies
from ister.broker.topics.broker_records import BrokerRecords, ServedRecord
from ister.broker.topics.listing import TopicListing
from ister.broker.topics.served_topic import ServedTopic
from ister.config import Config
from ister.errors import AlreadyExistsError, ConflictError, NotFoundError
from ister.topic.log import Log

_BUILT_IN_NAMESPACES: Final = ("default", "system")
_LOOK_SECONDS: Final = 1.0
_LISTED_SECONDS: Final = 3.0


class TopicNames:
    """The names of all topics, and their namespaces. Used on the broker's loop alone."""

    def __init__(
        self,
        log: Log,
        records: BrokerRecords,
        *,
        config: Config,
        served: Mapping[str, ServedTopic],
    ) -> None:
        """`served` are the topics that are open here, as they change."""
        self._log = log
        self._records = records
        self._config = config
        self._served = served
        self.listing = TopicListing(log, records, lambda: served)
        self.policy_changes = 0
        """Counts changes of namespaces: a topic that opens meanwhile reads its policies again."""

    # -- names ------------------------------------------------------------------------------

    async def all(self) -> set[str]:
        """The names of all topics, open or not, here or elsewhere."""
        return await self.listing.list()

    async def recent(self) -> set[str]:
        """Topic names, cached for up to 3 s."""
        return set(await self.listing.cached(_LISTED_SECONDS))

    async def partitions(self, name: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; [] if it does not exist."""
        parsed = TopicName.parse(name)
        served = self._served.get(name)
        if served is not None and served.is_usable:
            return [name]
        known = await self.listing.cached(_LOOK_SECONDS)
        if name in known:
            return [name]
        if self._log.stores is None:
            return known.partitions_of(name)
        # Another broker may have just created it. Danube's client does not retry if there are no
        # partitions, and a client that learns of some never publishes to the others.
        return list(await asyncio.to_thread(self.listing.read_partitions, parsed))

    async def namespaces(self) -> list[str]:
        """The names of all namespaces."""
        made = await asyncio.to_thread(self._records.namespaces)
        return sorted({*_BUILT_IN_NAMESPACES, *self._config.broker.bootstrap_namespaces, *made})

    async def create_namespace(self, name: str) -> None:
        """Creates a namespace."""
        TopicName.parse(f"/{name}/x")
        if name in await self.namespaces():
            raise AlreadyExistsError(f"namespace {name!r} already exists")
        await asyncio.to_thread(self._records.create_namespace, name)

    async def delete_namespace(self, name: str) -> None:
        """Removes an empty namespace."""
        if name in (*_BUILT_IN_NAMESPACES, *self._config.broker.bootstrap_namespaces):
            raise ConflictError(f"the namespace {name!r} always exists")
        if topics := await self.of_namespace(name):
            raise ConflictError(
                f"the namespace {name!r} has {len(topics)} topics", hint="delete them first"
            )
        await asyncio.to_thread(self._records.delete_namespace, name)

    async def of_namespace(self, namespace: str) -> list[str]:
        """The topics of a namespace."""
        if namespace not in await self.namespaces():
            raise NotFoundError(f"namespace {namespace!r} does not exist")
        prefix = f"/{namespace}/"
        return sorted(name for name in await self.all() if name.startswith(prefix))

    # -- policies ---------------------------------------------------------------------------

    async def set_namespace_policies(self, namespace: str, policies: dict[str, int]) -> None:
        """Replaces the policies of a namespace's topics."""
        if namespace not in await self.namespaces():
            raise NotFoundError(f"namespace {namespace!r} does not exist")
        await asyncio.to_thread(self._records.set_namespace_policies, namespace, policies)
        await self._refresh_namespaces({namespace})

    async def follow_policies(self) -> Followed:
        """Keeps up with the policies of namespaces that other brokers set, until it is closed."""
        loop = asyncio.get_running_loop()
        known = await asyncio.to_thread(self._records.policies_of_namespaces)

        def read(_: bool) -> None:
            nonlocal known
            found = self._records.policies_of_namespaces()
            changed = {
                name for name in found.keys() | known.keys() if found.get(name) != known.get(name)
            }
            if changed:
                asyncio.run_coroutine_threadsafe(self._refresh_namespaces(changed), loop).result()
            known = found

        return self._records.follow_namespaces(read)

    async def _refresh_namespaces(self, names: Container[str]) -> None:
        self.policy_changes += 1
        for topic in list(self._served.values()):
            if topic.parsed.namespace in names:
                await self.refresh_policies(topic)

    async def namespace_policies(self, namespace: str) -> Policies:
        """The policies of a namespace's topics, unless they have their own."""
        if namespace not in await self.namespaces():
            raise NotFoundError(f"namespace {namespace!r} does not exist")
        own = await asyncio.to_thread(self._records.namespace_policies, namespace)
        return Policies.of(self._config.broker.policies, own)

    async def refresh_policies(self, topic: ServedTopic) -> Policies:
        """Reads the policies of an open topic, and puts them in force."""

        def read() -> Policies:
            record = self._records.topic(topic.parsed) or ServedRecord()
            return self.policies_with(topic.parsed, record)

        policies = await asyncio.to_thread(read)
        topic.set_policies(policies)
        return policies

    def policies_of(self, name: TopicName) -> Policies:
        """Reads the policies of a topic, open or not. Blocks."""
        return self.policies_with(name, self._records.topic(name) or ServedRecord())

    def policies_with(self, name: TopicName, record: ServedRecord) -> Policies:
        """The policies of a topic that has a record. Blocks."""
        namespace = self._records.namespace_policies(name.namespace)
        return Policies.of(self._config.broker.policies, namespace, record.policies)
