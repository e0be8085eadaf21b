"""Topics, brokers and the pipeline as plain values: what the dashboard, the API and tools show.

One dictionary describes a topic everywhere, whoever asks and however: HTTP (`ister.broker.api`),
gRPC (`ister.Admin`), and the command line. Fields are added to it, never renamed.

Owns: these dictionaries. Does not own: who may see them (callers ask the guard first), counting
(`ister.broker.holdings`), rates (`ister.broker.history`).

Runs on the broker's loop; whatever touches a disk or a store runs in a thread. A look changes
nothing: a topic that was handed over stays so, and one that another broker has is described by what
the stores say about it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import asdict
from typing import Any, Final

from ister import __version__, threads
from ister.broker.cluster import Address
from ister.broker.dispatch import Dispatch
from ister.broker.history import History
from ister.broker.holdings import (
    FILES_SHOWN,
    Counted,
    Holdings,
    count_files,
    describe_objects,
)
from ister.broker.lookers import Lookers
from ister.broker.schemas.registry import SchemaRegistry
from ister.broker.security.guard import Guard, current_principal
from ister.broker.served import AnySubscription, ServedTopic
from ister.broker.topics import Topics
from ister.clock import Clock
from ister.config import StorageMode
from ister.errors import CorruptDataError, IsterError, NotFoundError, UnavailableError
from ister.limits import MIB
from ister.metadata.base import MetadataStore
from ister.model import TopicName, Watermarks
from ister.partitions import base_of_partition
from ister.subscription.policy import SubscriptionKind
from ister.subscription.store import StoredSubscription
from ister.tier.pipeline_status import describe_pipeline, no_status, read_status
from ister.topic.topic import Topic

__all__ = ["Views", "describe_error", "describe_subscription", "list_topics"]

_log = logging.getLogger("ister.broker.views")

_SUBSCRIPTIONS_SHOWN: Final = 500
_SUBSCRIPTIONS_LISTED: Final = 50
# Names of consumers: of one subscription, and of all of a topic's together.
_CONSUMERS_SHOWN: Final = 100
_CONSUMERS_OF_ALL_SHOWN: Final = 2000
_DAMAGE_SHOWN: Final = 100
# How old the sums over all topics' files and objects may become.
_SUMS_SECONDS: Final = 10.0
# Whoever asks waits for them for so long, and else gets what was counted so far.
_SUMS_PART_SECONDS: Final = 0.5
_SUMS_TOPICS: Final = 100
_BROKERS_SECONDS: Final = 2.0
# Calls are answered between so many.
_TOPICS_AT_ONCE: Final = 20
# The totals of more topics than this are those of the last look.
_TOTALS_NOW_MAX: Final = 200
# What fits into a message of gRPC.
_PAGE_BYTES_MAX: Final = 1 * MIB


class Views:
    """See the module header. Used on the broker's loop."""

    def __init__(
        self,
        topics: Topics,
        schemas: SchemaRegistry,
        metadata: MetadataStore,
        *,
        history: History,
        lookers: Lookers,
        health: Callable[[bool], dict[str, Any]],
        clock: Clock,
    ) -> None:
        """Describes the topics of a broker.

        Args:
            topics: The broker's.
            schemas: Its registry.
            metadata: Its metadata store.
            history: Its rates.
            lookers: Where stores and files are looked at.
            health: How it is, in short; whether topics may be named.
            clock: Where time comes from.
        """
        self.topics = topics
        self.history = history
        self.lookers = lookers
        self.holdings = Holdings(clock=clock)
        self._schemas = schemas
        self._metadata = metadata
        self._health = health
        self._clock = clock
        self._started = clock.monotonic()
        self._config = topics.config
        self._sums = _Sums(self, clock)
        self._brokers_known: tuple[float, list[Address], dict[str, int]] | None = None

    # -- topics -----------------------------------------------------------------------------

    async def topic(self, name: str, *, opens: bool = False) -> dict[str, Any]:
        """All about a topic.

        Args:
            name: Its name.
            opens: Whether a topic that nobody has is to be opened here, and one that another
                broker has is refused: callers then go there.

        Raises:
            TopicNameError: Not a name.
            NotFoundError: There is no such topic.
            UnavailableError: A store does not answer; or another broker has it.
        """
        parsed = TopicName.parse(name)
        found = self.topics.find_open(name)
        if found is None:
            partitions = await self.topics.partitions(name)
            if not partitions:
                raise NotFoundError(f"there is no topic {name}", topic=name)
            if partitions != [name]:
                return {"topic": name, "parent": None, "partitions": partitions}
            if not opens:
                return await self._elsewhere(parsed)
            found = await self.topics.get(name)
        return await self._whole(found)

    async def topics_listed(self, names: Sequence[str]) -> list[dict[str, Any]]:
        """Topics in short, in the order of their names; those that are gone by now are left out."""
        found: list[dict[str, Any]] = []
        here = [one for one in map(self.topics.find_open, names) if one is not None]
        totals = await self.lookers.run(self._count_all, here)
        away: list[TopicName] = []
        for number, name in enumerate(names):
            if number % _TOPICS_AT_ONCE == _TOPICS_AT_ONCE - 1:
                await asyncio.sleep(0)
            topic = self.topics.find_open(name)
            if topic is None:
                away.append(TopicName.parse(name))
                continue
            view = self._base(topic, subscriptions_max=_SUBSCRIPTIONS_LISTED)
            found.append({**view, **totals.get(name, _NO_TOTALS)})
        if away:
            own, addresses = self.topics.cluster.own, await self._addresses()
            found += await self.lookers.run(self._list_away, away, own, addresses)
        return sorted(found, key=lambda view: str(view["topic"]))

    def _count_all(self, topics: Iterable[ServedTopic]) -> dict[str, dict[str, int]]:
        return {topic.name: self._sums.count(topic) for topic in topics}

    def _list_away(
        self, names: Iterable[TopicName], own: Address, addresses: dict[str, Address]
    ) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = []
        silence: IsterError | None = None
        for name in names:
            try:
                view = self._from_stores(name, own, addresses) if silence is None else None
                if view is not None:
                    found.append(view)
                    continue
            except IsterError as error:
                if isinstance(error, UnavailableError):
                    silence = error  # asking for each of many would take minutes
                found.append(_empty_view(name, error))
                continue
            if silence is not None:
                found.append(_empty_view(name, silence))
            elif self.topics.log.tiers is None:
                found.append(_empty_view(name, None))
        return found

    async def _whole(self, topic: ServedTopic) -> dict[str, Any]:
        core = topic.topic
        read = await self.lookers.run(self._read, topic)
        view = self._base(topic, subscriptions_max=_SUBSCRIPTIONS_SHOWN)
        errors = view.pop("errors") + read.pop("errors")
        view |= {
            "policies": asdict(topic.policies),
            **read,
            "errors": errors,
            "history": self.history.as_json(self.history.points(topic.name)),
        }
        if core is not None and view["files"]:
            # Files were looked at before: the last one has grown since.
            last = view["files"][-1]
            last["next_offset"] = max(last["next_offset"], view["watermarks"]["written"])
        return view

    def _read(self, topic: ServedTopic) -> dict[str, Any]:
        """What takes a look at files and stores; runs in a thread."""
        core, errors = topic.topic, []
        files: list[dict[str, Any]] = []
        counted, tiered = Counted(is_complete=True), 0
        try:
            if core is not None:
                files = count_files(core)
        except IsterError as error:
            errors.append(describe_error(error))
        try:
            if core is not None and core.tier is not None:
                tiered = core.tier.owned.tiered
                counted = self.holdings.objects(
                    topic.name,
                    topic.incarnation,
                    core.tier.owned.catalog,
                    tiered=tiered,
                    with_details=True,
                )
        except IsterError as error:
            errors.append(describe_error(error))
        try:
            schema = self._schema_of(topic.name)
        except IsterError as error:
            schema = None
            errors.append(describe_error(error))
        return {
            "files": files[-FILES_SHOWN:],
            "objects": describe_objects(counted, tiered),
            "files_total": len(files),
            "files_bytes": sum(file["bytes"] for file in files),
            "objects_total": counted.objects,
            "objects_bytes": counted.size_bytes,
            "is_counted": counted.is_complete,
            "schema": schema,
            "errors": errors,
        }

    def _schema_of(self, name: str) -> dict[str, Any] | None:
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

    def _base(self, topic: ServedTopic, *, subscriptions_max: int) -> dict[str, Any]:
        """What is in memory; on the loop."""
        core, own = topic.topic, self.topics.cluster.own
        now = asyncio.get_running_loop().time()
        marks = _watermarks(topic)
        described = sorted(topic.subscriptions.values(), key=lambda one: one.name)
        tier = core.tier if core is not None else None
        lag = marks.next - marks.tiered if tier is not None else 0
        return {
            "topic": topic.name,
            "parent": base_of_partition(topic.name),
            "partitions": [],
            "is_here": True,
            "is_reliable": topic.is_reliable,
            "mode": self._config.storage.mode.value,
            "ack": core.ack.value if core is not None else None,
            "codec": core.codec.value if core is not None else None,
            "incarnation": topic.incarnation or None,
            "epoch": tier.owned.epoch if tier is not None else None,
            "state": core.state.value if core is not None else "open",
            "owner": {"node": own.node, "broker_url": own.broker_url},
            "earliest": core.earliest if core is not None else marks.next,
            "watermarks": asdict(marks),
            "cache": _cache(core),
            "producers": topic.count_producers(now),
            "rates": self.history.rates(topic.name).as_json(),
            "upload_lag": {
                "messages": max(0, lag),
                "bytes": tier.lag_bytes if tier is not None else 0,
            },
            "subscriptions": _describe_all(described[:subscriptions_max]),
            "subscriptions_total": len(described),
            "damage": _damage(core),
            "errors": _errors(core),
        }

    # -- topics that are not open here ------------------------------------------------------

    async def _elsewhere(self, name: TopicName) -> dict[str, Any]:
        """A topic that is not open here, by what the stores say about it."""
        text, own, addresses = str(name), self.topics.cluster.own, await self._addresses()
        view = await self.lookers.run(self._from_stores, name, own, addresses, whole=True)
        if view is not None and (view["state"] != "closed" or self.topics.is_moved(text)):
            return view
        # Its files say what it is, if they are here: whoever opens it finds out.
        try:
            return await self._whole(await self.topics.get(text))
        except (NotFoundError, UnavailableError, CorruptDataError) as error:
            if view is None:
                raise
            view["errors"].append(describe_error(error))
            return view

    async def _addresses(self) -> dict[str, Address]:
        brokers, _ = await self._known_brokers()
        return {one.node: one for one in brokers}

    def _from_stores(
        self,
        name: TopicName,
        own: Address,
        addresses: dict[str, Address],
        *,
        whole: bool = False,
    ) -> dict[str, Any] | None:
        """A topic by what is written down about it; None if that is nothing. In a thread."""
        text = str(name)
        served, tiers = self.topics.records.topic(name), self.topics.log.tiers
        is_reliable = served.is_reliable if served is not None else True
        if is_reliable and tiers is None:
            return None
        view = _empty_view(name, None, is_reliable=is_reliable)
        errors: list[dict[str, Any]] = view["errors"]
        if why := self.topics.unopened.get(text):
            errors.append({"code": "UNAVAILABLE", "message": why, "hint": None})
        incarnation, counted, tiered = "", Counted(is_complete=True), 0
        if is_reliable and tiers is not None:
            catalog = tiers.catalog(name)
            record, owner, sealed = catalog.record(), catalog.owner(), catalog.sealed()
            if record is None or not record[0].is_open:
                return None
            incarnation = record[0].incarnation
            counted = self.holdings.objects(text, incarnation, catalog, with_details=whole)
            last = catalog.last()
            tiered = last.end if last is not None else 0
            end = max(tiered, sealed[0].next_offset if sealed is not None else 0)
            marks = Watermarks(trimmed=end, tiered=tiered, synced=end, written=end, next=end)
            if owner is not None:
                address = addresses.get(owner[0].node)
                view["owner"] = {
                    "node": owner[0].node,
                    "broker_url": address.broker_url if address is not None else None,
                }
                if owner[0].node != own.node:
                    errors.append(_is_elsewhere(address))
            view |= {
                "ack": record[0].ack.value,
                "codec": record[0].codec.value,
                "incarnation": incarnation,
                "epoch": record[0].epoch,
                "state": "closed" if owner is None or owner[0].node == own.node else "open",
                "earliest": end if counted.start is None else counted.start,
                "watermarks": asdict(marks),
                "objects_total": counted.objects,
                "objects_bytes": counted.size_bytes,
            }
            if owner is None and sealed is not None:
                view["state"] = "sealed"
        stored = self.topics.store.load(name, incarnation)
        end = view["watermarks"]["next"]
        view["subscriptions_total"] = len(stored)
        view["subscriptions"] = [
            _describe_stored(one, end) for _, one in sorted(stored.items())[:_SUBSCRIPTIONS_LISTED]
        ]
        if whole:
            policies = self.topics.policies_of(name)
            view |= {
                "policies": asdict(policies),
                "files": [],
                "objects": describe_objects(counted, tiered),
                "is_counted": counted.is_complete,
                "schema": self._schema_of(text),
                "history": self.history.as_json([]),
            }
        return view

    # -- the broker, and others -------------------------------------------------------------

    async def overview(self, visible: list[ServedTopic] | None) -> dict[str, Any]:
        """How the broker is, in numbers and in words.

        Args:
            visible: The topics that the caller may know of; None for all of them.
        """
        history, own, storage = self.history, self.topics.cluster.own, self._config.storage
        served = self.topics.served
        sums = await self._sums.get(visible)
        disk = await self.lookers.run(self._disk)
        if visible is not None or len(served) <= _TOTALS_NOW_MAX:
            totals = history.totals_of(served if visible is None else visible)
        else:
            totals = history.totals
        points: list[list[float]] = []
        if visible is None:
            rates, points = history.all_rates.as_json(), history.all_points
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
            "history": history.as_json(points),
            "brokers": await self.brokers(),
            "pipeline": await self.pipeline_in_short(),
        }

    def _disk(self) -> dict[str, Any] | None:
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

    async def brokers(self) -> list[dict[str, Any]]:
        """All brokers that are up, this one first."""
        own, served = self.topics.cluster.own, len(self.topics.served)
        brokers, owned = await self._known_brokers()
        found = []
        for one in brokers:
            is_this = one.node == own.node
            topics = served if is_this else owned.get(one.node, 0)
            found.append({**asdict(one), "topics": topics, "is_this": is_this})
        return sorted(found, key=lambda one: (not one["is_this"], one["node"]))

    async def _known_brokers(self) -> tuple[list[Address], dict[str, int]]:
        """All brokers, and how many topics each has, as of some seconds ago."""
        known = self._brokers_known
        now = self._clock.monotonic()
        if known is None or now - known[0] > _BROKERS_SECONDS:
            try:
                brokers, owned = await self.lookers.run(self._read_brokers)
            except UnavailableError:
                # The store does not answer. This broker is up in any case.
                brokers, owned = known[1:] if known is not None else ([self.topics.cluster.own], {})
            self._brokers_known = known = (self._clock.monotonic(), brokers, owned)
        return known[1], known[2]

    def _read_brokers(self) -> tuple[list[Address], dict[str, int]]:
        cluster = self.topics.cluster
        brokers = cluster.brokers()
        return brokers, cluster.count_topics() if len(brokers) > 1 else {}

    async def pipeline(self) -> dict[str, Any]:
        """What `ister pipeline status` says, and the sentence for it.

        Raises:
            UnavailableError: The metadata store does not answer.
        """
        if self._config.storage.mode is not StorageMode.WAL_CLOUD:
            mode = self._config.storage.mode.value
            return {
                **no_status(self._config),
                "words": f"storage.mode is {mode}: there is no bucket, so there is no pipeline.",
            }
        fields = await self.lookers.run(read_status, self._metadata, self._config)
        return {**fields, "words": describe_pipeline(fields)}

    async def pipeline_in_short(self) -> dict[str, Any]:
        """Whether a pipeline runs, in one sentence."""
        try:
            fields = await self.pipeline()
        except UnavailableError as error:
            engine = self._config.storage.uploader.engine.value
            return {"is_running": None, "engine": engine, "words": f"Not known: {error.message}."}
        return {name: fields[name] for name in ("is_running", "engine", "words")}

    async def stop(self) -> None:
        """Ends what is under way."""
        self.holdings.end()
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
) -> dict[str, Any]:
    """A page of the topics that the current caller may know of, in short.

    Args:
        views: Where they are described.
        guard: Who says what the caller may know of.
        namespace: Only those of one; all if empty.
        search: Only those with this in their names, in lower case.
        after: Only names behind this one.
        limit: At most so many.
        with_partitions: Whether partitions are listed one by one; else those that they are parts
            of are, with the names of their partitions and nothing else.
    """
    names = await views.topics.recent_names()
    caller = current_principal()

    def select() -> tuple[list[str], dict[str, list[str]]]:
        # There may be a hundred thousand.
        prefix = f"/{namespace}/" if namespace else ""
        wanted = sorted(
            name for name in names if name.startswith(prefix) and search in name.lower()
        )
        visible = guard.visible(caller, wanted)
        return (visible, {}) if with_partitions else _fold(visible, names)

    visible, folded = await views.lookers.run(select)
    rest = visible[bisect_right(visible, after) :]
    page = rest[:limit]
    listed = await views.topics_listed([name for name in page if name not in folded])
    listed += [
        {"topic": name, "parent": None, "partitions": folded[name]}
        for name in page
        if name in folded
    ]
    listed.sort(key=lambda view: str(view["topic"]))
    last = page[-1] if len(rest) > limit else None
    shown = await views.lookers.run(_fitting, listed)
    if shown < len(listed):
        last = str(listed[shown - 1]["topic"])
    return {"topics": listed[:shown], "total": len(visible), "next": last}


def _fold(visible: Sequence[str], names: Collection[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Names with those of partitioned topics in the place of their partitions', which come beside.

    A topic of its own that is only called like a partition stays what it is.
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


def _fitting(views: Sequence[dict[str, Any]]) -> int:
    """How many of these fit into one answer; at least one."""
    room = _PAGE_BYTES_MAX
    for number, view in enumerate(views):
        room -= len(json.dumps(view))
        if room < 0:
            return max(1, number)
    return len(views)


class _Sums:
    """The files and objects of all topics together, as of some seconds ago."""

    def __init__(self, views: Views, clock: Clock) -> None:
        self._topics = views.topics
        self._holdings = views.holdings
        self._lookers = views.lookers
        self._clock = clock
        self._known: dict[str, dict[str, int]] = {}
        self._at = -float("inf")
        self._counting: asyncio.Task[None] | None = None

    async def get(self, visible: Iterable[ServedTopic] | None) -> dict[str, int]:
        """The sums; of some topics, or of all. Those that take long are counted meanwhile."""
        is_idle = self._counting is None or self._counting.done()
        if is_idle and self._clock.monotonic() - self._at > _SUMS_SECONDS:
            self._counting = asyncio.get_running_loop().create_task(self._count_all())
            threads.watch_task("ister-sums", self._counting)
            await asyncio.wait([self._counting], timeout=_SUMS_PART_SECONDS)
        names = None if visible is None else {topic.name for topic in visible}
        each = [one for name, one in self._known.items() if names is None or name in names]
        return {
            "objects": sum(one["objects_total"] for one in each),
            "objects_bytes": sum(one["objects_bytes"] for one in each),
            "files_bytes": sum(one["files_bytes"] for one in each),
        }

    async def stop(self) -> None:
        """Ends a count under way."""
        if self._counting is not None:
            self._counting.cancel()
            await asyncio.gather(self._counting, return_exceptions=True)

    async def _count_all(self) -> None:
        served = self._topics.served
        try:
            for at in range(0, len(served), _SUMS_TOPICS):
                await self._lookers.run(self._count_some, served[at : at + _SUMS_TOPICS])
        except IsterError as error:
            _log.debug("not counted", extra={"error": str(error)})
        self._at = self._clock.monotonic()
        names = {topic.name for topic in self._topics.served}
        for name in [name for name in self._known if name not in names]:
            self._known.pop(name, None)
            self._holdings.forget(name)

    def _count_some(self, topics: Iterable[ServedTopic]) -> None:
        for topic in topics:
            if not topic.is_closed:
                self.count(topic)

    def count(self, topic: ServedTopic) -> dict[str, int]:
        """The files and objects of a topic; what was known before where that cannot be found."""
        core = topic.topic
        if core is None:
            return _NO_TOTALS
        found = dict(self._known.get(topic.name, _NO_TOTALS))
        try:
            found["files_total"], found["files_bytes"] = self._holdings.files(core)
            if core.tier is not None:
                counted = self._holdings.objects(
                    topic.name, topic.incarnation, core.tier.owned.catalog
                )
                found["objects_total"] = counted.objects
                found["objects_bytes"] = counted.size_bytes
        except IsterError as error:
            _log.debug("not counted", extra={"topic": topic.name, "error": str(error)})
        self._known[topic.name] = found
        return found


_NO_TOTALS: Final = {"files_total": 0, "files_bytes": 0, "objects_total": 0, "objects_bytes": 0}
_NO_MARKS: Final = Watermarks(trimmed=0, tiered=0, synced=0, written=0, next=0)


def _empty_view(
    name: TopicName, error: IsterError | None, *, is_reliable: bool = True
) -> dict[str, Any]:
    """A topic that nothing is known of but its name."""
    text = str(name)
    return {
        "topic": text,
        "parent": base_of_partition(text),
        "partitions": [],
        "is_here": False,
        "is_reliable": is_reliable,
        "mode": None,
        "ack": None,
        "codec": None,
        "incarnation": None,
        "epoch": None,
        "state": "closed",
        "owner": None,
        "earliest": 0,
        "watermarks": asdict(_NO_MARKS),
        "cache": None,
        "producers": 0,
        "rates": None,
        "upload_lag": {"messages": 0, "bytes": 0},
        "subscriptions": [],
        "subscriptions_total": 0,
        "damage": [],
        "errors": [] if error is None else [describe_error(error)],
        **_NO_TOTALS,
    }


def describe_error(error: IsterError) -> dict[str, Any]:
    """An error as views have it."""
    return {"code": error.code, "message": error.message, "hint": error.hint}


def _is_elsewhere(address: Address | None) -> dict[str, Any]:
    where = f"the broker at {address.broker_url}" if address is not None else "another process"
    return {
        "code": "UNAVAILABLE",
        "message": f"{where} has the topic: this is what the stores say about it",
        "hint": "ask that broker for what has not been uploaded yet" if address else None,
    }


def _describe_all(subscriptions: Iterable[AnySubscription]) -> list[dict[str, Any]]:
    room, described = _CONSUMERS_OF_ALL_SHOWN, []
    for one in subscriptions:
        described.append(describe_subscription(one, consumers_max=min(room, _CONSUMERS_SHOWN)))
        room -= len(described[-1]["consumers"])
    return described


def describe_subscription(
    subscription: AnySubscription, *, consumers_max: int = _CONSUMERS_SHOWN
) -> dict[str, Any]:
    """A subscription: where it is, who has it, and what holds it up."""
    names = {known.id: name for name, known in subscription.stored.consumers.items()}
    attached = subscription.attached
    described: dict[str, Any] = {
        "name": subscription.name,
        "type": subscription.kind.value,
        "cursor": None,
        "lag": 0,
        "in_flight": 0,
        "waiting": 0,
        "blocked": None,
        "blocked_reason": None,
        "consumers": [names.get(one, str(one)) for one in attached[:consumers_max]],
        "consumers_total": len(attached),
        "active": None,
        "max_unacked_messages": None,
        "failure_policy": None,
        "principals": None if subscription.principals is None else [*subscription.principals],
    }
    if isinstance(subscription, Dispatch):
        stats = subscription.delivery.stats()
        described |= {
            "cursor": stats.cursor,
            "lag": subscription.lag,
            "in_flight": stats.in_flight,
            "waiting": stats.pending + stats.waiting_retry,
            "blocked": stats.blocked,
            "max_unacked_messages": subscription.window,
            "failure_policy": subscription.stored.policy.to_json(),
        }
        described["blocked_reason"] = _what_holds_up(subscription, described)
        active = subscription.delivery.active
    else:
        active = subscription.active
    if active is not None and subscription.kind in (
        SubscriptionKind.EXCLUSIVE,
        SubscriptionKind.FAILOVER,
    ):
        described["active"] = names.get(active, str(active))
    return described


def _what_holds_up(subscription: Dispatch, described: dict[str, Any]) -> str | None:
    """Why a subscription does not go on, in words; None if it does, or is at the end."""
    blocked, window = described["blocked"], subscription.window
    if blocked is not None:
        what = "its key" if subscription.kind is SubscriptionKind.KEY_SHARED else "the subscription"
        return (
            f"the message at offset {blocked} has failed too often, and the poison policy is "
            f"block: {what} waits until it is acknowledged, or the policy changed"
        )
    if not described["lag"]:
        return None
    consumers = described["consumers_total"]
    if not consumers:
        return "no consumer is connected"
    getting = 1 if described["active"] is not None else consumers
    if described["in_flight"] >= window * getting:
        return (
            f"its consumers have {described['in_flight']} messages that they have not "
            f"acknowledged, and may have {window} each"
        )
    return None


def _describe_stored(stored: StoredSubscription, end: int) -> dict[str, Any]:
    """A subscription as it is written down."""
    return {
        "name": stored.name,
        "type": stored.kind.value,
        "cursor": stored.cursor,
        "lag": max(0, end - stored.cursor),
        "in_flight": None,
        "waiting": None,
        "blocked": None,
        "blocked_reason": None,
        "consumers": [],
        "consumers_total": 0,
        "active": None,
        "max_unacked_messages": stored.window,
        "failure_policy": stored.policy.to_json(),
    }


def _watermarks(topic: ServedTopic) -> Watermarks:
    if topic.topic is not None:
        return topic.topic.watermarks
    # Whatever was published is gone.
    at = topic.next_offset
    return Watermarks(trimmed=at, tiered=at, synced=at, written=at, next=at)


def _cache(core: Topic | None) -> dict[str, int] | None:
    if core is None:
        return None
    with core.wal.lock:
        cache = core.cache
        return {
            "start": cache.start,
            "next": cache.end,
            "messages": len(cache),
            "bytes": cache.size_bytes,
        }


def _damage(core: Topic | None) -> list[dict[str, Any]]:
    return [
        {
            "file": os.path.basename(one.path),
            "position": one.position,
            "offset": one.offset,
            "reason": one.reason,
        }
        for one in (core.damage if core is not None else ())[:_DAMAGE_SHOWN]
    ]


def _errors(core: Topic | None) -> list[dict[str, Any]]:
    if core is None:
        return []
    found = [core.wal.failure, core.tier.last_error if core.tier is not None else None]
    return [describe_error(error) for error in found if error is not None]
