"""`ister topics`: lists, describes and changes topics.

Owns: arguments, output, exit codes. Does not own: the drawing (`tier_map`), what is known about a
topic: from a broker (`ister.client`) or a data directory (`stored_topics`).

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
from typing import TYPE_CHECKING, Final, TypeVar

from ister.base.model import AckLevel, Codec, JsonObject
from ister.cli.connection import (
    add_broker_arguments,
    broker_address,
    connected,
    names_broker,
    parse_count,
    print_change,
)
from ister.cli.errors_out import answer, error_as_json, print_errors, print_json
from ister.cli.location import (
    CONFIG_VARIABLE,
    DATA_DEFAULT,
    add_place_arguments,
    add_topic_argument,
    load_place,
    wal_root,
)
from ister.cli.output import (
    Subparsers,
    add_command,
    confirm,
    console,
    format_bytes,
    is_terminal,
    print_error,
    print_facts,
    print_table,
)
from ister.cli.subscriptions import print_subscriptions
from ister.cli.tier_map import draw_spans
from ister.cli.topic_moves import register_moves
from ister.errors import IsterError, NotFoundError, UnavailableError
from ister.wire.views import TopicJson

if TYPE_CHECKING:
    from ister.client import Client
    from ister.config import StorageConfig

# The default broker may not exist: if the user named none, it has less time to answer.
_GUESS_SECONDS: Final = 1.5
_CALLS: Final = 8
_WIDTH_DEFAULT: Final = 80

T = TypeVar("T")


def register(commands: Subparsers) -> None:
    """Adds the command and its parts to the parser."""
    parser = add_command(
        commands,
        "topics",
        help="list, describe, create, delete and move topics",
        examples=(
            "ister topics list",
            "ister topics describe /default/orders",
            "ister topics describe /default/orders --data ./ister-data --json",
            "ister topics create /default/orders --partitions 4 --ack tiered",
        ),
    )
    kinds = parser.add_subparsers(metavar="WHAT", required=True)
    _register_list(kinds)
    _register_describe(kinds)
    _register_create(kinds)
    _register_grow(kinds)
    _register_delete(kinds)
    _register_unload(kinds)
    register_moves(kinds)
    _register_policies(kinds)
    _register_release_producer(kinds)


def _register_list(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "list",
        help="list topics with their offsets, sizes and lags",
        description="Lists the topics of a broker or of a data directory. With --json, each "
        "topic has the fields of `describe`; --short leaves out files and objects, which is "
        "faster with very many topics.",
        examples=("ister topics list", "ister topics list --namespace default --json --short"),
    )
    parser.add_argument("--namespace", metavar="NAME", help="only topics of this namespace")
    parser.add_argument(
        "--short", action="store_true", help="with --json: leave out files and objects"
    )
    _add_sources(parser)
    parser.set_defaults(run=_run_list)


def _register_describe(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "describe",
        help="show a topic in all tiers, drawn to scale",
        description="Shows a topic: its tiers over one axis of offsets (objects in the "
        "bucket, local files, cache), watermarks and cursors, then its subscriptions and "
        "what blocks them.",
        examples=(
            "ister topics describe /default/orders",
            "ister topics describe /default/orders --ascii --width 120",
            "ister topics describe /default/orders --config ister.yml --json",
        ),
    )
    add_topic_argument(parser)
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters only")
    parser.add_argument(
        "--width",
        metavar="N",
        type=parse_count,
        help="width of the drawing in columns (default: the terminal's)",
    )
    _add_sources(parser)
    parser.set_defaults(run=_run_describe)


def _register_create(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "create",
        help="create a topic",
        description="Creates a topic, with or without partitions. A topic that already "
        "exists is left unchanged; the command fails if it differs from what was requested.",
        examples=(
            "ister topics create /default/orders",
            "ister topics create /default/orders --partitions 4 --ack tiered",
        ),
    )
    add_topic_argument(parser)
    parser.add_argument(
        "--partitions", metavar="N", type=parse_count, default=0, help="number of partitions"
    )
    parser.add_argument(
        "--ack",
        choices=list(AckLevel),
        help="durability level of acknowledgements (default: the broker's)",
    )
    parser.add_argument(
        "--codec", choices=list(Codec), help="encoding of stored messages (default: the broker's)"
    )
    _add_broker(parser, _run_create)


def _register_grow(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "grow",
        help="add partitions to a partitioned topic",
        description="Adds partitions to a partitioned topic. Partitions cannot be removed. The "
        "partition of a routing key depends on the number of partitions, so most keys move to "
        "another one: messages of one key that are published before and after are then in two "
        "partitions, and consumers may get them out of order. To keep the order of each key, stop "
        "producers, let consumers reach the end, then grow.",
        examples=("ister topics grow /default/orders --partitions 8",),
    )
    add_topic_argument(parser)
    parser.add_argument(
        "--partitions",
        metavar="N",
        type=parse_count,
        required=True,
        help="new number of partitions",
    )
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")
    _add_broker(parser, _run_grow)


def _register_delete(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "delete",
        help="delete a topic and all its messages",
        description="Deletes a topic with all its messages, objects and subscriptions. This "
        "cannot be undone.",
        examples=("ister topics delete /default/orders --yes",),
    )
    add_topic_argument(parser)
    parser.add_argument("--yes", action="store_true", help="skip the confirmation")
    _add_broker(parser, _run_delete)


def _register_unload(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "unload",
        help="hand a topic over to another broker",
        description="Makes the broker of a topic upload the rest of its messages and release "
        "it to another broker, if there is one. Producers and consumers reconnect "
        "automatically.",
        examples=("ister topics unload /default/orders",),
    )
    add_topic_argument(parser)
    _add_broker(parser, _run_unload)


def _register_policies(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "policies",
        help="show or replace a topic's limits",
        description="Shows the limits in force for a topic. With --set, the given limits "
        "replace the topic's own; the others come from its namespace or the broker.",
        examples=(
            "ister topics policies /default/orders",
            "ister topics policies /default/orders --set max_publish_rate=1000",
            "ister topics policies /default/orders --reset",
        ),
    )
    add_topic_argument(parser)
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--set",
        metavar="NAME=NUMBER",
        action="append",
        type=_parse_policy,
        help="set one of the topic's own limits, 0 for unlimited; repeatable",
    )
    change.add_argument("--reset", action="store_true", help="clear the topic's own limits")
    _add_broker(parser, _run_policies)


def _register_release_producer(kinds: Subparsers) -> None:
    parser = add_command(
        kinds,
        "release-producer",
        help="release a producer name for another principal",
        description="Releases a producer name. A name belongs to the principal that first used it "
        "in a topic; after this, it belongs to the principal that uses it next. First stop the "
        "producer that uses it: its next message would claim the name again.",
        examples=("ister topics release-producer /default/orders shop",),
    )
    add_topic_argument(parser)
    parser.add_argument("producer", metavar="NAME", help="producer name")
    _add_broker(parser, _run_release_producer)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    add_broker_arguments(parser)
    parser.set_defaults(wrong_usage=parser.error)


def _add_broker(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(parser)
    parser.set_defaults(run=run)


def _parse_policy(text: str) -> tuple[str, int]:
    name, equals, value = text.partition("=")
    if not (name and equals and value.isascii() and value.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=NUMBER")
    return name, int(value)


# -- where from -----------------------------------------------------------------------------


def _from_somewhere(
    options: argparse.Namespace,
    by_broker: Callable[[Client], T],
    by_data: Callable[[StorageConfig, str | None], T],
) -> T:
    """Asks a broker, or reads a data directory, as the module header says."""

    def read() -> T:
        storage = load_place(options).storage
        return by_data(storage, wal_root(storage))

    is_place_named = bool(options.data or options.config)
    if is_place_named and options.broker:
        options.wrong_usage("--broker cannot be combined with --data or --config")
    if is_place_named or (os.environ.get(CONFIG_VARIABLE) and not names_broker(options)):
        return read()
    is_guess = not names_broker(options) and os.path.isdir(DATA_DEFAULT)
    if is_guess:
        options.retry_for = min(options.retry_for, _GUESS_SECONDS)
    try:
        with connected(options) as client:
            return by_broker(client)
    except UnavailableError as error:
        if not (is_guess and error.message.startswith("no broker answers")):
            raise
    print(
        f"ister: no broker answers at {broker_address(options)}: reading {DATA_DEFAULT} directly",
        file=sys.stderr,
    )
    return read()


# -- list -----------------------------------------------------------------------------------


def _run_list(options: argparse.Namespace) -> int:
    return answer(options, lambda: _list(options), {"topics": []})


def _list(options: argparse.Namespace) -> int:
    is_short = options.short or not options.json
    silent: list[IsterError] = []

    def ask(client: Client) -> list[TopicJson]:
        views = client.list_topics(options.namespace)
        return views if is_short else _show_all(client, views, silent)

    def read(storage: StorageConfig, root: str | None) -> list[TopicJson]:
        from ister.cli.stored_topics import describe_topics, to_json  # noqa: PLC0415 - if needed
        from ister.topic.describe import shorten  # noqa: PLC0415

        views = [to_json(facts) for facts in describe_topics(storage, root, options.namespace)]
        return [shorten(view) for view in views] if is_short else views

    views = _from_somewhere(options, ask, read)
    if options.json:
        print_json({"topics": views})
    elif views:
        _print_list(views)
    else:
        print("no topics yet; create one with `ister produce /default/NAME`", file=sys.stderr)
    print_errors(silent)
    return 1 if silent else 0


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
            return client.show_topic(view["topic"])
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


def _print_list(views: Sequence[TopicJson]) -> None:
    headers = (
        "topic",
        "ack",
        "next",
        "tiered",
        "lag to bucket",
        "objects",
        "in bucket",
        "on disk",
        "subscriptions",
        "largest lag",
    )
    print_table(headers, [_list_row(view) for view in views])


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


def _run_describe(options: argparse.Namespace) -> int:
    return answer(options, lambda: _describe(options), {"topic": str(options.topic)})


def _describe(options: argparse.Namespace) -> int:
    topic = str(options.topic)

    def ask(client: Client) -> tuple[TopicJson, bool]:
        view = client.show_topic(topic)
        if view["partitions"]:
            parts: list[TopicJson] = [{"topic": name} for name in view["partitions"]]
            view = {**view, "topics": _show_all(client, parts, [])}
        return view, False

    def read(storage: StorageConfig, root: str | None) -> tuple[TopicJson, bool]:
        view = _read_stored(storage, root, options)
        return view, bool(view.get("errors"))

    view, has_failed = _from_somewhere(options, ask, read)
    if options.json:
        print_json(view)
    else:
        _print_topic(view, options)
    for error in view.get("errors") or ():
        hint = error.get("hint")
        print_error(str(error["message"]), hint=None if hint is None else str(hint))
    return 1 if has_failed else 0


def _read_stored(
    storage: StorageConfig, root: str | None, options: argparse.Namespace
) -> TopicJson:
    from ister.cli.stored_topics import describe_topic, describe_topics, to_json  # noqa: PLC0415

    topic = str(options.topic)
    try:
        return to_json(describe_topic(storage, root, options.topic))
    except NotFoundError:
        views = map(to_json, describe_topics(storage, root, options.topic.namespace))
        parts = [view for view in views if view["parent"] == topic]
        if not parts:
            raise
    parts.sort(key=lambda view: (len(view["topic"]), view["topic"]))
    names = [view["topic"] for view in parts]
    return {"topic": topic, "parent": None, "partitions": names, "topics": parts}


def _print_topic(view: TopicJson, options: argparse.Namespace) -> None:
    if view["partitions"]:
        print(f"{view['topic']}, of {len(view['partitions'])} partitions")
        _print_list(view["topics"])
        return
    _print_head(view)
    print()
    _print_map(view, options)
    print()
    print_facts(_facts(view))
    if view["subscriptions"]:
        print()
        print_subscriptions(view["subscriptions"])


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


def _print_map(view: TopicJson, options: argparse.Namespace) -> None:
    width = options.width or shutil.get_terminal_size((_WIDTH_DEFAULT, 24)).columns
    is_plain = options.ascii or not (sys.stdout.encoding or "").lower().startswith("utf")
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


def _run_create(options: argparse.Namespace) -> int:
    def create() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            is_new = not client.partitions(topic)
            client.create_topic(
                topic, partitions=options.partitions, ack=options.ack, codec=options.codec
            )
            names = client.partitions(topic)
        partitions = [] if names == [topic] else names
        facts = {"topic": topic, "created": is_new, "partitions": partitions}
        parts = f" of {len(names)} partitions" if partitions else ""
        text = f"created{parts}" if is_new else "already exists; unchanged"
        print_change(options, f"{topic} {text}", facts)
        return 0

    return answer(options, create, _failed_change(options))


def _run_grow(options: argparse.Namespace) -> int:
    def grow() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            before = client.partitions(topic)
            if before in ([], [topic]):
                raise NotFoundError(f"there is no partitioned topic {topic}", topic=topic)
            question = (
                f"Grow {topic} from {len(before)} to {options.partitions} partitions at broker "
                f"{broker_address(options)}? Routing keys move to other partitions: the order of "
                "messages of one key is not kept across the change."
            )
            if options.partitions > len(before) and not confirm(question, is_confirmed=options.yes):
                return 1
            names = client.grow_topic(topic, options.partitions)
        facts = {"topic": topic, "before": len(before), "partitions": names}
        if len(names) == len(before):
            text = f"{topic} has {len(names)} partitions; unchanged"
        else:
            text = (
                f"{topic} has {len(names)} partitions, up from {len(before)}; most routing keys go "
                "to another partition from now on"
            )
        print_change(options, text, facts)
        return 0

    return answer(options, grow, _failed_change(options))


def _run_delete(options: argparse.Namespace) -> int:
    def delete() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            names = client.partitions(topic)
            if not names:
                raise NotFoundError(f"topic {topic} does not exist", topic=topic)
            of = f" and its {len(names)} partitions" if names != [topic] else ""
            where = f"at broker {broker_address(options)}"
            question = f"Delete {topic}{of} {where} with all messages? This cannot be undone."
            if not confirm(question, is_confirmed=options.yes):
                return 1
            client.delete_topic(topic)
        print_change(options, f"deleted {topic}", {"topic": topic, "deleted": names})
        return 0

    return answer(options, delete, _failed_change(options))


def _run_unload(options: argparse.Namespace) -> int:
    def unload() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            client.unload_topic(topic)
        print_change(options, f"handed over {topic}", {"topic": topic})
        return 0

    return answer(options, unload, _failed_change(options))


def _run_policies(options: argparse.Namespace) -> int:
    def policies() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            if options.set or options.reset:
                in_force = client.set_topic_policies(topic, dict(options.set or ()))
            else:
                names = client.partitions(topic)
                if not names:
                    raise NotFoundError(f"topic {topic} does not exist", topic=topic)
                in_force = dict(client.describe_topic(names[0]).policies)
        is_changed = bool(options.set or options.reset)
        changed = {"broker": broker_address(options)} if is_changed else {}
        if options.json:
            print_json({"topic": topic, "policies": in_force, **changed})
        else:
            if is_changed:
                print(f"limits of {topic} at broker {broker_address(options)}")
            print_table(
                ("bound", "value"), [(name, value or "none") for name, value in in_force.items()]
            )
        return 0

    return answer(options, policies, _failed_change(options))


def _run_release_producer(options: argparse.Namespace) -> int:
    def release() -> int:
        topic, producer = str(options.topic), str(options.producer)
        with connected(options) as client:
            owner = client.release_producer(topic, producer)
        text = (
            f"{producer} has no owner in {topic}; unchanged"
            if owner is None
            else f"{producer} is released in {topic}; it belonged to {owner}"
        )
        print_change(options, text, {"topic": topic, "producer": producer, "principal": owner})
        return 0

    return answer(options, release, _failed_change(options))


def _failed_change(options: argparse.Namespace) -> JsonObject:
    return {"ok": False, "topic": str(options.topic)}
