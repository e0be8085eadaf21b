"""danube.Discovery, danube.HealthCheck and danube.StorageService: where things are, and whether."""

from __future__ import annotations

import asyncio
from itertools import takewhile

from ister.base.model import Layout, TopicName
from ister.broker.operations import checks, needs
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.broker.topics.topics import ElsewhereError, Topics
from ister.bucket.names import segment_name
from ister.errors import InvalidRequestError, NotFoundError, UnsupportedOperationError
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor
from ister.wire import danube


class DiscoveryService:
    """Says where topics are, and what they consist of."""

    def __init__(self, topics: Topics, guard: Guard) -> None:
        self._topics = topics
        self.guard = guard

    @needs(Permission.LOOKUP, topic="topic")
    async def TopicLookup(
        self, request: danube.TopicLookupRequest, context: object
    ) -> danube.TopicLookupResponse:
        """Returns the broker that has a topic."""
        try:
            found = await self._topics.locate(request.topic)
        except ElsewhereError as error:
            # Not forwarded: clients take `Connect` for the broker that they have called.
            found = error.member
        kinds = danube.TopicLookupResponse.LookupType
        own = self._topics.cluster.own
        # A copy of the data directory that replaced this broker has its node, and another address.
        is_here = (found.node, found.broker_url) == (own.node, own.broker_url)
        return danube.TopicLookupResponse(
            request_id=request.request_id,
            response_type=kinds.Value("Connect" if is_here else "Redirect"),
            connect_url=found.connect_url,
            broker_url=found.broker_url,
            proxy=found.is_proxied,
        )

    @needs(Permission.LOOKUP, topic="topic")
    async def TopicPartitions(
        self, request: danube.TopicLookupRequest, context: object
    ) -> danube.TopicPartitionsResponse:
        """The topics behind a name; none if there is no such topic."""
        stand_in = self._topics.stand_in.find()
        if stand_in is not None:
            raise ElsewhereError(stand_in, request.topic)
        found = await self._topics.names.partitions(request.topic)
        return danube.TopicPartitionsResponse(request_id=request.request_id, partitions=found)


class HealthService:
    """Says whether a producer or a consumer still is one here."""

    def __init__(self, topics: Topics, guard: Guard) -> None:
        self._topics = topics
        self.guard = guard

    @checks("`lookup` on the topic: without it, it is unknown")
    async def HealthCheck(
        self, request: danube.HealthCheckRequest, context: object
    ) -> danube.HealthCheckResponse:
        """CLOSE makes Danube's client look its topic up and subscribe again."""
        kinds = danube.HealthCheckRequest.ClientType
        if request.client == kinds.Value("Producer"):
            is_known = self._has_producer(request.id)
        elif request.client == kinds.Value("Consumer"):
            is_known = await self._has_consumer(request.id)
            if not is_known:
                self._topics.consumers.dismiss(request.id)
        else:
            raise InvalidRequestError(
                f"invalid client type {request.client}: use 0 (producer) or 1 (consumer)"
            )
        status = danube.HealthCheckResponse.ClientStatus
        return danube.HealthCheckResponse(status=status.Value("OK" if is_known else "CLOSE"))

    def _may_know(self, topic: str) -> bool:
        return self.guard.allows(current_principal(), Permission.LOOKUP, topic=topic)

    def _has_producer(self, id: int) -> bool:
        topic = self._topics.find_open(self._topics.producers.get(id, ""))
        if topic is None or not self._may_know(topic.name):
            return False
        now = asyncio.get_running_loop().time()
        return topic.producers.find(id, now) is not None

    async def _has_consumer(self, id: int) -> bool:
        consumer = self._topics.consumers.find(id)
        if consumer is None or not self._may_know(consumer.topic):
            return False
        # A client that is sent away gives up after a few attempts. So only where another broker has
        # the topic, or can take it; any other is opened by the stream.
        if await self._topics.is_elsewhere(consumer.topic):
            return False
        topic = self._topics.find_open(consumer.topic)
        return topic is None or consumer.subscription in topic.subscriptions


class StorageService:
    """Says which objects of the bucket a topic consists of."""

    def __init__(self, topics: Topics, guard: Guard) -> None:
        self._topics = topics
        self.guard = guard

    @needs(Permission.CONSUME, topic="topic")
    async def ListSegmentDescriptors(
        self, request: danube.ListSegmentDescriptorsRequest, context: object
    ) -> danube.ListSegmentDescriptorsResponse:
        """The objects with messages after an offset; all of them for 0.

        With the layout `segments`, these are the objects that Danube finds in `segments/`, by the
        name in `segment_id`, up to the first offset that is in another object: a caller that
        remembers the last offset it read would otherwise skip those messages.
        """
        name = TopicName.parse(request.topic)
        found = await asyncio.to_thread(self._objects, name, request.after_offset)
        return danube.ListSegmentDescriptorsResponse(segments=[_segment(one) for one in found])

    def _objects(self, name: TopicName, after: int) -> list[ObjectDescriptor]:
        stores = self._topics.log.stores
        if stores is None:
            raise NotFoundError("this broker has no bucket", topic=str(name))
        catalog = stores.catalog(name)
        if catalog.record() is None:
            raise NotFoundError(f"topic {name} does not exist", topic=str(name))
        found = (one for one, _ in catalog.descriptors() if after == 0 or one.end > after + 1)
        if stores.storage.cloud.layout is Layout.OBJECTS:
            return list(found)
        segments = list(takewhile(lambda one: segment_name(one.object_id) is not None, found))
        if not segments:
            _refuse_unreadable(name, catalog.holding(after + 1 if after else 0))
        return segments


def _refuse_unreadable(name: TopicName, described: ObjectDescriptor | None) -> None:
    """Explains why no segment follows, unless there are no messages or re-sorting makes one."""
    if (
        described is not None
        and described.format != FORMAT_EXPRESS
        and segment_name(described.object_id) is None
    ):
        raise UnsupportedOperationError(
            f"the next messages are in {described.object_id}, which is not in the layout segments",
            topic=str(name),
            offset=described.start,
            hint=f"read them through Ister, and ask for segments after {described.end - 1}",
        )


def _segment(descriptor: ObjectDescriptor) -> danube.SegmentDescriptorProto:
    return danube.SegmentDescriptorProto(
        segment_id=segment_name(descriptor.object_id) or descriptor.object_id,
        start_offset=descriptor.start,
        end_offset=descriptor.end - 1,
        size=descriptor.size_bytes,
        etag=descriptor.etag or "",
        created_at=descriptor.created_at,
    )
