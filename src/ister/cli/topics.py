"""`ister topics`: lists, describes, changes and moves topics.

Does not own: the drawing (`tier_map`), what is known about a topic: from a broker (`ister.client`)
or a data directory (`stored_topics`).

`list` and `describe` ask a broker, or read a log without one (`--data`, `--config`). If neither is
given and no broker answers at the default address, they read `./ister-data` if it exists, and
standard error says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Final, TypeVar

from ister.base.model import AckLevel, Codec, TopicName
from ister.cli.command import (
    Arg,
    DeclinedError,
    Group,
    Shown,
    Table,
    UsageError,
    Yes,
    command,
    confirmed,
)
from ister.cli.connection import Broker, existing_partitions, parse_count
from ister.cli.errors_out import error_as_json
from ister.cli.location import CONFIG_VARIABLE, DATA_DEFAULT, Place, Topic, wal_root
from ister.cli.output import console, format_bytes, is_terminal, print_error, print_facts
from ister.cli.subscriptions import subscription_table
from ister.cli.tier_map import draw_spans
from ister.errors import IsterError, NoAnswerError, NotFoundError, UnavailableError
from ister.wire.views import TopicJson

if TYPE_CHECKING:
    from ister.client import Client
    from ister.config import StorageConfig

# The default broker may not exist: if the user named none, it has less time to answer.
_GUESS_SECONDS: Final = 1.5
_CALLS: Final = 8
_WIDTH_DEFAULT: Final = 80

T = TypeVar("T")

TOPICS = Group(
    "topics",
    "list, describe, create, delete and move topics",
    examples=(
        "ister topics list",
        "ister topics describe orders",
        "ister topics describe /default/orders --data ./ister-data --json",
        "ister topics create /default/orders --partitions 4 --ack tiered",
    ),
)
register = TOPICS.register

Partitions = Annotated[int, Arg("number of partitions", "N", parse_count)]


class Source(Broker):
    """A broker, or the log of a directory or config file."""

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options of both."""
        Place.add_arguments(parser)
        super().add_arguments(parser)

    def ask(
        self, by_broker: Callable[[Client], T], by_data: Callable[[StorageConfig, str | None], T]
    ) -> T:
        """Asks a broker, or reads a data directory, as the module header says."""
        options = self.options

        def read() -> T:
            storage = Place(options).load().storage
            return by_data(storage, wal_root(storage))

        is_place_named = bool(options.data or options.config)
        if is_place_named and options.broker:
            raise UsageError("--broker cannot be combined with --data or --config")
        if is_place_named or (os.environ.get(CONFIG_VARIABLE) and not self.is_named):
            return read()
        is_guess = not self.is_named and os.path.isdir(DATA_DEFAULT)
        if is_guess:
            options.retry_for = min(options.retry_for, _GUESS_SECONDS)
        try:
            with self.connect() as client:
                return by_broker(client)
        except NoAnswerError:
            if not is_guess:
                raise
        print(
            f"ister: no broker answers at {self.address}: reading {DATA_DEFAULT} directly",
            file=sys.stderr,
        )
        return read()


# -- list -----------------------------------------------------------------------------------


@command(TOPICS, "list", "ls", failed={"topics": []})
def list_topics(
    source: Source,
    *,
    namespace: Annotated[str | None, Arg("only topics of this namespace", "NAME")] = None,
    short: Annotated[bool, Arg("with --json: leave out files and objects")] = False,
    json: bool,
) -> Shown:
    """List topics with their offsets, sizes and lags.

    Lists the topics of a broker or of a data directory. With --json, each topic has the fields of
    `describe`; --short leaves out files and objects, which is faster with very many topics.

    Examples:
        ister topics list
        ister topics list --namespace default --json --short
    """
    is_short = short or not json
    silent: list[IsterError] = []

    def ask(client: Client) -> list[TopicJson]:
        views = client.admin.list_topics(namespace)
        return views if is_short else _show_all(client, views, silent)

    def read(storage: StorageConfig, root: str | None) -> list[TopicJson]:
        from ister.cli.stored_topics import describe_topics, to_json  # noqa: PLC0415 - if needed
        from ister.topic.describe import shorten  # noqa: PLC0415

        views = [to_json(facts) for facts in describe_topics(storage, root, namespace)]
        return [shorten(view) for view in views] if is_short else views

    views = source.ask(ask, read)
    if not views and not json:
        print("no topics yet; create one with `ister produce /default/NAME`", file=sys.stderr)
    parts = [_list_table(views)] if views else []
    return Shown({"topics": views}, parts, ok=not silent, errors=silent)


def _show_all(
    client: Client, views: Iterable[TopicJson], silent: list[IsterError]
) -> list[TopicJson]:
    """The full views of topics; topics that no longer exist are left out.

    A topic whose broker does not answer keeps its short view.

    `views` are topics in short, or their names alone; `silent` receives the errors of brokers that
    do not answer.

    Raises:
        UnavailableError: A broker does not answer, and there is no short view of its topic.
    """

    def show(view: TopicJson) -> TopicJson | None:
        try:
            return client.admin.show_topic(view["topic"])
        except NotFoundError:
            return None
        except UnavailableError as error:
            if "errors" not in view:
                raise
            silent.append(error)
            errors = [*view["errors"], error_as_json(error)]
            return {
                "files": [],
                "objects": [],
                "policies": {},
                "schema": None,
                **view,
                "errors": errors,
            }

    with ThreadPoolExecutor(_CALLS, thread_name_prefix="ister-show") as pool:
        return [view for view in pool.map(show, views) if view is not None]


def _list_table(views: Sequence[TopicJson]) -> Table:
    titles = ("topic", "ack", "next", "tiered", "lag to bucket", "objects", "in bucket", "on disk")
    return Table((*titles, "subscriptions", "largest lag"), [_list_row(view) for view in views])


def _list_row(view: TopicJson) -> tuple[object, ...]:
    marks, subscriptions = view["watermarks"], view["subscriptions"]
    lags = [one["lag"] for one in subscriptions if one["lag"] is not None]
    return (
        view["topic"],
        view["ack"] if view["is_reliable"] else "not stored",
        marks["next"],
        marks["tiered"],
        view["upload_lag"]["messages"],
        view["objects_total"],
        format_bytes(view["objects_bytes"]),
        format_bytes(view["files_bytes"]),
        view.get("subscriptions_total", len(subscriptions)),
        max(lags) if lags else None,
    )


# -- describe -------------------------------------------------------------------------------


@command(TOPICS, "describe", failed={}, echo=["topic"])
def describe_topic(
    source: Source,
    topic: Topic,
    *,
    ascii: Annotated[bool, Arg("draw with ASCII characters only")] = False,
    width: Annotated[
        int | None,
        Arg("width of the drawing in columns (default: the terminal's)", "N", parse_count),
    ] = None,
) -> Shown:
    """Show a topic in all tiers, drawn to scale.

    Shows a topic: its tiers over one axis of offsets (objects in the bucket, local files, cache),
    watermarks and cursors, then its subscriptions and what blocks them. With --data or --config, no
    broker is asked, and nothing is changed or locked.

    Examples:
        ister topics describe /default/orders
        ister topics describe /default/orders --ascii --width 120
        ister topics describe /default/orders --config ister.yml --json
    """

    def ask(client: Client) -> tuple[TopicJson, bool]:
        view = client.admin.show_topic(topic)
        if view["partitions"]:
            parts: list[TopicJson] = [{"topic": name} for name in view["partitions"]]
            view = {**view, "topics": _show_all(client, parts, [])}
        return view, True

    def read(storage: StorageConfig, root: str | None) -> tuple[TopicJson, bool]:
        view = _read_stored(storage, root, TopicName.parse(topic))
        return view, not view.get("errors")

    def show() -> None:
        _print_topic(view, width, is_plain=ascii)

    view, is_whole = source.ask(ask, read)
    for error in view.get("errors") or ():
        hint = error.get("hint")
        print_error(str(error["message"]), hint=None if hint is None else str(hint))
    return Shown(view, show, is_whole)


def _read_stored(storage: StorageConfig, root: str | None, name: TopicName) -> TopicJson:
    from ister.cli.stored_topics import describe_topic, describe_topics, to_json  # noqa: PLC0415

    topic = str(name)
    try:
        return to_json(describe_topic(storage, root, name))
    except NotFoundError:
        views = map(to_json, describe_topics(storage, root, name.namespace))
        parts = [view for view in views if view["parent"] == topic]
        if not parts:
            raise
    parts.sort(key=lambda view: (len(view["topic"]), view["topic"]))
    names = [view["topic"] for view in parts]
    return {"topic": topic, "parent": None, "partitions": names, "topics": parts}


def _print_topic(view: TopicJson, width: int | None, *, is_plain: bool) -> None:
    if view["partitions"]:
        print(f"{view['topic']}, of {len(view['partitions'])} partitions")
        _list_table(view["topics"]).show()
        return
    _print_head(view)
    print()
    _print_map(view, width, is_plain=is_plain)
    print()
    print_facts(_facts(view))
    if view["subscriptions"]:
        print()
        subscription_table(view["subscriptions"]).show()


def _print_head(view: TopicJson) -> None:
    about = [view["state"] or "state unknown"]
    if view["is_reliable"]:
        about += [f"ack {view['ack'] or '?'}", f"codec {view['codec'] or '?'}"]
    else:
        about.append("stores no messages")
    if view["epoch"] is not None:
        about.append(f"epoch {view['epoch']}")
    if (sealed := view.get("sealed")) is not None:
        about.append(f"sealed by node {sealed['node']} at offset {sealed['next_offset']}")
    if view.get("is_local_current") is False:
        about.append("local files outdated: another node has written the topic since")
    head, rest = view["topic"], ", ".join(about)
    if not is_terminal(sys.stdout):
        print(f"{head}  {rest}")
        return
    from rich.text import Text  # noqa: PLC0415

    console().print(Text.assemble((head, "bold"), f"  {rest}"))


def _print_map(view: TopicJson, width: int | None, *, is_plain: bool) -> None:
    width = width or shutil.get_terminal_size((_WIDTH_DEFAULT, 24)).columns
    is_plain = is_plain or not (sys.stdout.encoding or "").lower().startswith("utf")
    lines = draw_spans(view, width, ascii=is_plain)
    if not is_terminal(sys.stdout):
        for line in lines:
            print("".join(span.text for span in line).rstrip())
        return
    from rich.text import Text  # noqa: PLC0415

    shown = console()
    for line in lines:
        shown.print(Text.assemble(*((span.text, span.style) for span in line)))


def _facts(view: TopicJson) -> dict[str, object]:
    """Facts that are not part of the drawing."""
    facts: dict[str, object] = {}
    parquet = sum(one.get("format") == "parquet" for one in view["objects"])
    facts["bucket"] = f"{_count(view['objects_total'], 'object')}"
    if parquet:
        facts["bucket"] = f"{facts['bucket']} ({parquet} parquet)"
    facts["bucket"] = f"{facts['bucket']}, {format_bytes(view['objects_bytes'])}"
    facts["files"] = f"{_count(view['files_total'], 'file')}, {format_bytes(view['files_bytes'])}"
    cache = view["cache"]
    if cache is not None:
        facts["cache"] = f"{_count(cache['messages'], 'message')}, {format_bytes(cache['bytes'])}"
    lag = view["upload_lag"]
    if lag["messages"]:
        facts["not uploaded yet"] = (
            f"{_count(lag['messages'], 'message')}, {format_bytes(lag['bytes'])}"
        )
    owner = view["owner"]
    facts["owner"] = "none: no broker has the topic open"
    if owner is not None:
        where = f" at {owner['broker_url']}" if owner.get("broker_url") else ""
        facts["owner"] = f"node {owner['node']}{where}"
    if view["producers"] is not None:
        facts["producers"] = view["producers"]
    rates = view["rates"]
    if rates is not None:
        facts["rates"] = (
            f"{rates['messages_in']:,.1f} messages/s in ({format_bytes(rates['bytes_in'])}/s), "
            f"{rates['messages_out']:,.1f} out"
        )
    schema = view["schema"]
    if schema is not None:
        facts["schema"] = f"{schema['subject']} version {schema['version']} ({schema['type']})"
    bounds = [f"{name} {value:,}" for name, value in view["policies"].items() if value]
    if bounds:
        facts["bounds"] = ", ".join(bounds)
    if view["damage"]:
        facts["damage"] = _count(len(view["damage"]), "place") + "; `ister inspect wal` shows them"
    return facts


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


# -- changes --------------------------------------------------------------------------------


@command(TOPICS, "create", failed={"ok": False}, echo=["topic"])
def create_topic(
    broker: Broker,
    topic: Topic,
    *,
    partitions: Partitions = 0,
    ack: Annotated[
        AckLevel | None, Arg("durability level of acknowledgements (default: the broker's)")
    ] = None,
    codec: Annotated[
        Codec | None, Arg("encoding of stored messages (default: the broker's)")
    ] = None,
) -> Shown:
    """Create a topic.

    Creates a topic, with or without partitions. A topic that already exists is left unchanged; the
    command fails if it differs from what was requested.

    Examples:
        ister topics create /default/orders
        ister topics create /default/orders --partitions 4 --ack tiered
    """
    with broker.connect() as client:
        is_new = not client.admin.partitions(topic)
        client.admin.create_topic(topic, partitions=partitions, ack=ack, codec=codec)
        names = client.admin.partitions(topic)
    parts = [] if names == [topic] else names
    of = f" of {len(names)} partitions" if parts else ""
    text = f"created{of}" if is_new else "already exists; unchanged"
    return broker.changed(f"{topic} {text}", topic=topic, created=is_new, partitions=parts)


@command(TOPICS, "grow", failed={"ok": False}, echo=["topic"])
def grow_topic(
    broker: Broker,
    topic: Topic,
    *,
    partitions: Annotated[int, Arg("new number of partitions", "N", parse_count)],
    yes: Yes = False,
) -> Shown:
    """Add partitions to a partitioned topic.

    Adds partitions to a partitioned topic. Partitions cannot be removed. The partition of a routing
    key depends on the number of partitions, so most keys move to another one: messages of one key
    that are published before and after are then in two partitions, and consumers may get them out
    of order. To keep the order of each key, stop producers, let consumers reach the end, then grow.

    Examples:
        ister topics grow /default/orders --partitions 8
    """
    with broker.connect() as client:
        before = client.admin.partitions(topic)
        if before in ([], [topic]):
            raise NotFoundError(f"there is no partitioned topic {topic}", topic=topic)
        if partitions > len(before):
            confirmed(
                f"Grow {topic} from {len(before)} to {partitions} partitions at broker "
                f"{broker.address}? Routing keys move to other partitions: the order of "
                "messages of one key is not kept across the change.",
                yes=yes,
            )
        names = client.admin.grow_topic(topic, partitions)
    text = f"{topic} has {len(names)} partitions"
    if len(names) == len(before):
        text += "; unchanged"
    else:
        text += f", up from {len(before)}; most routing keys go to another partition from now on"
    return broker.changed(text, topic=topic, before=len(before), partitions=names)


@command(TOPICS, "delete", "rm", failed={"ok": False}, echo=["topic"])
def delete_topic(broker: Broker, topic: Topic, *, yes: Yes = False) -> Shown:
    """Delete a topic and all its messages.

    Deletes a topic with all its messages, objects and subscriptions. This cannot be undone.

    Examples:
        ister topics delete /default/orders --yes
    """
    with broker.connect() as client:
        names = existing_partitions(client, topic)
        of = f" and its {len(names)} partitions" if names != [topic] else ""
        where = f"at broker {broker.address}"
        confirmed(f"Delete {topic}{of} {where} with all messages? This cannot be undone.", yes=yes)
        client.admin.delete_topic(topic)
    return broker.changed(f"deleted {topic}", topic=topic, deleted=names)


@command(TOPICS, "unload", failed={"ok": False}, echo=["topic"])
def unload_topic(broker: Broker, topic: Topic) -> Shown:
    """Hand a topic over to another broker.

    Makes the broker of a topic upload the rest of its messages and release it to another broker, if
    there is one. Producers and consumers reconnect automatically.

    Examples:
        ister topics unload /default/orders
    """
    with broker.connect() as client:
        client.admin.unload_topic(topic)
    return broker.changed(f"handed over {topic}", topic=topic)


@command(TOPICS, "move", failed={"ok": False}, echo=["topic"])
def move_topic(
    broker: Broker,
    topic: Topic,
    *,
    to: Annotated[str, Arg("node of the broker; see `ister brokers list`", "NODE")],
) -> Shown:
    """Move a topic to another broker.

    Moves a topic to a broker: its current broker uploads the rest of its messages and hands it
    over. Producers and consumers follow; nothing is lost.

    Examples:
        ister topics move /default/orders --to 1f0c2a9d4b7e6358
    """
    print(f"ister: moving {topic} to {to}", file=sys.stderr)
    with broker.connect() as client:
        client.admin.move_topic(topic, to)
    return broker.changed(f"moved {topic} to {to}", topic=topic, to=to)


@command(TOPICS, "take-over", failed={"ok": False}, echo=["topic"])
def take_over_topic(broker: Broker, topic: Topic, *, yes: Yes = False) -> Shown:
    """Continue a topic whose disk is lost, without its newest messages.

    Continues a topic that waits for the disk of a broker that is down. Messages that only that disk
    has are given up for good, acknowledged ones among them: use this if the disk is lost. If the
    broker can be started again, start it instead.

    Examples:
        ister topics take-over /default/orders
        ister topics take-over /default/orders --yes
    """
    with broker.connect() as client:
        lost = client.admin.take_over(topic)
        what = (
            f"messages at offset {lost['offset']} and later that only the disk of node "
            f"{lost['node']} has"
        )
        if not yes:
            print(f"ister: a take-over of {topic} gives up {what}", file=sys.stderr)
        question = f"Take {topic} over at broker {broker.address}? This gives up {what}."
        try:
            confirmed(f"{question} This cannot be undone.", yes=yes)
        except DeclinedError:
            return Shown({"ok": False, **lost}, ok=False)
        taken = client.admin.take_over(topic, confirm=True)
    return broker.changed(f"took {topic} over; given up: {what}", **taken)


def _parse_policy(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (name and equals and value.isascii() and value.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER")
    return name, int(value)


@command(TOPICS, "policies", failed={"ok": False}, echo=["topic"])
def topic_policies(
    broker: Broker,
    topic: Topic,
    *,
    set: Annotated[
        list[tuple[str, int]],
        Arg(
            "set one of the topic's own limits, 0 for unlimited; repeatable",
            "NAME=NUMBER",
            _parse_policy,
            one_of="change",
        ),
    ] = [],  # noqa: B006 - copied
    reset: Annotated[bool, Arg("clear the topic's own limits", one_of="change")] = False,
) -> Shown:
    """Show or replace a topic's limits.

    Shows the limits in force for a topic. With --set, the given limits replace the topic's own; the
    others come from its namespace or the broker.

    Examples:
        ister topics policies /default/orders
        ister topics policies /default/orders --set max_publish_rate=1000
        ister topics policies /default/orders --reset
    """
    with broker.connect() as client:
        if set or reset:
            in_force = client.admin.set_topic_policies(topic, dict(set))
        else:
            in_force = dict(
                client.admin.describe_topic(existing_partitions(client, topic)[0]).policies
            )
    facts: dict[str, object] = {"topic": topic, "policies": in_force}
    rows = [(name, value or "none") for name, value in in_force.items()]
    table = Table(("bound", "value"), rows)
    if not (set or reset):
        return Shown(facts, table)
    text = f"limits of {topic} at broker {broker.address}"
    return Shown({**facts, "broker": broker.address}, [text, table])


@command(TOPICS, "release-producer", failed={"ok": False}, echo=["topic"])
def release_producer(
    broker: Broker, topic: Topic, producer: Annotated[str, Arg("producer name", "NAME")]
) -> Shown:
    """Release a producer name for another principal.

    Releases a producer name. A name belongs to the principal that first used it in a topic; after
    this, it belongs to the principal that uses it next. First stop the producer that uses it: its
    next message would claim the name again.

    Examples:
        ister topics release-producer /default/orders shop
    """
    with broker.connect() as client:
        owner = client.admin.release_producer(topic, producer)
    text = (
        f"{producer} has no owner in {topic}; unchanged"
        if owner is None
        else f"{producer} is released in {topic}; it belonged to {owner}"
    )
    return broker.changed(text, topic=topic, producer=producer, principal=owner)
