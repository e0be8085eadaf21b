"""`ister topics`: which topics there are, what each is in all tiers, and changes to them.

Owns: arguments, output, exit codes. Does not own: the drawing (`tier_map`), what is known about a
topic: a broker tells (`ister.client`), or the data directory does (`topic_survey`).

`list` and `describe` ask a broker, or look at a log without one (`--data`, `--config`), read-only.
If neither is named, and no broker answers where one is by default, `./ister-data` is looked at if
it is there; standard error says so.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Final, TypeVar

from ister.cli.connection import (
    add_broker_arguments,
    broker_address,
    connected,
    names_broker,
    parse_count,
    print_change,
)
from ister.cli.look import (
    add_command,
    confirm,
    console,
    format_bytes,
    is_terminal,
    print_error,
    print_facts,
    print_table,
)
from ister.cli.place import add_place_arguments, load_place, parse_topic, wal_root
from ister.cli.report import answer, error_as_json, print_errors, print_json
from ister.cli.subscriptions import print_subscriptions
from ister.cli.tier_map import draw_spans
from ister.errors import IsterError, NotFoundError, UnavailableError
from ister.model import AckLevel, Codec

if TYPE_CHECKING:
    from ister.client import Client
    from ister.config import StorageConfig

__all__ = ["register"]

_DATA_DEFAULT: Final = "./ister-data"
_CONFIG: Final = "ISTER_CONFIG"
# Where the user has named nothing, nobody waits long for a broker that may not be there.
_GUESS_SECONDS: Final = 1.5
_CALLS: Final = 8
_WIDTH_DEFAULT: Final = 80

T = TypeVar("T")


def register(commands: Any) -> None:  # noqa: ANN401 - argparse's sub-parsers have no public type
    """Adds the command and its parts to the parser."""
    parser = add_command(
        commands,
        "topics",
        help="list, describe, make, delete and hand over topics",
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
    _register_policies(kinds)
    _register_release_producer(kinds)


def _register_list(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "list",
        help="all topics: how far they are, and who is behind",
        description="Lists topics, of a broker or of a data directory. With --json, each is as "
        "`describe` shows it; --short leaves out files and objects, and is quicker where there are "
        "very many topics.",
        examples=("ister topics list", "ister topics list --namespace default --json --short"),
    )
    parser.add_argument("--namespace", metavar="NAME", help="only those of one namespace")
    parser.add_argument("--short", action="store_true", help="with --json: no files, no objects")
    _add_sources(parser)
    parser.set_defaults(run=_run_list)


def _register_describe(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "describe",
        help="a topic in all tiers, drawn to scale",
        description="Shows a topic: its tiers over one axis of offsets (the bucket's objects, "
        "local files, the cache), watermarks and cursors below them, then its subscriptions and "
        "what holds them up.",
        examples=(
            "ister topics describe /default/orders",
            "ister topics describe /default/orders --ascii --width 120",
            "ister topics describe /default/orders --config ister.yml --json",
        ),
    )
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    parser.add_argument("--ascii", action="store_true", help="draw with ASCII characters alone")
    parser.add_argument(
        "--width", metavar="N", type=parse_count, help="columns to draw in (default: all)"
    )
    _add_sources(parser)
    parser.set_defaults(run=_run_describe)


def _register_create(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "create",
        help="make a topic",
        description="Makes a topic, plain or of several partitions. One that already exists is "
        "not changed: if it is not what was asked for, the command fails.",
        examples=(
            "ister topics create /default/orders",
            "ister topics create /default/orders --partitions 4 --ack tiered",
        ),
    )
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    parser.add_argument(
        "--partitions", metavar="N", type=parse_count, default=0, help="number of partitions"
    )
    parser.add_argument(
        "--ack",
        choices=list(AckLevel),
        help="what an acknowledged message survives (default: the broker's)",
    )
    parser.add_argument(
        "--codec", choices=list(Codec), help="how messages are stored (default: the broker's)"
    )
    _add_broker(parser, _run_create)


def _register_grow(kinds: Any) -> None:  # noqa: ANN401
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
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    parser.add_argument(
        "--partitions",
        metavar="N",
        type=parse_count,
        required=True,
        help="new number of partitions",
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _add_broker(parser, _run_grow)


def _register_delete(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "delete",
        help="delete a topic for good",
        description="Deletes a topic with all its messages, objects and subscriptions, for good.",
        examples=("ister topics delete /default/orders --yes",),
    )
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    parser.add_argument("--yes", action="store_true", help="do not ask")
    _add_broker(parser, _run_delete)


def _register_unload(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "unload",
        help="have a broker hand a topic over",
        description="Has the broker of a topic upload what is left, and hand it over: to another "
        "broker if there is one. Producers and consumers follow by themselves.",
        examples=("ister topics unload /default/orders",),
    )
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    _add_broker(parser, _run_unload)


def _register_policies(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "policies",
        help="show or replace a topic's bounds",
        description="Shows the bounds that are in force for a topic. With --set, these become its "
        "own, and replace those it had; all others come from its namespace or the broker.",
        examples=(
            "ister topics policies /default/orders",
            "ister topics policies /default/orders --set max_publish_rate=1000",
            "ister topics policies /default/orders --reset",
        ),
    )
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    change = parser.add_mutually_exclusive_group()
    change.add_argument(
        "--set",
        metavar="NAME=NUMBER",
        action="append",
        type=_parse_policy,
        help="a bound of its own, 0 for none; may be given several times",
    )
    change.add_argument("--reset", action="store_true", help="it has none of its own")
    _add_broker(parser, _run_policies)


def _register_release_producer(kinds: Any) -> None:  # noqa: ANN401
    parser = add_command(
        kinds,
        "release-producer",
        help="release a producer name for another principal",
        description="Releases a producer name. A name belongs to the principal that first used it "
        "in a topic; after this, it belongs to the principal that uses it next. First stop the "
        "producer that uses it: its next message would claim the name again.",
        examples=("ister topics release-producer /default/orders shop",),
    )
    parser.add_argument("topic", metavar="TOPIC", type=parse_topic, help="such as /default/orders")
    parser.add_argument("producer", metavar="NAME", help="producer name")
    _add_broker(parser, _run_release_producer)


def _add_sources(parser: argparse.ArgumentParser) -> None:
    add_place_arguments(parser)
    add_broker_arguments(parser)
    parser.set_defaults(wrong_usage=parser.error)


def _add_broker(parser: argparse.ArgumentParser, run: Callable[[argparse.Namespace], int]) -> None:
    parser.add_argument("--json", action="store_true", help="one JSON object")
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
    by_data: Callable[[StorageConfig, str], T],
) -> T:
    """Asks a broker, or looks at a data directory: see the module header."""

    def look() -> T:
        storage = load_place(options).storage
        return by_data(storage, wal_root(storage))

    is_place_named = bool(options.data or options.config)
    if is_place_named and options.broker:
        options.wrong_usage("--broker asks a broker, --data and --config do without: choose one")
    if is_place_named or (os.environ.get(_CONFIG) and not names_broker(options)):
        return look()
    is_guess = not names_broker(options) and os.path.isdir(_DATA_DEFAULT)
    if is_guess:
        options.retry_for = min(options.retry_for, _GUESS_SECONDS)
    try:
        with connected(options) as client:
            return by_broker(client)
    except UnavailableError as error:
        if not (is_guess and error.message.startswith("no broker answers")):
            raise
    print(
        f"ister: no broker answers at {broker_address(options)}: this is {_DATA_DEFAULT}, looked "
        "at from outside",
        file=sys.stderr,
    )
    return look()


# -- list -----------------------------------------------------------------------------------


def _run_list(options: argparse.Namespace) -> int:
    return _answered(options, lambda: _list(options), {"topics": []})


def _list(options: argparse.Namespace) -> int:
    is_short = options.short or not options.json
    silent: list[IsterError] = []

    def ask(client: Client) -> list[dict[str, Any]]:
        views = client.list_topics(options.namespace)
        return views if is_short else _show_all(client, views, silent)

    def look(storage: StorageConfig, root: str) -> list[dict[str, Any]]:
        from ister.cli.topic_survey import survey_topics  # noqa: PLC0415 - only if needed
        from ister.cli.topic_view import shorten, view_of  # noqa: PLC0415

        views = [view_of(facts) for facts in survey_topics(storage, root, options.namespace)]
        return [shorten(view) for view in views] if is_short else views

    views = _from_somewhere(options, ask, look)
    if options.json:
        print_json({"topics": views})
    elif views:
        _print_list(views)
    else:
        print("no topics yet; `ister produce /default/NAME` makes one", file=sys.stderr)
    print_errors(silent)
    return 1 if silent else 0


def _show_all(
    client: Client, views: Iterable[dict[str, Any]], silent: list[IsterError]
) -> list[dict[str, Any]]:
    """All about many topics; those that are gone by now are left out.

    One whose broker does not answer stays as it was known in short: the others are well.

    Args:
        client: Who asks.
        views: Topics in short, or their names alone.
        silent: Gets why some are not told of whole.

    Raises:
        UnavailableError: Nothing is known of one whose broker does not answer.
    """

    def show(view: dict[str, Any]) -> dict[str, Any] | None:
        try:
            return client.show_topic(view["topic"])
        except NotFoundError:
            return None
        except UnavailableError as error:
            if "errors" not in view:
                raise
            silent.append(error)
            errors = [*view["errors"], error_as_json(error)]
            unknown: dict[str, Any] = {"files": [], "objects": [], "policies": {}, "schema": None}
            return {**unknown, **view, "errors": errors}

    with ThreadPoolExecutor(_CALLS, thread_name_prefix="ister-show") as pool:
        return [view for view in pool.map(show, views) if view is not None]


def _print_list(views: Sequence[Mapping[str, Any]]) -> None:
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


def _list_row(view: Mapping[str, Any]) -> tuple[object, ...]:
    marks, subscriptions = view["watermarks"], view["subscriptions"]
    lags = [one["lag"] for one in subscriptions if one["lag"] is not None]
    return (
        view["topic"],
        view["ack"] if view["is_reliable"] else "keeps nothing",
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
    return _answered(options, lambda: _describe(options), {"topic": str(options.topic)})


def _describe(options: argparse.Namespace) -> int:
    topic = str(options.topic)

    def ask(client: Client) -> tuple[dict[str, Any], bool]:
        view = client.show_topic(topic)
        if view["partitions"]:
            parts = [{"topic": name} for name in view["partitions"]]
            view = {**view, "topics": _show_all(client, parts, [])}
        return view, False

    def look(storage: StorageConfig, root: str) -> tuple[dict[str, Any], bool]:
        view = _look_at(storage, root, options)
        return view, bool(view.get("errors"))

    view, has_failed = _from_somewhere(options, ask, look)
    if options.json:
        print_json(view)
    else:
        _print_topic(view, options)
    for error in view.get("errors") or ():
        print_error(error["message"], hint=error.get("hint"))
    return 1 if has_failed else 0


def _look_at(storage: StorageConfig, root: str, options: argparse.Namespace) -> dict[str, Any]:
    from ister.cli.topic_survey import survey_topic, survey_topics  # noqa: PLC0415
    from ister.cli.topic_view import view_of  # noqa: PLC0415

    topic = str(options.topic)
    try:
        return view_of(survey_topic(storage, root, options.topic))
    except NotFoundError:
        views = map(view_of, survey_topics(storage, root, options.topic.namespace))
        parts = [view for view in views if view["parent"] == topic]
        if not parts:
            raise
    parts.sort(key=lambda view: (len(view["topic"]), view["topic"]))
    names = [view["topic"] for view in parts]
    return {"topic": topic, "parent": None, "partitions": names, "topics": parts}


def _print_topic(view: Mapping[str, Any], options: argparse.Namespace) -> None:
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


def _print_head(view: Mapping[str, Any]) -> None:
    about = [view["state"] or "state unknown"]
    if view["is_reliable"]:
        about += [f"ack {view['ack'] or '?'}", f"codec {view['codec'] or '?'}"]
    else:
        about.append("keeps no messages")
    if view["epoch"] is not None:
        about.append(f"epoch {view['epoch']}")
    head, rest = view["topic"], ", ".join(about)
    if not is_terminal(sys.stdout):
        print(f"{head}  {rest}")
        return
    from rich.text import Text  # noqa: PLC0415

    console().print(Text.assemble((head, "bold"), f"  {rest}"))


def _print_map(view: Mapping[str, Any], options: argparse.Namespace) -> None:
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


def _facts(view: Mapping[str, Any]) -> dict[str, object]:
    """What the drawing does not tell."""
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
        facts["not in the bucket yet"] = (
            f"{_count(lag['messages'], 'message')}, {format_bytes(lag['bytes'])}"
        )
    owner = view["owner"]
    facts["owner"] = "nobody has it open"
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
        said = f"is a new topic{parts}" if is_new else "already exists; unchanged"
        print_change(options, f"{topic} {said}", facts)
        return 0

    return _answered(options, create, _failed_change(options))


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
            said = f"{topic} has {len(names)} partitions; unchanged"
        else:
            said = (
                f"{topic} has {len(names)} partitions, up from {len(before)}; most routing keys go "
                "to another partition from now on"
            )
        print_change(options, said, facts)
        return 0

    return _answered(options, grow, _failed_change(options))


def _run_delete(options: argparse.Namespace) -> int:
    def delete() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            names = client.partitions(topic)
            if not names:
                raise NotFoundError(f"there is no topic {topic}", topic=topic)
            of = f" and its {len(names)} partitions" if names != [topic] else ""
            where = f"at broker {broker_address(options)}"
            question = f"Delete {topic}{of} {where} with all messages, for good?"
            if not confirm(question, is_confirmed=options.yes):
                return 1
            client.delete_topic(topic)
        print_change(options, f"{topic} is deleted", {"topic": topic, "deleted": names})
        return 0

    return _answered(options, delete, _failed_change(options))


def _run_unload(options: argparse.Namespace) -> int:
    def unload() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            client.unload_topic(topic)
        print_change(options, f"{topic} is handed over", {"topic": topic})
        return 0

    return _answered(options, unload, _failed_change(options))


def _run_policies(options: argparse.Namespace) -> int:
    def policies() -> int:
        topic = str(options.topic)
        with connected(options) as client:
            if options.set or options.reset:
                in_force = client.set_topic_policies(topic, dict(options.set or ()))
            else:
                names = client.partitions(topic)
                if not names:
                    raise NotFoundError(f"there is no topic {topic}", topic=topic)
                in_force = dict(client.describe_topic(names[0]).policies)
        is_changed = bool(options.set or options.reset)
        changed = {"broker": broker_address(options)} if is_changed else {}
        if options.json:
            print_json({"topic": topic, "policies": in_force, **changed})
        else:
            if is_changed:
                print(f"bounds of {topic} at broker {broker_address(options)}")
            print_table(
                ("bound", "value"),
                [(name, value or "none") for name, value in in_force.items()],
            )
        return 0

    return _answered(options, policies, _failed_change(options))


def _run_release_producer(options: argparse.Namespace) -> int:
    def release() -> int:
        topic, producer = str(options.topic), str(options.producer)
        with connected(options) as client:
            owner = client.release_producer(topic, producer)
        said = (
            f"{producer} belongs to nobody in {topic}; unchanged"
            if owner is None
            else f"{producer} is released in {topic}; it belonged to {owner}"
        )
        print_change(options, said, {"topic": topic, "producer": producer, "principal": owner})
        return 0

    return _answered(options, release, _failed_change(options))


def _failed_change(options: argparse.Namespace) -> dict[str, Any]:
    return {"ok": False, "topic": str(options.topic)}


def _answered(
    options: argparse.Namespace, work: Callable[[], int], otherwise: Mapping[str, Any]
) -> int:
    def failed(error: IsterError) -> dict[str, Any]:
        return {**otherwise, "errors": [error_as_json(error)]}

    return answer(work, as_json=options.json, on_error=failed)
