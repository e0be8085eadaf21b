"""`ister subscriptions`: where a topic's subscriptions are, and changes to them.

Owns: arguments, output, exit codes. Does not own: subscriptions, which brokers keep
(`ister.client` talks to them).

A subscription of a partitioned topic is one of each partition, and is shown so.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ister.base.model import JsonObject
from ister.cli.connection import (
    START_HELP,
    add_broker_arguments,
    broker_address,
    connected,
    parse_count,
    parse_name,
    parse_start,
    print_change,
)
from ister.cli.errors_out import answer, print_json
from ister.cli.lag import register_lag
from ister.cli.location import add_topic_argument, parse_topic
from ister.cli.output import Subparsers, add_command, confirm, print_facts, print_table
from ister.errors import NotFoundError
from ister.subscription.policy import Backoff, FailurePolicy, PoisonPolicy
from ister.wire.views import SubscriptionJson

if TYPE_CHECKING:
    from ister.client import Client


def register(commands: Subparsers) -> None:
    """Adds the command and its parts to the parser."""
    parser = add_command(
        commands,
        "subscriptions",
        help="list, describe, seek and remove subscriptions",
        examples=(
            "ister subscriptions list /default/orders",
            "ister subscriptions lag --min-lag 1000",
            "ister subscriptions seek /default/orders billing --to 2h",
            "ister subscriptions policy /default/orders billing --poison drop",
        ),
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    _register_list(kinds)
    register_lag(kinds)
    _register_describe(kinds)
    _register_seek(kinds)
    _register_remove(kinds)
    _register_policy(kinds)
    _register_restrict(kinds)


def _register_list(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "list",
        help="list the subscriptions of a topic",
        examples=("ister subscriptions list /default/orders",),
    )
    _add_arguments(parser, _run_list, has_name=False)


def _register_describe(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "describe",
        help="show the position, consumers and state of a subscription",
        examples=("ister subscriptions describe /default/orders billing",),
    )
    _add_arguments(parser, _run_describe)


def _register_seek(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "seek",
        help="move a subscription to another position",
        description="Moves a subscription, for all its consumers. Connected consumers may "
        "still return some messages that they received before.",
        examples=(
            "ister subscriptions seek /default/orders billing --to earliest",
            "ister subscriptions seek /default/orders billing --to 12000",
            "ister subscriptions seek /default/orders billing --to 2026-01-31T12:00:00Z",
            "ister subscriptions seek /default/orders billing --to 2h --dry-run",
        ),
    )
    _add_arguments(parser, _run_seek)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show the new offset, and how many messages would be read again or skipped",
    )
    parser.add_argument(
        "--to",
        metavar="WHERE",
        type=parse_start,
        required=True,
        help=START_HELP,
    )


def _register_remove(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "remove",
        help="remove a subscription without consumers",
        description="Removes a subscription and its position. It must have no consumers.",
        examples=("ister subscriptions remove /default/orders billing --yes",),
    )
    _add_arguments(parser, _run_remove)
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")


def _register_policy(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "policy",
        help="show or change the failure policy of a subscription",
        description="Shows what happens to messages that a consumer rejects or does not "
        "acknowledge in time. Options that are given change the policy; the others stay "
        "unchanged.",
        examples=(
            "ister subscriptions policy /default/orders billing",
            "ister subscriptions policy /default/orders billing --max-redelivery-count 3",
            "ister subscriptions policy /default/orders billing --poison drop",
        ),
    )
    _add_arguments(parser, _run_policy)
    change = parser.add_argument_group("changes")
    for name, what in (
        ("max-redelivery-count", "maximum number of redeliveries of a message"),
        ("ack-timeout-ms", "time a consumer has to acknowledge a message"),
        ("base-redelivery-delay-ms", "delay before the first redelivery"),
        ("max-redelivery-delay-ms", "maximum delay between redeliveries"),
    ):
        change.add_argument(f"--{name}", metavar="N", type=_parse_number, help=what)
    change.add_argument("--backoff", choices=list(Backoff), help="how delays grow")
    change.add_argument(
        "--poison",
        choices=list(PoisonPolicy),
        help="what to do with a message after its last redelivery",
    )
    change.add_argument(
        "--dead-letter-topic", metavar="TOPIC", type=parse_topic, help="dead-letter topic"
    )
    change.add_argument(
        "--max-unacked-messages",
        metavar="N",
        type=parse_count,
        help="maximum unacknowledged messages per consumer",
    )


def _register_restrict(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "restrict",
        help="restrict a subscription to principals",
        description="Restricts a subscription to principals: others may not consume, acknowledge, "
        "seek, change or remove it, whatever their rights on the topic are. Principals with "
        "manage_namespace can always use it, and only they can change the restriction. A new "
        "restriction replaces the previous one. Streams of other principals end within a second.",
        examples=(
            "ister subscriptions restrict /default/orders billing --to service:billing",
            "ister subscriptions restrict /default/orders billing --lift",
        ),
    )
    _add_arguments(parser, _run_restrict)
    who = parser.add_mutually_exclusive_group(required=True)
    who.add_argument(
        "--to",
        metavar="PRINCIPAL",
        action="append",
        help="user:NAME or service:NAME (default: user); repeatable",
    )
    who.add_argument("--lift", action="store_true", help="remove the restriction")


def _add_arguments(
    parser: argparse.ArgumentParser,
    run: Callable[[argparse.Namespace], int],
    *,
    has_name: bool = True,
) -> None:
    add_topic_argument(parser)
    if has_name:
        parser.add_argument(
            "subscription", metavar="NAME", type=parse_name, help="subscription name"
        )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(parser)

    def answered(options: argparse.Namespace) -> int:
        return answer(options, lambda: run(options), {"topic": str(options.topic)})

    parser.set_defaults(run=answered)


def _parse_number(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return int(text)


# -- looking --------------------------------------------------------------------------------


def _all_of(client: Client, topic: str) -> list[SubscriptionJson]:
    """The subscriptions of a topic, or of all its partitions."""
    view = client.show_topic(topic)
    views = [client.show_topic(name) for name in view["partitions"]] or [view]
    return [{"topic": one["topic"], **found} for one in views for found in one["subscriptions"]]


def _one_of(client: Client, topic: str, name: str) -> list[SubscriptionJson]:
    """One subscription, once for each partition.

    Raises:
        NotFoundError: There is none.
    """
    found = _all_of(client, topic)
    mine = [one for one in found if one["name"] == name]
    if not mine and name in client.subscriptions(topic):
        # A topic shows some hundreds of them, and may have more.
        mine = _described(client, topic, name)
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


def _described(client: Client, topic: str, name: str) -> list[SubscriptionJson]:
    """Finds one subscription among very many."""
    found: list[SubscriptionJson] = []
    for part in client.partitions(topic):
        for one in client.describe_topic(part).subscriptions:
            if one.subscription != name:
                continue
            found.append(
                {
                    "topic": part,
                    "name": name,
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
                    "failure_policy": client.failure_policy(part, name).to_json(),
                    "principals": None if one.principals is None else [*one.principals],
                }
            )
    return found


def _run_list(options: argparse.Namespace) -> int:
    topic = str(options.topic)
    with connected(options) as client:
        found = _all_of(client, topic)
    if options.json:
        print_json({"topic": topic, "subscriptions": found})
    elif found:
        print_subscriptions(found)
    else:
        print(f"{topic} has no subscriptions")
    return 0


def print_subscriptions(found: Sequence[SubscriptionJson]) -> None:
    """A table of subscriptions; those of several topics with their topics.

    `topic` may be missing where all are of one.
    """
    is_partitioned = len({one.get("topic") for one in found}) > 1
    headers = (
        *(("topic",) if is_partitioned else ()),
        "subscription",
        "kind",
        "cursor",
        "lag",
        "in flight",
        "waiting",
        "consumers",
        "blocked by",
    )
    rows = [
        (
            *((one["topic"],) if is_partitioned else ()),
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
    print_table(headers, rows)


def _run_describe(options: argparse.Namespace) -> int:
    topic = str(options.topic)
    with connected(options) as client:
        found = _one_of(client, topic, options.subscription)
    if options.json:
        print_json(found[0] if len(found) == 1 else _together(topic, found))
        return 0
    if len(found) > 1:
        print_subscriptions(found)
        return 0
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
    print_facts(facts, title=f"{one['name']} of {topic}")
    return 0


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


def _run_seek(options: argparse.Namespace) -> int:
    topic, name = str(options.topic), options.subscription
    with connected(options) as client:
        before = _one_of(client, topic, name)
        if options.dry_run:
            return _plan_seek(options, before)
        client.seek(topic, name, to=options.to)
        after = _one_of(client, topic, name)
    moves = [
        {"topic": old["topic"], "before": old["cursor"], "cursor": new["cursor"]}
        for old, new in zip(before, after, strict=True)
    ]
    lines = []
    for move in moves:
        of = f" of {move['topic']}" if len(moves) > 1 else ""
        lines.append(f"{name}{of} moved to offset {move['cursor']} from {move['before']}")
    cursor = moves[0]["cursor"] if len(moves) == 1 else None
    facts = {"topic": topic, "subscription": name, "cursor": cursor, "moves": moves}
    print_change(options, "\n".join(lines), facts)
    return 0


def _plan_seek(options: argparse.Namespace, before: list[SubscriptionJson]) -> int:
    """Shows what a seek would do, for each partition."""
    from ister.cli.topic_reading import resolve_starts  # noqa: PLC0415 - needs an extra

    topic, name = str(options.topic), options.subscription
    offsets = resolve_starts(options, topic, options.to)
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
    if options.json:
        print_json({"topic": topic, "subscription": name, "dry_run": True, "moves": moves})
    else:
        print("\n".join(lines))
    return 0


def _run_remove(options: argparse.Namespace) -> int:
    topic, name = str(options.topic), options.subscription
    with connected(options) as client:
        (one, *_) = _one_of(client, topic, name)
        where = f"at offset {one['cursor']}, from broker {broker_address(options)}"
        question = f"Remove subscription {name} of {topic}, {where}?"
        if not confirm(question, is_confirmed=options.yes):
            return 1
        client.unsubscribe(topic, name)
    print_change(options, f"removed {name} from {topic}", {"topic": topic, "subscription": name})
    return 0


def _run_restrict(options: argparse.Namespace) -> int:
    topic, name = str(options.topic), options.subscription
    with connected(options) as client:
        _one_of(client, topic, name)
        client.restrict_subscription(topic, name, None if options.lift else options.to)
        (found, *_) = _one_of(client, topic, name)
    facts = {"topic": topic, "subscription": name, "principals": found["principals"]}
    print_change(options, f"{name} of {topic} is {_principals(found)}", facts)
    return 0


def _run_policy(options: argparse.Namespace) -> int:
    topic, name = str(options.topic), options.subscription
    with connected(options) as client:
        (one, *_) = _one_of(client, topic, name)
        policy = client.failure_policy(one["topic"], name)
        changes = _changes(options)
        if changes:
            policy = FailurePolicy.from_json({**policy.to_json(), **changes})
            client.set_failure_policy(topic, name, policy)
        if options.max_unacked_messages is not None:
            client.set_max_unacked_messages(topic, name, options.max_unacked_messages)
        (one, *_) = _one_of(client, topic, name)
    found = _policy(policy, one)
    is_changed = bool(changes) or options.max_unacked_messages is not None
    if is_changed:
        found["broker"] = broker_address(options)
    if options.json:
        print_json({"topic": topic, "subscription": name, **found})
    else:
        print_facts({key.replace("_", " "): value for key, value in found.items()})
    return 0


def _changes(options: argparse.Namespace) -> JsonObject:
    given = {
        "max_redelivery_count": options.max_redelivery_count,
        "ack_timeout_ms": options.ack_timeout_ms,
        "base_redelivery_delay_ms": options.base_redelivery_delay_ms,
        "max_redelivery_delay_ms": options.max_redelivery_delay_ms,
        "backoff": options.backoff,
        "poison": options.poison,
        "dead_letter_topic": str(options.dead_letter_topic) if options.dead_letter_topic else None,
    }
    return {name: value for name, value in given.items() if value is not None}


def _policy(policy: FailurePolicy, one: SubscriptionJson) -> JsonObject:
    return {**policy.to_json(), "max_unacked_messages": one["max_unacked_messages"]}
