"""Describes topics, brokers and the pipeline for the dashboard, the HTTP API and gRPC.

A topic has the fields of `ister.topic.describe`. Does not own: permissions (callers ask the guard
first), counting (`observe.storage_counts`), rates (`observe.rates`).

Runs on the broker's loop; disks and stores are read in threads. Describing changes nothing: a topic
that was handed over stays so, and a topic of another broker is described from the stores.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Final

from ister import __version__
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.base.model import JsonObject, TopicName, Watermarks
from ister.base.partitions import base_of_partition
from ister.broker.observe.cluster_view import describe_brokers, describe_cluster
from ister.broker.observe.other_brokers import OtherBrokers
from ister.broker.observe.query_threads import QueryThreads
from ister.broker.observe.rates import MINUTES, Interval, RateHistory
from ister.broker.observe.storage_counts import (
    FILES_SHOWN,
    ObjectCount,
    StorageCounts,
    describe_objects,
)
from ister.broker.observe.subscriptions import describe_stored, describe_subscriptions
from ister.broker.observe.totals import StoredTotals, TotalsCache
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.guard import Guard, current_principal
from ister.broker.topics.cluster_control import ClusterControl, ClusterState
from ister.broker.topics.served_topic import ServedTopic
from ister.broker.topics.topics import Topics
from ister.bucket.members import Member
from ister.config import StorageMode
from ister.errors import CorruptDataError, IsterError, NotFoundError, UnavailableError
from ister.metadata.base import MetadataStore
from ister.topic.describe import (
    TopicView,
    UploadLag,
)
from ister.topic.pipeline_status import describe_pipeline, no_status, read_status
from ister.topic.read_only import ReadOnlyTopic
from ister.topic.topic import LocalFile, Topic
from ister.wire.views import BrokerJson, ClusterJson, PipelineJson, TopicJson

_log = logging.getLogger("ister.broker.observe.views")

_SUBSCRIPTIONS_SHOWN: Final = 500
_SUBSCRIPTIONS_LISTED: Final = 50
_DAMAGE_SHOWN: Final = 100
_SOURCES_SHOWN: Final = 20
# The loop runs other tasks after this many topics.
_TOPICS_AT_ONCE: Final = 20
# With more topics than this, totals are those of the last sample.
_TOTALS_NOW_MAX: Final = 200
# What fits into a gRPC message.
_PAGE_BYTES_MAX: Final = 1 * MIB


class Views:
    """Describes the topics of a broker. Used on the broker's loop."""

    def __init__(
        self,
        topics: Topics,
        schemas: SchemaRegistry,
        metadata: MetadataStore,
        *,
        history: RateHistory,
        query_threads: QueryThreads,
        health: Callable[[bool], JsonObject],
        clock: Clock,
    ) -> None:
        """Creates the views.

        `query_threads` read stores and files; `health` gives the broker's health in short, with
        topic names if its argument is true.
        """
        self.topics = topics
        self.history = history
        self.query_threads = query_threads
        self.storage_counts = StorageCounts(clock=clock)
        self._schemas = schemas
        self._metadata = metadata
        self._health = health
        self._clock = clock
        self._started = clock.monotonic()
        self._config = topics.config
        self._sums = TotalsCache(topics, self.storage_counts, query_threads, clock=clock)
        self.control = ClusterControl(topics, clock=clock)
        self._others = OtherBrokers(topics)
        self._known: ClusterState | None = None

    # -- topics -----------------------------------------------------------------------------

    async def topic(
        self, name: str, *, opens: bool = False, window: Interval = MINUTES
    ) -> TopicJson:
        """Describes a topic with all fields.

        `opens` opens a topic that no broker serves, and refuses one that another broker serves, so
        that the caller goes there. `window` is that of its history; another broker has the last
        minutes only.

        Raises:
            UnavailableError: A store does not answer, or another broker serves the topic.
        """
        parsed = TopicName.parse(name)
        found = self.topics.find_open(name)
        if found is None:
            partitions = await self.topics.names.partitions(name)
            if not partitions:
                raise NotFoundError(f"topic {name} does not exist", topic=name)
            if partitions != [name]:
                return {"topic": name, "parent": None, "partitions": partitions}
            if not opens:
                told = await self._others.topic(name)
                return told if told is not None else (await self._elsewhere(parsed)).to_json()
            found = await self.topics.get(name)
        return (await self._whole(found, window)).to_json()

    async def topics_listed(self, names: Sequence[str]) -> list[TopicJson]:
        """Describes topics in short, by name; topics deleted meanwhile are left out."""
        found: list[TopicView] = []
        here = [one for one in map(self.topics.find_open, names) if one is not None]
        totals = await self.query_threads.run(self._count_all, here)
        away: list[TopicName] = []
        for number, name in enumerate(names):
            if number % _TOPICS_AT_ONCE == _TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            topic = self.topics.find_open(name)
            if topic is None:
                away.append(TopicName.parse(name))
                continue
            view = self._base(topic, subscriptions_max=_SUBSCRIPTIONS_LISTED)
            totals.get(name, StoredTotals()).fill(view)
            found.append(view)
        told = await self._others.describe(map(str, away)) if away else {}
        away = [name for name in away if str(name) not in told]
        if away:
            own, addresses = self.topics.cluster.own, await self._addresses()
            found += await self.query_threads.run(self._list_away, away, own, addresses)
        views = [*(view.to_json() for view in found), *told.values()]
        return sorted(views, key=lambda view: view["topic"])

    async def own_topics(self, names: Sequence[str]) -> list[TopicJson]:
        """Describes in short those of some topics that are open here."""
        return await self.topics_listed(
            [name for name in names if self.topics.find_open(name) is not None]
        )

    def _count_all(self, topics: Iterable[ServedTopic]) -> dict[str, StoredTotals]:
        return {topic.name: self._sums.count(topic) for topic in topics}

    def _list_away(
        self, names: Iterable[TopicName], own: Member, addresses: dict[str, Member]
    ) -> list[TopicView]:
        found: list[TopicView] = []
        silence: UnavailableError | None = None
        for name in names:
            error: IsterError | None = silence
            if silence is None:
                try:
                    view = self._from_stores(name, own, addresses)
                    if view is not None:
                        found.append(view)
                        continue
                except UnavailableError as caught:
                    error = silence = caught  # asking for each of many would take minutes
                except IsterError as caught:
                    error = caught
            if error is not None or self.topics.log.stores is None:
                found.append(_empty_view(name, error))
        return found

    async def _whole(self, topic: ServedTopic, window: Interval = MINUTES) -> TopicView:
        read = await self.query_threads.run(self._read, topic)
        view = self._base(topic, subscriptions_max=_SUBSCRIPTIONS_SHOWN)
        view.policies = asdict(topic.policies)
        points = self.history.points(topic.name, window)
        view.history = self.history.as_json(points, window)
        view.schema = read.schema
        view.errors += read.errors
        view.objects = describe_objects(read.counted, read.tiered)
        view.is_counted = read.counted.is_complete
        StoredTotals(
            files=len(read.files),
            files_bytes=sum(file.bytes for file in read.files),
            objects=read.counted.objects,
            objects_bytes=read.counted.size_bytes,
        ).fill(view)
        view.files = [file._asdict() for file in read.files[-FILES_SHOWN:]]
        if read.files:
            # Files were read before: the last one has grown since.
            end = max(read.files[-1].next_offset, view.watermarks.written)
            view.files[-1]["next_offset"] = end
        return view

    def _read(self, topic: ServedTopic) -> _Read:
        """Reads files and stores; runs in a thread."""
        core, found = topic.topic, _Read()

        def read_files() -> None:
            if core is not None:
                found.files = core.local_files()

        def read_objects() -> None:
            if core is not None and core.bucket is not None:
                found.tiered = core.bucket.owned.tiered
                found.counted = self.storage_counts.objects(
                    topic.name,
                    topic.incarnation,
                    core.bucket.owned.catalog,
                    tiered=found.tiered,
                    with_details=True,
                )

        def read_schema() -> None:
            found.schema = self._schema_of(topic.name)

        for step in (read_files, read_objects, read_schema):
            try:
                step()
            except IsterError as error:
                found.errors.append({**error.to_dict()})
        return found

    def _schema_of(self, name: str) -> JsonObject | None:
        config = self._schemas.topic_config(name)
        if config is None or not config.subject:
            return None
        try:
            latest = self._schemas.latest(config.subject)
        except NotFoundError:  # all versions of it were deleted
            return {"subject": config.subject, "version": None, "type": None}
        return {
            "subject": config.subject,
            "version": latest.version,
            "type": latest.schema_type.value,
            "policy": config.policy.value,
        }

    def _base(self, topic: ServedTopic, *, subscriptions_max: int) -> TopicView:
        """The fields that are in memory; on the loop."""
        core, own = topic.topic, self.topics.cluster.own
        now = asyncio.get_running_loop().time()
        marks = _watermarks(topic)
        described = sorted(topic.subscriptions.values(), key=lambda one: one.name)
        bucket = core.bucket if core is not None else None
        lag = marks.next - marks.tiered if bucket is not None else 0
        return TopicView(
            topic=topic.name,
            is_here=True,
            is_reliable=topic.is_reliable,
            mode=self._config.storage.mode.value,
            ack=core.ack.value if core is not None else None,
            codec=core.codec.value if core is not None else None,
            incarnation=topic.incarnation or None,
            epoch=bucket.owned.epoch if bucket is not None else None,
            state=core.state.value if core is not None else "open",
            owner={"node": own.node, "broker_url": own.broker_url},
            earliest=core.earliest if core is not None else marks.next,
            watermarks=marks,
            cache=_cache(core),
            producers=topic.count_producers(now),
            rates=self.history.rates(topic.name).as_json(),
            upload_lag=UploadLag(
                max(0, lag), bucket.uploads.lag_bytes if bucket is not None else 0
            ),
            subscriptions=describe_subscriptions(described[:subscriptions_max]),
            subscriptions_total=len(described),
            damage=_damage(core),
            errors=_errors(core),
        )

    def dead_letter_sources(self, name: str) -> list[dict[str, str]]:
        """Subscriptions of topics here whose dead letters go to a topic; some of them."""
        found: list[dict[str, str]] = []
        for topic in self.topics.served:
            found += [
                {"topic": topic.name, "subscription": one.name}
                for one in topic.subscriptions.values()
                if one.stored.policy.dead_letter_topic == name
            ]
            if len(found) >= _SOURCES_SHOWN:
                break
        return found

    async def own_policies(self, name: str) -> dict[str, int]:
        """The limits that are set for the topic itself."""
        record = await self.query_threads.run(self.topics.records.topic, TopicName.parse(name))
        return {} if record is None else {**record.policies}

    # -- topics that are not open here ------------------------------------------------------

    async def _elsewhere(self, name: TopicName) -> TopicView:
        """A topic that is not open here, as the stores describe it."""
        text, own, addresses = str(name), self.topics.cluster.own, await self._addresses()
        view = await self.query_threads.run(self._from_stores, name, own, addresses, whole=True)
        if view is not None and view.state != "closed":
            return view
        # Its files are here if it was open here before: opening it reads them.
        try:
            return await self._whole(await self.topics.get(text))
        except (NotFoundError, UnavailableError, CorruptDataError) as error:
            if view is None:
                raise
            view.errors.append({**error.to_dict()})
            return view

    async def _addresses(self) -> dict[str, Member]:
        return {one.node: one for one in (await self._cluster_state()).members}

    def _from_stores(
        self,
        name: TopicName,
        own: Member,
        addresses: dict[str, Member],
        *,
        whole: bool = False,
    ) -> TopicView | None:
        """A topic as the stores describe it; None if they do not have it. In a thread."""
        text = str(name)
        served, stores = self.topics.records.topic(name), self.topics.log.stores
        is_reliable = served.is_reliable if served is not None else True
        if is_reliable and stores is None:
            return None
        view = _empty_view(name, None, is_reliable=is_reliable)
        if why := self.topics.unopened.get(text):
            view.errors.append({"code": "UNAVAILABLE", "message": why, "hint": None})
        counted = ObjectCount(is_complete=True)
        if is_reliable and stores is not None:
            catalog = stores.catalog(name)
            record, owner, sealed = catalog.record(), catalog.owner(), catalog.sealed()
            if record is None or not record[0].is_open:
                return None
            known = record[0]
            counted = self.storage_counts.objects(
                text, known.incarnation, catalog, with_details=whole
            )
            last = catalog.last()
            tiered = last.end if last is not None else 0
            end = max(tiered, sealed[0].next_offset if sealed is not None else 0)
            if owner is not None:
                address = addresses.get(owner[0].node)
                url = address.broker_url if address is not None else None
                view.owner = {"node": owner[0].node, "broker_url": url}
                if owner[0].node != own.node:
                    view.errors.append(_is_elsewhere(address))
                    view.state = "open"
            elif sealed is not None:
                view.state = "sealed"
            view.ack, view.codec = known.ack.value, known.codec.value
            view.incarnation, view.epoch = known.incarnation, known.epoch
            view.earliest = end if counted.start is None else counted.start
            view.watermarks = Watermarks(
                trimmed=end, tiered=tiered, synced=end, written=end, next=end
            )
            view.objects_total, view.objects_bytes = counted.objects, counted.size_bytes
        stored = self.topics.store.load(name, view.incarnation or "")
        view.subscriptions_total = len(stored)
        view.subscriptions = [
            describe_stored(one, view.earliest, view.watermarks.next)
            for _, one in sorted(stored.items())[:_SUBSCRIPTIONS_LISTED]
        ]
        if whole:
            view.policies = asdict(self.topics.names.policies_of(name))
            view.files = []
            view.objects = describe_objects(counted, view.watermarks.tiered)
            view.is_counted = counted.is_complete
            view.schema = self._schema_of(text)
            view.history = self.history.as_json([])
        return view

    # -- the broker, and others -------------------------------------------------------------

    async def overview(
        self, visible: list[ServedTopic] | None, window: Interval = MINUTES
    ) -> JsonObject:
        """The broker's health, totals, rates, peers and pipeline.

        `visible` has the topics that the caller may see; None for all of them, the
        disk and the other brokers. `window` is that of the history.
        """
        history, own, storage = self.history, self.topics.cluster.own, self._config.storage
        served = self.topics.served
        sums = await self._sums.get(visible)
        disk = await self.query_threads.run(self._disk) if visible is None else None
        if visible is not None or len(served) <= _TOTALS_NOW_MAX:
            totals = history.totals_of(served if visible is None else visible)
        else:
            totals = history.totals
        points: list[list[float]] = []
        if visible is None:
            rates, points = history.all_rates.as_json(), history.all_points(window)
        else:
            each = [history.rates(topic.name).as_json() for topic in visible]
            rates = {
                name: round(sum(one[name] for one in each), 2)
                for name in history.all_rates.as_json()
            }
        return {
            "broker": {
                "version": __version__,
                "node": own.node,
                "broker_url": own.broker_url,
                "flight_url": own.flight_url,
                "uptime_seconds": round(self._clock.monotonic() - self._started, 1),
                "host": self._config.broker.host,
                "mode": storage.mode.value,
                "ack": storage.ack.value if storage.mode is not StorageMode.MEMORY else "memory",
            },
            "health": self._health(visible is None),
            "totals": {**asdict(totals), **sums},
            "rates": rates,
            "disk": {**disk, "used_by_wal_bytes": sums["files_bytes"]} if disk else None,
            "history": history.as_json(points, window),
            "brokers": [one for one in await self.brokers() if visible is None or one["is_this"]],
            "pipeline": await self.pipeline_in_short(),
        }

    def _disk(self) -> JsonObject | None:
        storage = self._config.storage
        if storage.mode is StorageMode.MEMORY or storage.wal.dir is None:
            return None
        try:
            usage = shutil.disk_usage(storage.wal.dir)
        except OSError:
            return None
        return {
            "path": os.path.abspath(storage.wal.dir),
            "total_bytes": usage.total,
            "free_bytes": usage.free,
        }

    async def brokers(self, *, is_new: bool = False) -> list[BrokerJson]:
        """All brokers that are up, this one first; cached for up to 2 s unless `is_new`."""
        state = await self._cluster_state(is_new=is_new)
        return self._with_own_load(
            describe_brokers(state, self.topics.cluster.own, len(self.topics.served))
        )

    def _with_own_load(self, brokers: list[BrokerJson]) -> list[BrokerJson]:
        """Brokers with this one's load of now; it tells others only from time to time."""
        rates, lag = self.history.all_rates.as_json(), self.history.totals.upload_lag_bytes
        for one in brokers:
            if one["is_this"]:
                one["load"] = {**one["load"], **rates, "upload_lag_bytes": lag}
        return brokers

    async def cluster(self) -> ClusterJson:
        """Brokers, leader, balance, moves under way, and topics that wait for a disk."""
        found = await describe_cluster(
            self.control, self.topics.cluster.own, len(self.topics.served)
        )
        self._with_own_load(found["brokers"])
        return found

    async def _cluster_state(self, *, is_new: bool = False) -> ClusterState:
        """The cluster; as it was last known if the metadata store does not answer."""
        try:
            self._known = await self.control.state(is_new=is_new)
        except UnavailableError:
            # This broker is up in any case.
            return self._known or ClusterState.alone(self.topics.cluster.own)
        return self._known

    async def pipeline(self) -> PipelineJson:
        """The fields of `ister pipeline status`, and a sentence about them."""
        if not self._config.storage.mode.has_bucket:
            mode = self._config.storage.mode.value
            return {
                **no_status(self._config),
                "words": f"No pipeline: storage.mode is {mode}, which has no bucket.",
            }
        fields = await self.query_threads.run(read_status, self._metadata, self._config)
        return {**fields, "words": describe_pipeline(fields)}

    async def pipeline_in_short(self) -> JsonObject:
        """Whether a pipeline runs, in one sentence."""
        try:
            fields = await self.pipeline()
        except UnavailableError as error:
            engine = self._config.storage.uploader.engine.value
            return {"is_running": None, "engine": engine, "words": f"Unknown: {error.message}."}
        return {
            "is_running": fields["is_running"],
            "engine": fields["engine"],
            "words": fields["words"],
        }

    async def stop(self) -> None:
        """Stops counting."""
        self.storage_counts.end()
        await self._sums.stop()


async def list_topics(
    views: Views,
    guard: Guard,
    *,
    namespace: str = "",
    search: str = "",
    after: str = "",
    limit: int = 100,
    with_partitions: bool = True,
) -> JsonObject:
    """A page of the topics that the current caller may see, in short.

    Args:
        views: Describes the topics.
        guard: Decides which topics the caller may see.
        namespace: Only topics of this namespace; all if empty.
        search: Only topics with this text in their names, in lower case.
        after: Only names after this one.
        limit: The most topics on the page.
        with_partitions: List every partition; otherwise each partitioned topic once, with only the
            names of its partitions.
    """
    names = await views.topics.names.recent()
    caller = current_principal()

    def select() -> tuple[list[str], dict[str, list[str]]]:
        # In a thread: there may be a hundred thousand.
        prefix = f"/{namespace}/" if namespace else ""
        wanted = sorted(
            name for name in names if name.startswith(prefix) and search in name.lower()
        )
        visible = guard.visible(caller, wanted)
        return (visible, {}) if with_partitions else _fold(visible, names)

    visible, folded = await views.query_threads.run(select)
    rest = visible[bisect_right(visible, after) :]
    page = rest[:limit]
    listed = await views.topics_listed([name for name in page if name not in folded])
    listed += [
        {"topic": name, "parent": None, "partitions": folded[name]}
        for name in page
        if name in folded
    ]
    listed.sort(key=lambda view: view["topic"])
    last = page[-1] if len(rest) > limit else None
    shown = await views.query_threads.run(_fitting, listed)
    if shown < len(listed):
        last = listed[shown - 1]["topic"]
    return {"topics": listed[:shown], "total": len(visible), "next": last}


def _fold(visible: Sequence[str], names: Collection[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Replaces partitions by the topics they belong to; also returns the partitions of each.

    A topic that is only named like a partition stays.
    """
    folded: dict[str, list[str]] = {}
    plain: list[str] = []
    for name in visible:
        parent = base_of_partition(name)
        if parent is None or parent in names:
            plain.append(name)
        else:
            folded.setdefault(parent, []).append(name)
    for parts in folded.values():
        parts.sort(key=lambda name: int(name.rpartition("-")[2]))
    return sorted([*plain, *folded]), folded


def _fitting(views: Sequence[TopicJson]) -> int:
    """How many views fit into one answer; at least one."""
    room = _PAGE_BYTES_MAX
    for number, view in enumerate(views):
        room -= len(json.dumps(view))
        if room < 0:
            return max(1, number)
    return len(views)


@dataclass(slots=True)
class _Read:
    """What was read from files and stores for one topic."""

    files: list[LocalFile] = field(default_factory=list)
    counted: ObjectCount = field(default_factory=lambda: ObjectCount(is_complete=True))
    tiered: int = 0
    schema: JsonObject | None = None
    errors: list[JsonObject] = field(default_factory=list)


def _empty_view(
    name: TopicName, error: IsterError | None, *, is_reliable: bool = True
) -> TopicView:
    """A topic of which only the name is known."""
    return TopicView(
        topic=str(name),
        is_here=False,
        is_reliable=is_reliable,
        state="closed",
        producers=0,
        subscriptions_total=0,
        errors=[] if error is None else [{**error.to_dict()}],
    )


def _is_elsewhere(address: Member | None) -> JsonObject:
    where = f"the broker at {address.broker_url}" if address is not None else "another process"
    return {
        "code": "UNAVAILABLE",
        "message": f"{where} serves the topic; this is the state in the stores",
        "hint": "ask that broker for messages that are not uploaded yet" if address else None,
    }


def _watermarks(topic: ServedTopic) -> Watermarks:
    if topic.topic is not None:
        return topic.topic.watermarks
    # A non-reliable topic keeps no messages.
    at = topic.next_offset
    return Watermarks(trimmed=at, tiered=at, synced=at, written=at, next=at)


def _cache(core: Topic | None) -> dict[str, int] | None:
    if core is None:
        return None
    cached = core.cached
    return {
        "start": cached.start,
        "next": cached.end,
        "messages": cached.messages,
        "bytes": cached.bytes,
    }


def _damage(core: Topic | None) -> list[JsonObject]:
    return [
        {
            "file": os.path.basename(one.path),
            "position": one.position,
            "offset": one.offset,
            "reason": one.reason,
        }
        for one in (core.damage if core is not None else ())[:_DAMAGE_SHOWN]
    ]


def _errors(core: Topic | None) -> list[JsonObject]:
    if core is None:
        return []
    found = [core.failure, core.bucket.uploads.last_error if core.bucket is not None else None]
    if isinstance(core, ReadOnlyTopic):
        found.append(core.refused_error())
    return [{**error.to_dict()} for error in found if error is not None]
