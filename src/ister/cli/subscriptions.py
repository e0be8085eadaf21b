"""`ister subscriptions`: where the subscriptions of topics are, and changes to them.

Does not own: subscriptions, which brokers keep (`ister.client` talks to them).

A subscription of a partitioned topic is one of each partition, and is shown so.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from ister.base.model import JsonObject, Start
from ister.cli.command import Arg, Facts, Group, Shown, Table, Yes, command, confirmed
from ister.cli.connection import START_HELP, Broker, parse_count, parse_name, parse_start
from ister.cli.location import Topic, topic_name
from ister.errors import NotFoundError
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from ister.wire.views import SubscriptionJson

if TYPE_CHECKING:
    from ister.client import Client

SUBSCRIPTIONS = Group(
    "subscriptions",
    "list, describe, seek and remove subscriptions",
    examples=(
        "ister subscriptions list",
        "ister subscriptions list --min-lag 1000",
        "ister subscriptions seek /default/orders billing --to 2h",
        "ister subscriptions policy /default/orders billing --poison drop",
    ),
)
SUBSCRIPTIONS.moved["lag"] = "use `ister subscriptions list`, which shows the lag"
register = SUBSCRIPTIONS.register


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


Name = Annotated[str, Arg("subscription name", "NAME", parse_name)]

# -- list -----------------------------------------------------------------------------------


@command(SUBSCRIPTIONS, "list", "ls", failed={"subscriptions": []})
def list_subscriptions(
    broker: Broker,
    topic: Annotated[str | None, Arg("only this topic", "TOPIC", topic_name)] = None,
    *,
    namespace: Annotated[str | None, Arg("only topics of this namespace", "NAME")] = None,
    min_lag: Annotated[
        int, Arg("only subscriptions with at least this lag (default: 0)", "N", _parse_number)
    ] = 0,
) -> Shown:
    """List the subscriptions of a topic, or of all topics, with their lag.

    Lists subscriptions, the one that is furthest behind first: of a topic, of a namespace, or of
    all topics. The lag is the number of messages that are not acknowledged yet. A partitioned topic
    has a row for each partition.

    Examples:
        ister subscriptions list
        ister subscriptions list /default/orders
        ister subscriptions list --namespace shop --min-lag 1000 --json
    """
    with broker.connect() as client:
        found = _all_of(client, topic) if topic else _everywhere(client, namespace)
    shown = [one for one in found if (one["lag"] or 0) >= min_lag]
    shown.sort(key=lambda one: (-(one["lag"] or 0), one["topic"], one["name"]))
    empty = f"{topic} has no subscriptions" if topic else "no subscriptions"
    if found:
        empty = f"no subscription has a lag of {min_lag:,} messages or more"
    facts: JsonObject = {"subscriptions": shown}
    return Shown(
        facts if topic is None else {"topic": topic, **facts},
        subscription_table(shown, has_topics=topic is None) if shown else empty,
    )


def subscription_table(found: Sequence[SubscriptionJson], *, has_topics: bool = False) -> Table:
    """A table of subscriptions; those of several topics with their topics.

    `topic` may be missing where all are of one.
    """
    first = ("topic",) if has_topics or len({one.get("topic") for one in found}) > 1 else ()
    titles = ("subscription", "kind", "cursor", "lag", "in flight", "waiting", "consumers")
    rows = [
        (
            *((one["topic"],) if first else ()),
            one["name"],
            one["type"],
            one["cursor"],
            one["lag"],
            one["in_flight"],
            one["waiting"],
            one.get("consumers_total", len(one["consumers"])),
            one["blocked_reason"] or "",
        )
        for one in found
    ]
    return Table((*first, *titles, "blocked by"), rows)


def _everywhere(client: Client, namespace: str | None) -> list[SubscriptionJson]:
    """The subscriptions of all topics, or of those of a namespace."""
    found: list[SubscriptionJson] = []
    for view in client.admin.list_topics(namespace):
        topic, shown = view["topic"], view["subscriptions"]
        if view.get("subscriptions_total", len(shown)) > len(shown):
            found += _described(client, topic)  # a list shows only some of very many
        else:
            found += [{**one, "topic": topic} for one in shown]
    return found


def _all_of(client: Client, topic: str) -> list[SubscriptionJson]:
    """The subscriptions of a topic, or of all its partitions."""
    view = client.admin.show_topic(topic)
    views = [client.admin.show_topic(name) for name in view["partitions"]] or [view]
    return [{"topic": one["topic"], **found} for one in views for found in one["subscriptions"]]


def _one_of(client: Client, topic: str, name: str) -> list[SubscriptionJson]:
    """One subscription, once for each partition.

    Raises:
        NotFoundError: There is none.
    """
    found = _all_of(client, topic)
    mine = [one for one in found if one["name"] == name]
    if not mine and name in client.admin.subscriptions(topic):
        # A topic shows some hundreds of them, and may have more.
        parts = client.admin.partitions(topic)
        mine = [one for part in parts for one in _described(client, part, name)]
    if not mine:
        names = sorted({one["name"] for one in found})
        near = difflib.get_close_matches(name, names) or names[:10]
        hint = (
            f"existing subscriptions: {', '.join(near)}"
            if near
            else "the topic has no subscriptions"
        )
        raise NotFoundError(f"{topic} has no subscription {name}", hint=hint)
    return mine


def _described(client: Client, topic: str, name: str | None = None) -> list[SubscriptionJson]:
    """Subscriptions among very many: all of a topic or partition, or one."""
    return [
        {
            "topic": topic,
            "name": one.subscription,
            "type": one.kind,
            "cursor": one.cursor,
            "lag": one.lag,
            "in_flight": one.in_flight,
            "waiting": one.waiting,
            "blocked": one.blocked,
            "blocked_reason": None,
            "consumers": list(one.consumers),
            "consumers_total": len(one.consumers),
            "active": one.active,
            "max_unacked_messages": one.max_unacked_messages,
            "failure_policy": None
            if name is None
            else client.admin.failure_policy(topic, name).to_json(),
            "principals": None if one.principals is None else [*one.principals],
        }
        for one in client.admin.describe_topic(topic).subscriptions
        if name in (None, one.subscription)
    ]


# -- describe -------------------------------------------------------------------------------


@command(SUBSCRIPTIONS, "describe", failed={}, echo=["topic"])
def describe_subscription(broker: Broker, topic: Topic, subscription: Name) -> Shown:
    """Show the position, consumers and state of a subscription.

    Examples:
        ister subscriptions describe /default/orders billing
    """
    with broker.connect() as client:
        found = _one_of(client, topic, subscription)
    if len(found) > 1:
        return Shown(_together(topic, found), subscription_table(found))
    (one,) = found
    facts = {
        "kind": one["type"],
        "cursor": one["cursor"],
        "lag": one["lag"],
        "in flight": one["in_flight"],
        "waiting": one["waiting"],
        "consumers": ", ".join(one["consumers"]) or "none",
        "active": one["active"],
        "max unacked": one["max_unacked_messages"],
        "access": _principals(one),
        "blocked by": one["blocked_reason"] or "nothing",
        **{name.replace("_", " "): value for name, value in (one["failure_policy"] or {}).items()},
    }
    return Shown(one, Facts(facts, f"{one['name']} of {topic}"))


def _principals(one: SubscriptionJson) -> str:
    principals = one.get("principals")
    return "not restricted" if principals is None else f"restricted to {', '.join(principals)}"


def _together(topic: str, found: list[SubscriptionJson]) -> JsonObject:
    """A subscription of all partitions as one; theirs are in `partitions`."""
    return {
        "topic": topic,
        "name": found[0]["name"],
        "type": found[0]["type"],
        "cursor": None,
        "lag": sum(one["lag"] or 0 for one in found),
        "partitions": found,
    }


# -- changing -------------------------------------------------------------------------------


@command(SUBSCRIPTIONS, "seek", failed={}, echo=["topic"])
def seek(
    broker: Broker,
    topic: Topic,
    subscription: Name,
    *,
    dry_run: Annotated[
        bool, Arg("show the new offset, and how many messages would be read again or skipped")
    ] = False,
    to: Annotated[Start, Arg(START_HELP, "WHERE", parse_start)],
) -> Shown:
    """Move a subscription to another position.

    Moves a subscription, for all its consumers. Connected consumers may still return some messages
    that they received before.

    Examples:
        ister subscriptions seek /default/orders billing --to earliest
        ister subscriptions seek /default/orders billing --to 12000
        ister subscriptions seek /default/orders billing --to 2026-01-31T12:00:00Z
        ister subscriptions seek /default/orders billing --to 2h --dry-run
    """
    with broker.connect() as client:
        before = _one_of(client, topic, subscription)
        if dry_run:
            return _plan_seek(client, topic, subscription, to, before)
        client.admin.seek(topic, subscription, to=to)
        after = _one_of(client, topic, subscription)
    moves = [
        {"topic": old["topic"], "before": old["cursor"], "cursor": new["cursor"]}
        for old, new in zip(before, after, strict=True)
    ]
    lines = []
    for move in moves:
        of = f" of {move['topic']}" if len(moves) > 1 else ""
        lines.append(f"{subscription}{of} moved to offset {move['cursor']} from {move['before']}")
    cursor = moves[0]["cursor"] if len(moves) == 1 else None
    return broker.changed(
        "\n".join(lines), topic=topic, subscription=subscription, cursor=cursor, moves=moves
    )


def _plan_seek(
    client: Client, topic: str, name: str, to: Start, before: list[SubscriptionJson]
) -> Shown:
    """What a seek would do, for each partition."""
    with client.reader(topic, to) as reader:
        offsets = reader.positions
    moves: list[JsonObject] = []
    lines = []
    for old in before:
        cursor, target = old["cursor"], offsets[old["topic"]]
        again = skipped = None
        if cursor is not None:
            again, skipped = max(cursor - target, 0), max(target - cursor, 0)
        moves.append(
            {
                "topic": old["topic"],
                "before": cursor,
                "cursor": target,
                "read_again": again,
                "skipped": skipped,
            }
        )
        what = "would stay where it is"
        if again:
            what = f"{again:,} messages would be read again"
        elif skipped:
            what = f"{skipped:,} messages would be skipped"
        of = f" of {old['topic']}" if len(before) > 1 else ""
        lines.append(f"{name}{of} would move to offset {target} from {cursor}: {what}")
    facts = {"topic": topic, "subscription": name, "dry_run": True, "moves": moves}
    return Shown(facts, "\n".join(lines))


@command(SUBSCRIPTIONS, "remove", "rm", "delete", failed={}, echo=["topic"])
def remove_subscription(
    broker: Broker, topic: Topic, subscription: Name, *, yes: Yes = False
) -> Shown:
    """Remove a subscription without consumers.

    Removes a subscription and its position. It must have no consumers.

    Examples:
        ister subscriptions remove /default/orders billing --yes
    """
    with broker.connect() as client:
        (one, *_) = _one_of(client, topic, subscription)
        where = f"at offset {one['cursor']}, from broker {broker.address}"
        confirmed(f"Remove subscription {subscription} of {topic}, {where}?", yes=yes)
        client.admin.unsubscribe(topic, subscription)
    return broker.changed(
        f"removed {subscription} from {topic}", topic=topic, subscription=subscription
    )


@command(SUBSCRIPTIONS, "policy", failed={}, echo=["topic"])
def subscription_policy(
    broker: Broker,
    topic: Topic,
    subscription: Name,
    *,
    max_redelivery_count: Annotated[
        int | None,
        Arg("maximum number of redeliveries of a message", "N", _parse_number, group="changes"),
    ] = None,
    ack_timeout_ms: Annotated[
        int | None,
        Arg("time a consumer has to acknowledge a message", "N", _parse_number, group="changes"),
    ] = None,
    base_redelivery_delay_ms: Annotated[
        int | None, Arg("delay before the first redelivery", "N", _parse_number, group="changes")
    ] = None,
    max_redelivery_delay_ms: Annotated[
        int | None, Arg("maximum delay between redeliveries", "N", _parse_number, group="changes")
    ] = None,
    backoff: Annotated[Backoff | None, Arg("how delays grow", group="changes")] = None,
    poison: Annotated[
        PoisonPolicy | None,
        Arg("what to do with a message after its last redelivery", group="changes"),
    ] = None,
    dead_letter_topic: Annotated[
        str | None, Arg("dead-letter topic", "TOPIC", topic_name, group="changes")
    ] = None,
    max_unacked_messages: Annotated[
        int | None,
        Arg("maximum unacknowledged messages per consumer", "N", parse_count, group="changes"),
    ] = None,
) -> Shown:
    """Show or change the failure policy of a subscription.

    Shows what happens to messages that a consumer rejects or does not acknowledge in time. Options
    that are given change the policy; the others stay unchanged.

    Examples:
        ister subscriptions policy /default/orders billing
        ister subscriptions policy /default/orders billing --max-redelivery-count 3
        ister subscriptions policy /default/orders billing --poison drop
    """
    given = {
        "max_redelivery_count": max_redelivery_count,
        "ack_timeout_ms": ack_timeout_ms,
        "base_redelivery_delay_ms": base_redelivery_delay_ms,
        "max_redelivery_delay_ms": max_redelivery_delay_ms,
        "backoff": backoff,
        "poison": poison,
        "dead_letter_topic": dead_letter_topic,
    }
    changes = {name: value for name, value in given.items() if value is not None}
    with broker.connect() as client:
        (one, *_) = _one_of(client, topic, subscription)
        policy = client.admin.failure_policy(one["topic"], subscription)
        if changes:
            policy = FailurePolicy.from_json({**policy.to_json(), **changes})
            client.admin.set_failure_policy(topic, subscription, policy)
        if max_unacked_messages is not None:
            client.admin.set_max_unacked_messages(topic, subscription, max_unacked_messages)
        (one, *_) = _one_of(client, topic, subscription)
    found = {**policy.to_json(), "max_unacked_messages": one["max_unacked_messages"]}
    if changes or max_unacked_messages is not None:
        found["broker"] = broker.address
    facts = Facts({key.replace("_", " "): value for key, value in found.items()})
    return Shown({"topic": topic, "subscription": subscription, **found}, facts)


@command(SUBSCRIPTIONS, "restrict", failed={}, echo=["topic"])
def restrict_subscription(
    broker: Broker,
    topic: Topic,
    subscription: Name,
    *,
    to: Annotated[
        list[str],
        Arg("user:NAME or service:NAME (default: user); repeatable", "PRINCIPAL", one_of="who!"),
    ] = [],  # noqa: B006 - copied
    lift: Annotated[bool, Arg("remove the restriction", one_of="who!")] = False,
) -> Shown:
    """Restrict a subscription to principals.

    Restricts a subscription to principals: others may not consume, acknowledge, seek, change or
    remove it, whatever their rights on the topic are. Principals with manage_namespace can always
    use it, and only they can change the restriction. A new restriction replaces the previous one.
    Streams of other principals end within a second.

    Examples:
        ister subscriptions restrict /default/orders billing --to service:billing
        ister subscriptions restrict /default/orders billing --lift
    """
    with broker.connect() as client:
        _one_of(client, topic, subscription)
        client.admin.restrict_subscription(topic, subscription, None if lift else to)
        (found, *_) = _one_of(client, topic, subscription)
    return broker.changed(
        f"{subscription} of {topic} is {_principals(found)}",
        topic=topic,
        subscription=subscription,
        principals=found["principals"],
    )
