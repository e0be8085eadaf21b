"""Finds the broker that has a topic in the metadata store, and calls it.

    owner key ─► the owner's entry ─► its Flight address ─► a client, shared by the process
    no owner ──► the node with the newest files, if it is up; any broker, if the bucket has all

Owns: which addresses may have a topic, and trying them in turn. Does not own: connections
(`location`), and how long a call is retried. A retry after an UnavailableError looks up the owner
again, on the driver and in tasks.

Addresses in the option `broker` are tried, too: the owner's own address may not be reachable from
here, and an owner that is not a broker (a log that another process has open) has no entry. If a
broker does not have the topic, the next address is tried.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from ister.base import forks
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.directory import read_owners
from ister.bucket.members import Member, MemberState, read_members
from ister.bucket.membership import is_node_running
from ister.bucket.names import TopicKeys
from ister.client.flight import FlightClient
from ister.errors import (
    FencedError,
    IsterError,
    NoAnswerError,
    NotFoundError,
    UnavailableError,
    WaitsForDiskError,
)
from ister.spark.location import LogLocation, client_of
from ister.wire.contract import TopicStatus

_MEMBERS_SECONDS: Final = 1.0
# An address that did not answer comes last for this long: trying it may take half a minute.
_SILENT_SECONDS: Final = 60.0
# A broker that is cut off must not delay the others for longer.
_MANY_SECONDS: Final = 10.0
# A broker answers for 10,000 topics at once, unless it is set to fewer.
_MANY_TOPICS: Final = 1000

NOT_SERVED: Final = (
    "messages that are not in the bucket yet are on another machine, and the process that has them "
    "is not a broker"
)
"""The message of errors about a topic whose owner has no Flight address."""

_Answer = TypeVar("_Answer")

_lock = threading.Lock()
_members: dict[bytes, tuple[float, dict[str, Member]]] = {}
_silent: dict[str, float] = {}
# Nodes that were brokers: without an entry, such a node is stopping or has lost its lease.
_brokers_seen: set[str] = set()


@dataclass(frozen=True, slots=True)
class Owner:
    """The process that has a topic, or should have it, according to the metadata store."""

    node: str | None
    """The node that has the topic open, or has its newest files; None for any broker."""
    addresses: tuple[str, ...]
    """Flight addresses to try in turn; empty if the owner is not a broker and none is given."""
    waits: WaitsForDiskError | None = None
    """Set if no process has the topic open, and messages that are not in the bucket may be on the
    disk of a node that is not running."""


def find_owner(place: LogLocation, topic: str) -> Owner:
    """Finds the addresses of a topic; UnavailableError if its owner has none just now."""
    try:
        node, found = _find(place, topic)
    except NotFoundError:
        # The metadata store is a file on another machine, or does not exist yet.
        return Owner(None, _in_order(place.brokers))
    except WaitsForDiskError as error:
        return Owner(error.node, _in_order(place.brokers), error)
    return Owner(node, _with_given(place, found))


def ask(place: LogLocation, topic: str, call: Callable[[FlightClient], _Answer]) -> _Answer:
    """Calls the broker that has a topic.

    Raises:
        UnavailableError: It does not answer, it is down, or the topic is on its way to another one;
            it is not known whether `call` was executed. A retry looks up the owner again.
        As `call`.
    """
    owner = find_owner(place, topic)
    if owner.waits is not None and not owner.addresses:
        raise is_down(owner.waits)
    return ask_first(owner.addresses, call, topic=topic)


def ask_any(place: LogLocation, call: Callable[[FlightClient], _Answer]) -> _Answer:
    """Calls any broker: one that options name, or one that is up."""
    try:
        found = [member.flight_url for member in _listening(_read_members(place).values())]
    except NotFoundError:
        found = []
    return ask_first(_in_order(place.brokers, found), call)


def ask_first(
    addresses: Iterable[str], call: Callable[[FlightClient], _Answer], *, topic: str | None = None
) -> _Answer:
    """Calls brokers in turn until one succeeds.

    Raises:
        UnavailableError: No broker has the topic now.
        As `call`, from the first address.
    """
    first: IsterError | None = None
    for address in addresses:
        try:
            return call(client_of(address))
        except (UnavailableError, FencedError, NotFoundError) as error:
            first = first or error
            if _is_silence(error, address):
                with _lock:
                    _silent[address] = SystemClock.monotonic() + _SILENT_SECONDS
    if isinstance(first, FencedError):
        raise UnavailableError("the topic has a new owner", topic=topic) from first
    raise first or UnavailableError(
        NOT_SERVED if topic is not None else "no broker is known",
        topic=topic,
        hint="pass the Flight address of a broker",
    )


def connect(place: LogLocation, topic: str) -> FlightClient:
    """Returns the client of the broker that has a topic, after a first call succeeded."""
    return ask(place, topic, lambda client: check_has(client, topic))


def check_has(client: FlightClient, topic: str) -> FlightClient:
    """Returns the client if its broker has a topic."""
    client.watermarks([topic])
    return client


def read_watermarks(
    place: LogLocation, topics: Iterable[str]
) -> tuple[dict[str, TopicStatus], dict[str, IsterError]]:
    """Reads the watermarks of many topics, with one call per broker; returns errors by topic."""
    root = place.config.storage.metadata.root_prefix
    owners = read_owners(place.history().metadata, root)
    asked, errors = ask_members(place, {topic: owners.get(topic, "") for topic in topics})
    found: dict[str, TopicStatus] = {}
    for topic, answer in asked.items():
        try:
            if answer is None:
                status = ask(place, topic, partial(FlightClient.watermarks, topics=[topic]))[topic]
            else:
                status = answer[1]
            found[topic] = status
        except IsterError as error:
            errors[topic] = error
    return found, errors


def ask_members(
    place: LogLocation, nodes: Mapping[str, str]
) -> tuple[dict[str, tuple[str, TopicStatus] | None], dict[str, IsterError]]:
    """Reads the watermarks of topics from the brokers of their nodes, with one call per broker.

    Args:
        place: The log.
        nodes: The node of each topic.

    Returns:
        The address that has the topic and its watermarks, or None if the node has no entry or its
        broker refused, because one of the topics has moved: look for the owner of each. And the
        error for each topic whose broker did not answer.
    """
    members = _read_members(place)
    groups: dict[str, list[str]] = {}
    found: dict[str, tuple[str, TopicStatus] | None] = {}
    for topic, node in nodes.items():
        member = members.get(node)
        if member is None:
            found[topic] = None
        else:
            groups.setdefault(member.flight_url, []).append(topic)
    errors: dict[str, IsterError] = {}
    for address, topics in groups.items():
        _ask_many(_with_given(place, [address]), address, topics, found, errors)
    return found, errors


def _ask_many(
    addresses: tuple[str, ...],
    owner: str,
    topics: list[str],
    found: dict[str, tuple[str, TopicStatus] | None],
    errors: dict[str, IsterError],
) -> None:
    parts = [topics[at : at + _MANY_TOPICS] for at in range(0, len(topics), _MANY_TOPICS)]
    while parts:
        names = parts.pop()
        try:
            found |= ask_first(addresses, partial(_watermarks_at, topics=names))
        except IsterError as error:
            if _is_silence(error, owner):
                errors |= dict.fromkeys([*names, *(one for part in parts for one in part)], error)
                return
            # One topic that has moved fails the whole call.
            if len(names) == 1:
                found[names[0]] = None
            else:
                middle = len(names) // 2
                parts += [names[:middle], names[middle:]]


def _watermarks_at(
    client: FlightClient, topics: list[str]
) -> dict[str, tuple[str, TopicStatus] | None]:
    answers = client.watermarks(topics, timeout_seconds=_MANY_SECONDS)
    return {topic: (client.address, status) for topic, status in answers.items()}


def group_by_owner(place: LogLocation, topics: Iterable[str]) -> list[list[str]]:
    """Groups topics by the node that has them open; those that nobody has open are one group."""
    root = place.config.storage.metadata.root_prefix
    try:
        owners = read_owners(place.history().metadata, root)
    except NotFoundError:
        owners = {}  # the metadata store is a file on another machine
    groups: dict[str, list[str]] = {}
    for topic in topics:
        groups.setdefault(owners.get(topic, ""), []).append(topic)
    return list(groups.values())


def has_brokers(place: LogLocation) -> bool:
    """Whether brokers serve the log: options name one, or the metadata store has an entry."""
    try:
        return bool(place.brokers or _read_members(place))
    except NotFoundError:
        return False


# -- the metadata store ---------------------------------------------------------------------


def _find(place: LogLocation, topic: str) -> tuple[str | None, list[str]]:
    history, root = place.history(), place.config.storage.metadata.root_prefix
    keys = TopicKeys(root, TopicName.parse(topic))
    catalog = Catalog(history.metadata, keys, clock=history.clock, metrics=history.metrics)
    owner = catalog.owner()
    if owner is not None:
        node = owner[0].node
        return node, _address_of(place, node, topic)
    found = catalog.record()
    record = found[0] if found is not None and found[0].is_open else None
    if record is not None and record.node and catalog.sealed() is None:
        last = catalog.last()
        tiered = last.end if last is not None else 0
        if not record.is_whole(tiered):
            member = _read_members(place).get(record.node)
            if member is not None:
                return record.node, [member.flight_url]
            if is_node_running(history.metadata, root, record.node):
                if place.brokers:
                    return record.node, []
                # A broker that starts takes its node before it makes its entry.
                raise UnavailableError(
                    f"node {record.node} is running but has not opened the topic",
                    topic=topic,
                    hint="if it is not a broker, includeTail=false reads only the bucket",
                )
            raise waits_for_disk(topic, record.node, tiered)
    # Any broker may be called: the one that the topic is assigned to opens it, others refuse.
    return None, [member.flight_url for member in _listening(_read_members(place).values())]


def _address_of(place: LogLocation, node: str, topic: str) -> list[str]:
    for is_fresh in (False, True):
        member = _read_members(place, is_fresh=is_fresh).get(node)
        if member is not None:
            return [member.flight_url]
    if node in _brokers_seen and not place.brokers:
        raise UnavailableError(
            f"the broker of node {node} is stopping, or has lost its lease", topic=topic
        )
    return []


def waits_for_disk(topic: str, node: str, tiered: int) -> WaitsForDiskError:
    """The error about messages that only a node that is not running may have."""
    return WaitsForDiskError(
        f"node {node} is not running: messages from offset {tiered} on may be on its disk",
        node=node,
        topic=topic,
        offset=tiered,
        hint="start that node; if its disk is lost, `ister topics take-over` gives them up",
    )


def is_down(waits: WaitsForDiskError) -> UnavailableError:
    """Returns an error that is retried, because the node may come back soon."""
    return UnavailableError(waits.message, topic=waits.topic, offset=waits.offset, hint=waits.hint)


def _listening(members: Iterable[Member]) -> list[Member]:
    return [member for member in members if member.state is not MemberState.STARTING]


def _read_members(place: LogLocation, *, is_fresh: bool = False) -> dict[str, Member]:
    """The brokers that are up, by node; cached for up to a second unless `is_fresh`."""
    now = SystemClock.monotonic()
    with _lock:
        at, members = _members.get(place.key, (-float("inf"), {}))
    if is_fresh or now - at >= _MEMBERS_SECONDS:
        root = place.config.storage.metadata.root_prefix
        members = read_members(place.history().metadata, root)
        with _lock:
            _members.clear()
            _members[place.key] = (now, members)
            _brokers_seen.update(members)
    return members


# -- addresses ------------------------------------------------------------------------------


def _with_given(place: LogLocation, found: list[str]) -> tuple[str, ...]:
    """The addresses found for a topic, and those that options name."""
    if place.brokers and len(_read_members(place)) == 1:
        # It must be the one that options name, by an address that is known to be reachable.
        return _in_order(place.brokers, found)
    return _in_order(found, place.brokers)


def _in_order(*groups: Iterable[str]) -> tuple[str, ...]:
    """All addresses, each once; those that did not answer lately come last."""
    now = SystemClock.monotonic()
    every = list(dict.fromkeys(address for group in groups for address in group))
    with _lock:
        return tuple(sorted(every, key=lambda address: _silent.get(address, -1.0) > now))


def _is_silence(error: IsterError, address: str) -> bool:
    """Whether a broker did not answer, rather than answer with this error."""
    return isinstance(error, NoAnswerError) and error.address == address


@forks.call_in_child
def _forget_all() -> None:
    forks.reset_locks(_lock)
