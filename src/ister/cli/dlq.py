"""`ister dlq`: dead letters of all subscriptions: list, show, requeue, drop.

Owns: arguments, output, which topics are dead-letter topics, confirmation. Does not own: what a
dead letter is and which are pending, which brokers keep (`ister.client`).

What is confirmed is what is done: letters are counted first, and only those up to the last one that
was counted are requeued or dropped. A call that is repeated after its answer was lost handles no
others.
"""

from __future__ import annotations

import argparse
import base64
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ister.base.clock import SystemClock
from ister.base.message_filter import NOT_JSON, MessageFilter
from ister.base.model import JsonObject
from ister.cli.connection import (
    add_broker_arguments,
    broker_address,
    connected,
    parse_count,
    parse_name,
    print_change,
)
from ister.cli.errors_out import answer, in_shell_words, print_json
from ister.cli.location import add_topic_argument, parse_topic
from ister.cli.message_options import FILTER_HELP, add_filter_arguments, make_filter
from ister.cli.messages_out import Received, printable
from ister.cli.output import (
    Subparsers,
    add_command,
    confirm,
    format_span,
    print_error,
    print_table,
)
from ister.cli.table import plain
from ister.cli.templates import TEMPLATE_HELP, parse_template
from ister.errors import InvalidRequestError, IsterError, NotFoundError

if TYPE_CHECKING:
    from ister.client import Client
    from ister.client.dead_letters import LetterFilter
    from ister.wire.views import (
        DeadLetterCountJson,
        DeadLetterJson,
        LetterGroupJson,
        ResolvedJson,
    )

_RANGE: Final = re.compile(r"(\d{1,18})(?:(?:-|\.\.)(\d{1,18}))?")
_SHOWN_DEFAULT: Final = 20
_FAILURES_SHOWN: Final = 5
_PAGE: Final = 100
_OFFSET_MAX: Final = 1 << 62
_FIELDS: Final = ("reason", "source", "source_offset", "subscription", "attempts")
_FIELDS_HELP: Final = """\
  Dead letters also have {reason}, {source} (the topic), {source_offset}, {subscription} and
  {attempts}. Long payloads are cut."""


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "dlq",
        help="list, show, requeue and drop dead letters",
        description="Dead letters: messages that failed too often and were published to the "
        "dead-letter topic of their subscription (`ister subscriptions policy --poison "
        "dead_letter`). A dead letter is pending until it is requeued or dropped.",
        examples=(
            "ister dlq list",
            "ister dlq show /default/orders-dead --limit 5",
            "ister dlq requeue /default/orders-dead --reason timeout --dry-run",
        ),
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    listed = _register(
        actions,
        "list",
        _list,
        help="list dead-letter topics with their pending messages",
        description="Lists the dead-letter topics of all subscriptions, with the number of "
        "pending messages by source topic and subscription, the age of the oldest message since "
        "it was first published, and the most frequent reasons.",
        examples=("dlq list", "dlq list --topic /default/orders-dead --json"),
    )
    listed.add_argument(
        "--topic", metavar="TOPIC", type=parse_topic, help="only this dead-letter topic"
    )

    shown = _register(
        actions,
        "show",
        _show,
        help="show pending dead letters",
        description="Shows pending dead letters: why they failed, where they come from, and the "
        "original message.",
        examples=(
            "dlq show /default/orders-dead",
            "dlq show /default/orders-dead --offset 4-9 --json",
            "dlq show /default/orders-dead --format '{offset} {reason}: {payload}'",
        ),
        notes=f"{TEMPLATE_HELP}\n{_FIELDS_HELP}\n\n{FILTER_HELP}",
    )
    add_filter_arguments(shown)
    shown.add_argument(
        "--format",
        metavar="TEMPLATE",
        type=_parse_format,
        help="print a line for each message, such as '{offset} {reason}: {payload}'",
    )
    _add_selection(shown, f"at most this many (default: {_SHOWN_DEFAULT})")

    requeued = _register(
        actions,
        "requeue",
        _requeue,
        help="publish dead letters to the topic they failed in",
        description="Publishes dead letters to the topic they failed in, with their original "
        "payload, key and attributes. They are then no longer pending, so a second run does not "
        "publish them again. Delivery is at least once: if a broker crashes in between, the last "
        "100 may be published twice. All subscriptions of that topic get the message again, not "
        "only the one in which it failed.",
        examples=(
            "dlq requeue /default/orders-dead --dry-run",
            "dlq requeue /default/orders-dead --offset 4 --offset 7-9 --yes",
            "dlq requeue /default/orders-dead --to /default/orders-2",
        ),
    )
    _add_selection(requeued, "at most this many, the oldest first")
    requeued.add_argument(
        "--to", metavar="TOPIC", type=parse_topic, help="publish to this topic instead"
    )

    dropped = _register(
        actions,
        "drop",
        _drop,
        help="drop dead letters without publishing them",
        description="Marks dead letters as resolved without publishing them. The dead-letter topic "
        "keeps the messages until its retention removes them.",
        examples=("dlq drop /default/orders-dead --reason 'unknown customer'",),
    )
    _add_selection(dropped, "at most this many, the oldest first")
    for action in (requeued, dropped):
        action.add_argument(
            "--dry-run", action="store_true", help="show what would be done; change nothing"
        )
        action.add_argument("--yes", action="store_true", help="skip the confirmation")


def _register(
    actions: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    *,
    help: str,
    description: str,
    examples: tuple[str, ...],
    notes: str | None = None,
) -> argparse.ArgumentParser:
    lines = tuple(f"ister {one}" for one in examples)
    parser = add_command(
        actions, name, help=help, description=description, examples=lines, notes=notes
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(parser)
    parser.set_defaults(run=lambda options: answer(options, lambda: run(options), {"ok": False}))
    return parser


def _add_selection(parser: argparse.ArgumentParser, limit: str) -> None:
    add_topic_argument(parser)
    group = parser.add_argument_group("selection", "All of them have to match.")
    group.add_argument(
        "--offset",
        metavar="N[-M]",
        type=_parse_range,
        action="append",
        default=[],
        help="offset in the dead-letter topic, or an inclusive range; repeatable",
    )
    group.add_argument(
        "--reason", metavar="TEXT", default="", help="text in the reason (case-insensitive)"
    )
    group.add_argument(
        "--source", metavar="TOPIC", type=parse_topic, help="topic in which the message failed"
    )
    group.add_argument(
        "--subscription",
        metavar="NAME",
        type=parse_name,
        default="",
        help="subscription in which the message failed",
    )
    group.add_argument("--limit", metavar="N", type=parse_count, help=limit)


def _parse_format(text: str) -> str:
    try:
        parse_template(text, bytes, more=_FIELDS)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return text


def _parse_range(text: str) -> tuple[int, int]:
    """Offsets as a half-open range, for argparse."""
    match = _RANGE.fullmatch(text)
    first = int(match[1]) if match else 0
    last = int(match[2]) if match and match[2] else first
    if match is None or last < first:
        raise argparse.ArgumentTypeError(
            f"invalid offsets {text!r}: use an offset such as 12, or a range such as 12-40"
        )
    return first, last + 1


def _filter(options: argparse.Namespace, *, end: int = 0) -> LetterFilter:
    from ister.client.dead_letters import LetterFilter  # noqa: PLC0415 - takes a while

    return LetterFilter(
        offsets=tuple(options.offset),
        reason=options.reason,
        source_topic=str(options.source) if options.source is not None else "",
        source_subscription=options.subscription,
        end=end,
    )


def _parts(client: Client, topic: str) -> list[str]:
    """The topics behind a name: partitions have offsets of their own."""
    parts = client.partitions(topic)
    if not parts:
        raise NotFoundError(f"topic {topic} does not exist", topic=topic)
    return parts


# -- list -----------------------------------------------------------------------------------


def _list(options: argparse.Namespace) -> int:
    counts: list[DeadLetterCountJson] = []
    unread: list[JsonObject] = []
    with connected(options) as client:
        sources = _sources(client)
        named = sources if options.topic is None else {str(options.topic): []}
        for topic in sorted(named):
            for part in client.partitions(topic):
                try:
                    counts.append(client.count_dead_letters(part))
                except IsterError as error:
                    if options.topic is not None:
                        raise
                    unread.append({"topic": part, "error": error.message})
    if options.json:
        topics = [{**one, "subscriptions": sources.get(one["topic"], [])} for one in counts]
        print_json({"topics": topics, "errors": unread})
        return 1 if unread else 0
    for one in unread:
        print_error(f"{one['topic']}: {one['error']}")
    rows = [row for one in counts for row in _rows(one)]
    if rows:
        titles = ("dead-letter topic", "source", "subscription", "pending", "oldest", "reasons")
        print_table(titles, rows)
    elif not sources and options.topic is None:
        print(
            "no subscription has a dead-letter topic; set one with `ister subscriptions policy "
            "--poison dead_letter --dead-letter-topic TOPIC`"
        )
    elif not unread:
        print("no pending dead letters")
    return 1 if unread else 0


def _sources(client: Client) -> dict[str, list[JsonObject]]:
    """The dead-letter topics of all subscriptions, each with the subscriptions that use it."""
    found: dict[str, list[JsonObject]] = {}
    for topic in client.list_topics():
        for subscription in topic.get("subscriptions") or ():
            policy = subscription.get("failure_policy") or {}
            target = policy.get("dead_letter_topic")
            if isinstance(target, str):
                source: JsonObject = {"topic": topic["topic"], "subscription": subscription["name"]}
                found.setdefault(target, []).append(source)
    return found


def _rows(count: DeadLetterCountJson) -> list[tuple[object, ...]]:
    now_ms = SystemClock().now_ns() // 1_000_000
    more = "+" if count["is_partial"] else ""
    return [
        (
            count["topic"],
            group["source_topic"],
            group["source_subscription"],
            f"{group['count']}{more}" if more else group["count"],
            _age(group["oldest"], now_ms),
            _reasons(group),
        )
        for group in count["groups"]
    ]


def _age(at_ms: int | None, now_ms: int) -> str | None:
    return None if at_ms is None else format_span(max(0, now_ms - at_ms) / 1000)


def _reasons(group: LetterGroupJson) -> str:
    reasons = ", ".join(
        f"{reason or 'none given'} ({count})" if len(group["reasons"]) > 1 else reason or ""
        for reason, count in group["reasons"].items()
    )
    unverified = group.get("unverified", 0)
    return f"{reasons}; {unverified} unverified" if unverified else reasons


# -- show -----------------------------------------------------------------------------------


def _show(options: argparse.Namespace) -> int:
    which, limit = _filter(options), options.limit or _SHOWN_DEFAULT
    shown: list[tuple[str, DeadLetterJson]] = []
    with connected(options) as client:
        for part in _parts(client, str(options.topic)):
            found = _matching(client, part, which, make_filter(options), limit - len(shown))
            shown += [(part, one) for one in found]
    if options.json:
        letters = [{"topic": part, **one} for part, one in shown]
        print_json({"topic": str(options.topic), "messages": letters})
    elif not shown:
        print("no pending dead letters match", file=sys.stderr if options.format else sys.stdout)
    elif options.format is not None:
        render = parse_template(
            options.format, printable if sys.stdout.isatty() else bytes, more=_FIELDS
        )
        for part, one in shown:
            sys.stdout.buffer.write(render(_received(part, one)) + b"\n")
    else:
        print("\n\n".join(_letter_text(part, one) for part, one in shown))
    return 0


def _matching(
    client: Client, topic: str, which: LetterFilter, wanted: MessageFilter, limit: int
) -> Iterator[DeadLetterJson]:
    """Pending dead letters that match, at most `limit`. The broker knows nothing of `wanted`."""
    start, page = 0, max(limit, _PAGE) if wanted else limit
    while limit > 0:
        ranges = which.offsets or ((0, _OFFSET_MAX),)
        left = tuple((max(first, start), end) for first, end in ranges if end > start)
        found = left and client.show_dead_letters(topic, replace(which, offsets=left), limit=page)
        for one in found or ():
            if _is_match(wanted, one) and limit > 0:
                limit -= 1
                yield one
        if not found or len(found) < page:
            return
        start = found[-1]["offset"] + 1


def _is_match(wanted: MessageFilter, letter: DeadLetterJson) -> bool:
    decoded = letter.get("decoded")
    return wanted.matches(
        key=letter["routing_key"],
        attributes=letter["attributes"],
        payload=base64.b64decode(letter["payload_base64"]),
        decoded=NOT_JSON if decoded is None else decoded,
    )


def _received(topic: str, letter: DeadLetterJson) -> Received:
    story = letter["dead_letter"]
    return Received(
        topic,
        letter["offset"],
        letter["publish_time"] or 0,
        letter["producer_name"] or "",
        base64.b64decode(letter["payload_base64"]),
        letter["attributes"],
        letter["routing_key"],
        more={}
        if story is None
        else {
            "reason": story["reason"],
            "source": story["topic"],
            "source_offset": story["offset"],
            "subscription": story["subscription"],
            "attempts": story["attempt"],
            "is_verified": story.get("is_verified", True),
        },
    )


def _letter_text(topic: str, letter: DeadLetterJson) -> str:
    story = letter["dead_letter"]
    lines = [f"{topic} offset {letter['offset']}"]
    if story is None:
        lines.append("  not a dead letter: it has no x-original-topic")
    else:
        at = "" if story["offset"] is None else f" offset {story['offset']}"
        whose = f"subscription {plain(story['subscription'])}"
        doubt = "" if story.get("is_verified", True) else " (unverified: no broker has written it)"
        lines.append(f"  from       {plain(story['topic'])}{at}, {whose}{doubt}")
        attempts = "" if story["attempt"] is None else f" (attempt {story['attempt']})"
        lines.append(f"  reason     {plain(story['reason']) or 'none given'}{attempts}")
    now_ms = SystemClock().now_ns() // 1_000_000
    age = _age(letter["publish_time"], now_ms)
    lines.append(f"  published  {age or '?'} ago by {plain(letter['producer_name'] or '-')}")
    if letter["routing_key"] is not None:
        lines.append(f"  key        {plain(letter['routing_key'])}")
    for name, value in sorted(letter["attributes"].items()):
        lines.append(f"  attribute  {plain(name)}={plain(value)}")
    if story is not None and story["dropped_attributes"]:
        lines.append(f"  lost       {story['dropped_attributes']} attributes, which did not fit")
    text = letter["text"]
    payload = f"{letter['size']} bytes, not text" if text is None else plain(text)
    lines.append(f"  payload    {payload}{' …' if letter['is_cut'] else ''}")
    return "\n".join(lines)


def _letters(count: int) -> str:
    return f"{count} dead letter{'' if count == 1 else 's'}"


# -- requeue, drop --------------------------------------------------------------------------


def _requeue(options: argparse.Namespace) -> int:
    to = "" if options.to is None else str(options.to)
    return _resolve(
        options,
        ("requeue", "requeued"),
        f"to {to}" if to else "to the topics they failed in",
        lambda client, part, which: client.requeue_dead_letters(part, which, to=to),
    )


def _drop(options: argparse.Namespace) -> int:
    return _resolve(
        options,
        ("drop", "dropped"),
        "without publishing them",
        lambda client, part, which: client.drop_dead_letters(part, which),
    )


def _resolve(
    options: argparse.Namespace,
    verbs: tuple[str, str],
    how: str,
    call: Callable[[Client, str, LetterFilter], ResolvedJson],
) -> int:
    topic, (verb, done_verb) = str(options.topic), verbs
    with connected(options) as client:
        counts = _counted(client, options, topic)
        total = sum(one["selected"] for one in counts)
        facts: JsonObject = {"topic": topic, "selected": total, "done": 0, "failed": []}
        if options.dry_run or not total:
            return _print_plan(options, counts, facts, f"would be {done_verb} {how}")
        question = f"{verb.capitalize()} {_letters(total)} of {topic} {how}, at broker "
        if not confirm(f"{question}{broker_address(options)}?", is_confirmed=options.yes):
            return 1
        done, failed = 0, list[JsonObject]()
        for one in counts:
            if one["selected"]:
                found = call(client, one["topic"], _filter(options, end=one["end"]))
                done += found["done"]
                failed += [{"topic": one["topic"], **failure} for failure in found["failed"]]
    text = f"{_letters(done)} of {topic} {done_verb}"
    print_change(options, text, {**facts, "ok": not failed, "done": done, "failed": failed})
    _print_failures(options, failed)
    if any(one["is_partial"] for one in counts) and options.limit is None and not options.json:
        print("There may be more: run the command again.")
    return 1 if failed else 0


def _counted(
    client: Client, options: argparse.Namespace, topic: str
) -> Sequence[DeadLetterCountJson]:
    which, room = _filter(options), options.limit
    parts = _parts(client, topic)
    if options.offset and len(parts) > 1:
        raise InvalidRequestError(
            "each partition has offsets of its own", hint=f"name one of them, such as {parts[0]}"
        )
    counts: list[DeadLetterCountJson] = []
    for part in parts:
        if room is None:
            counts.append(client.count_dead_letters(part, which))
        elif room:
            counts.append(client.count_dead_letters(part, which, limit=room))
            room -= counts[-1]["selected"]
    return counts


def _print_plan(
    options: argparse.Namespace,
    counts: Sequence[DeadLetterCountJson],
    facts: JsonObject,
    what: str,
) -> int:
    total = sum(one["selected"] for one in counts)
    if options.json:
        groups = [{"topic": one["topic"], **group} for one in counts for group in one["groups"]]
        print_json({"ok": True, **facts, "dry_run": options.dry_run, "groups": groups})
    elif not total:
        print("no pending dead letters match")
    else:
        rows = [row for one in counts for row in _rows(one)]
        titles = ("dead-letter topic", "source", "subscription", "selected", "oldest", "reasons")
        print_table(titles, rows)
        print(f"{_letters(total)} {what}; nothing was changed")
    return 0


def _print_failures(options: argparse.Namespace, failed: Sequence[JsonObject]) -> None:
    if options.json:
        return
    for one in failed[:_FAILURES_SHOWN]:
        hint = in_shell_words(str(one.get("hint") or ""))
        where = f"{one['topic']} offset {one['offset']} stays pending"
        print_error(f"{where}: {one['error']}", hint=hint or None)
    if len(failed) > _FAILURES_SHOWN:
        print_error(f"{len(failed) - _FAILURES_SHOWN} more stay pending")
