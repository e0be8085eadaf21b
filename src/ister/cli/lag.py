"""`ister subscriptions lag`: the lag of all subscriptions of all topics, the largest first.

Owns: arguments, the order, output. Does not own: what lag is, which brokers compute
(`ister.client` asks them).

A subscription of a partitioned topic has one row per partition.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Final

from ister.base.model import JsonObject, TopicName
from ister.cli.connection import add_broker_arguments, connected
from ister.cli.errors_out import answer, print_json
from ister.cli.location import parse_topic
from ister.cli.output import Subparsers, add_command, print_table
from ister.errors import NotFoundError

if TYPE_CHECKING:
    from ister.client import Client
    from ister.wire.views import TopicJson

_NAMES: Final = (
    "topic",
    "subscription",
    "kind",
    "cursor",
    "end",
    "lag",
    "consumers",
    "blocked_by",
)


def register_lag(kinds: Subparsers) -> None:
    """Adds the command."""
    parser = add_command(
        kinds,
        "lag",
        help="show the lag of all subscriptions of all topics",
        description="Shows how many messages each subscription has not acknowledged yet, the "
        "largest lag first, over all topics, or those of one namespace or one topic. A "
        "partitioned topic has a row for each partition.",
        examples=(
            "ister subscriptions lag",
            "ister subscriptions lag --min-lag 1000",
            "ister subscriptions lag /default/orders --json",
        ),
    )
    parser.add_argument(
        "topic", metavar="TOPIC", nargs="?", type=parse_topic, help="only this topic"
    )
    parser.add_argument("--namespace", metavar="NAME", help="only topics of this namespace")
    parser.add_argument(
        "--min-lag",
        metavar="N",
        type=_parse_lag,
        default=0,
        help="only subscriptions with at least this lag (default: 0)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(parser)
    parser.set_defaults(run=_run)


def _parse_lag(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of messages")
    return int(text)


def _run(options: argparse.Namespace) -> int:
    return answer(options, lambda: _show(options), {"subscriptions": []})


def _show(options: argparse.Namespace) -> int:
    topic: TopicName | None = options.topic
    with connected(options) as client:
        rows = [
            row
            for view in _views(client, topic, options.namespace)
            for row in _rows_of(client, view)
        ]
    found = [row for row in rows if _lag_of(row) >= options.min_lag]
    found.sort(key=lambda row: (-_lag_of(row), str(row["topic"]), str(row["subscription"])))
    if options.json:
        print_json({"subscriptions": found})
    elif found:
        headers = [name.replace("_", " ") for name in _NAMES]
        print_table(headers, [tuple(row.values()) for row in found])
    elif rows:
        print(f"no subscription has a lag of {options.min_lag:,} messages or more")
    else:
        print("no subscriptions")
    return 0


def _views(client: Client, topic: TopicName | None, namespace: str | None) -> list[TopicJson]:
    if topic is None:
        return client.list_topics(namespace)
    name = str(topic)
    views = [
        view
        for view in client.list_topics(topic.namespace)
        if name in (view["topic"], view.get("parent"))
    ]
    if not views:
        raise NotFoundError(f"topic {name} does not exist", topic=name)
    return views


def _rows_of(client: Client, view: TopicJson) -> list[JsonObject]:
    """The subscriptions of a topic, or of a partition."""
    topic, end = view["topic"], view["watermarks"]["next"]
    shown = view["subscriptions"]
    if view.get("subscriptions_total", len(shown)) > len(shown):
        # A list shows only some of very many.
        described = client.describe_topic(topic).subscriptions
        values: list[tuple[object, ...]] = [
            (one.subscription, one.kind, one.cursor, end, one.lag, len(one.consumers), None)
            for one in described
        ]
    else:
        values = [
            (
                one["name"],
                one["type"] or "",
                one["cursor"],
                end,
                one["lag"],
                one.get("consumers_total", len(one["consumers"])),
                one["blocked_reason"],
            )
            for one in shown
        ]
    return [dict(zip(_NAMES, (topic, *one), strict=True)) for one in values]


def _lag_of(row: JsonObject) -> int:
    lag = row["lag"]
    return lag if isinstance(lag, int) else 0
