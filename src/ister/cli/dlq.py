"""`ister dlq`: dead letters of all subscriptions: list, show, requeue, drop.

Owns: which topics are dead-letter topics. Does not own: what a dead letter is and which are
pending, which brokers keep (`ister.client`).

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
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Self

from ister.base.clock import SystemClock
from ister.base.message_filter import NOT_JSON, MessageFilter
from ister.base.model import JsonObject
from ister.cli.command import Arg, DryRun, Group, Part, Shown, Table, Yes, command, confirmed
from ister.cli.connection import Broker, existing_partitions, parse_count, parse_name
from ister.cli.errors_out import in_shell_words
from ister.cli.location import Topic, topic_name
from ister.cli.message_options import FILTER_HELP, Filters
from ister.cli.messages_out import Received, printable
from ister.cli.output import format_span, print_error
from ister.cli.table import plain
from ister.cli.templates import TEMPLATE_HELP, parse_template
from ister.errors import InvalidRequestError, IsterError

if TYPE_CHECKING:
    from ister.client import Client
    from ister.client.descriptions import LetterFilter
    from ister.wire.views import DeadLetterCountJson, DeadLetterJson, LetterGroupJson, ResolvedJson

_RANGE: Final = re.compile(r"(\d{1,18})(?:(?:-|\.\.)(\d{1,18}))?")
_SHOWN_DEFAULT: Final = 20
_FAILURES_SHOWN: Final = 5
_PAGE: Final = 100
_OFFSET_MAX: Final = 1 << 62
_FIELDS: Final = ("reason", "source", "source_offset", "subscription", "attempts")
_FIELDS_HELP: Final = """\
  Dead letters also have {reason}, {source} (the topic), {source_offset}, {subscription} and
  {attempts}. Long payloads are cut."""


DLQ = Group(
    "dlq",
    "list, show, requeue and drop dead letters",
    description="Dead letters: messages that failed too often and were published to the "
    "dead-letter topic of their subscription (`ister subscriptions policy --poison dead_letter`). "
    "A dead letter is pending until it is requeued or dropped.",
    examples=(
        "ister dlq list",
        "ister dlq show /default/orders-dead --limit 5",
        "ister dlq requeue /default/orders-dead --reason timeout --dry-run",
    ),
)
register = DLQ.register


class Selection:
    """Which dead letters a command works on."""

    LIMIT_HELP: ClassVar = "at most this many, the oldest first"

    def __init__(self, options: argparse.Namespace) -> None:
        self.offsets: tuple[tuple[int, int], ...] = tuple(options.offset)
        self.limit: int | None = options.limit
        self._reason: str = options.reason
        self._source: str = options.source or ""
        self._subscription: str = options.subscription

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds the options."""
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
            "--source", metavar="TOPIC", type=topic_name, help="topic in which the message failed"
        )
        group.add_argument(
            "--subscription",
            metavar="NAME",
            type=parse_name,
            default="",
            help="subscription in which the message failed",
        )
        group.add_argument("-n", "--limit", metavar="N", type=parse_count, help=cls.LIMIT_HELP)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """Those that were given."""
        return cls(options)

    def filter(self, *, end: int = 0) -> LetterFilter:
        """The letters for the broker: only those before `end`, unless it is 0."""
        from ister.client.descriptions import LetterFilter  # noqa: PLC0415 - takes a while

        return LetterFilter(
            offsets=self.offsets,
            reason=self._reason,
            source_topic=self._source,
            source_subscription=self._subscription,
            end=end,
        )


class ShownSelection(Selection):
    """Which dead letters are shown."""

    LIMIT_HELP: ClassVar = f"at most this many (default: {_SHOWN_DEFAULT})"


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


# -- list -----------------------------------------------------------------------------------


@command(DLQ, "list", "ls", failed={"ok": False})
def list_letters(
    broker: Broker,
    *,
    topic: Annotated[str | None, Arg("only this dead-letter topic", "TOPIC", topic_name)] = None,
) -> Shown:
    """List dead-letter topics with their pending messages.

    Lists the dead-letter topics of all subscriptions, with the number of pending messages by source
    topic and subscription, the age of the oldest message since it was first published, and the most
    frequent reasons.

    Examples:
        ister dlq list
        ister dlq list --topic /default/orders-dead --json
    """
    counts: list[DeadLetterCountJson] = []
    unread: list[JsonObject] = []
    with broker.connect() as client:
        sources = _sources(client)
        for name in sorted(sources) if topic is None else [topic]:
            for part in client.admin.partitions(name):
                try:
                    counts.append(client.admin.count_dead_letters(part))
                except IsterError as error:
                    if topic is not None:
                        raise
                    unread.append({"topic": part, "error": error.message})
    topics = [{**one, "subscriptions": sources.get(one["topic"], [])} for one in counts]
    empty = "no pending dead letters"
    if not sources and topic is None:
        empty = (
            "no subscription has a dead-letter topic; set one with `ister subscriptions policy "
            "--poison dead_letter --dead-letter-topic TOPIC`"
        )
    table = _table("pending", counts, empty)

    def show() -> None:
        for one in unread:
            print_error(f"{one['topic']}: {one['error']}")
        if table.rows or not unread:
            table.show()

    return Shown({"topics": topics, "errors": unread}, show, not unread)


def _sources(client: Client) -> dict[str, list[JsonObject]]:
    """The dead-letter topics of all subscriptions, each with the subscriptions that use it."""
    found: dict[str, list[JsonObject]] = {}
    for topic in client.admin.list_topics():
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


def _table(number: str, counts: Sequence[DeadLetterCountJson], empty: str = "") -> Table:
    titles = ("dead-letter topic", "source", "subscription", number, "oldest", "reasons")
    return Table(titles, [row for one in counts for row in _rows(one)], empty=empty)


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


@command(
    DLQ, "show", failed={"ok": False}, notes=f"{TEMPLATE_HELP}\n{_FIELDS_HELP}\n\n{FILTER_HELP}"
)
def show_letters(
    broker: Broker,
    topic: Topic,
    selection: ShownSelection,
    filters: Filters,
    *,
    format: Annotated[
        str | None,
        Arg(
            "print a line for each message, such as '{offset} {reason}: {payload}'",
            "TEMPLATE",
            _parse_format,
        ),
    ] = None,
) -> Shown:
    """Show pending dead letters.

    Shows pending dead letters: why they failed, where they come from, and the original message.

    Examples:
        ister dlq show /default/orders-dead
        ister dlq show /default/orders-dead --offset 4-9 --json
        ister dlq show /default/orders-dead --format '{offset} {reason}: {payload}'
    """
    which, limit = selection.filter(), selection.limit or _SHOWN_DEFAULT
    shown: list[tuple[str, DeadLetterJson]] = []
    with broker.connect() as client:
        # Partitions have offsets of their own.
        for part in existing_partitions(client, topic):
            found = _matching(client, part, which, filters.filter, limit - len(shown))
            shown += [(part, one) for one in found]

    def show() -> None:
        if not shown:
            print("no pending dead letters match", file=sys.stderr if format else sys.stdout)
        elif format is not None:
            render = parse_template(
                format, printable if sys.stdout.isatty() else bytes, more=_FIELDS
            )
            for part, one in shown:
                sys.stdout.buffer.write(render(_received(part, one)) + b"\n")
        else:
            print("\n\n".join(_letter_text(part, one) for part, one in shown))

    letters = [{"topic": part, **one} for part, one in shown]
    return Shown({"topic": topic, "messages": letters}, show)


def _matching(
    client: Client, topic: str, which: LetterFilter, wanted: MessageFilter, limit: int
) -> Iterator[DeadLetterJson]:
    """Pending dead letters that match, at most `limit`. The broker knows nothing of `wanted`."""
    start, page = 0, max(limit, _PAGE) if wanted else limit
    while limit > 0:
        ranges = which.offsets or ((0, _OFFSET_MAX),)
        left = tuple((max(first, start), end) for first, end in ranges if end > start)
        found = left and client.admin.show_dead_letters(
            topic, replace(which, offsets=left), limit=page
        )
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


@command(DLQ, "requeue", failed={"ok": False})
def requeue(
    broker: Broker,
    topic: Topic,
    selection: Selection,
    *,
    to: Annotated[str | None, Arg("publish to this topic instead", "TOPIC", topic_name)] = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> Shown:
    """Publish dead letters to the topic they failed in.

    Publishes dead letters to the topic they failed in, with their original payload, key and
    attributes. They are then no longer pending, so a second run does not publish them again.
    Delivery is at least once: if a broker crashes in between, the last 100 may be published twice.
    All subscriptions of that topic get the message again, not only the one in which it failed.

    Examples:
        ister dlq requeue /default/orders-dead --dry-run
        ister dlq requeue /default/orders-dead --offset 4 --offset 7-9 --yes
        ister dlq requeue /default/orders-dead --to /default/orders-2
    """
    work = _Resolution(
        broker, topic, selection, "requeue", f"to {to}" if to else "to the topics they failed in"
    )
    return work.run(
        lambda client, part, which: client.admin.requeue_dead_letters(part, which, to=to or ""),
        dry_run=dry_run,
        yes=yes,
    )


@command(DLQ, "drop", failed={"ok": False})
def drop(
    broker: Broker, topic: Topic, selection: Selection, *, dry_run: DryRun = False, yes: Yes = False
) -> Shown:
    """Drop dead letters without publishing them.

    Marks dead letters as resolved without publishing them. The dead-letter topic keeps the messages
    until its retention removes them.

    Examples:
        ister dlq drop /default/orders-dead --reason 'unknown customer'
    """
    work = _Resolution(broker, topic, selection, "drop", "without publishing them")
    return work.run(
        lambda client, part, which: client.admin.drop_dead_letters(part, which),
        dry_run=dry_run,
        yes=yes,
    )


_DONE: Final = {"requeue": "requeued", "drop": "dropped"}


class _Resolution:
    """Requeues or drops the letters that were counted and confirmed."""

    def __init__(
        self, broker: Broker, topic: str, selection: Selection, verb: str, how: str
    ) -> None:
        self._broker = broker
        self._topic = topic
        self._selection = selection
        self._verb = verb
        self._how = how

    def run(
        self, call: Callable[[Client, str, LetterFilter], ResolvedJson], *, dry_run: bool, yes: bool
    ) -> Shown:
        topic, selection, done_verb = self._topic, self._selection, _DONE[self._verb]
        with self._broker.connect() as client:
            counts = self._counted(client)
            total = sum(one["selected"] for one in counts)
            facts: JsonObject = {"topic": topic, "selected": total, "done": 0, "failed": []}
            if dry_run or not total:
                groups = [{"topic": one["topic"], **gr} for one in counts for gr in one["groups"]]
                text: list[Part] = ["no pending dead letters match"]
                if total:
                    what = f"{_letters(total)} would be {done_verb} {self._how}"
                    text = [_table("selected", counts), f"{what}; nothing was changed"]
                return Shown({"ok": True, **facts, "dry_run": dry_run, "groups": groups}, text)
            question = f"{self._verb.capitalize()} {_letters(total)} of {topic} {self._how}"
            confirmed(f"{question}, at broker {self._broker.address}?", yes=yes)
            done, failed = 0, list[JsonObject]()
            for one in counts:
                if one["selected"]:
                    found = call(client, one["topic"], selection.filter(end=one["end"]))
                    done += found["done"]
                    failed += [{"topic": one["topic"], **failure} for failure in found["failed"]]
        facts |= {"done": done, "failed": failed}
        changed = self._broker.changed(
            f"{_letters(done)} of {topic} {done_verb}", ok=not failed, **facts
        )
        more = []
        if any(one["is_partial"] for one in counts) and selection.limit is None:
            more = ["There may be more: run the command again."]
        parts: list[Part] = [str(changed.parts), lambda: _print_failures(failed), *more]
        return Shown(changed.json, parts, changed.ok)

    def _counted(self, client: Client) -> Sequence[DeadLetterCountJson]:
        which, room = self._selection.filter(), self._selection.limit
        parts = existing_partitions(client, self._topic)
        if self._selection.offsets and len(parts) > 1:
            raise InvalidRequestError(
                "each partition has offsets of its own",
                hint=f"name one of them, such as {parts[0]}",
            )
        counts: list[DeadLetterCountJson] = []
        for part in parts:
            if room is None:
                counts.append(client.admin.count_dead_letters(part, which))
            elif room:
                counts.append(client.admin.count_dead_letters(part, which, limit=room))
                room -= counts[-1]["selected"]
        return counts


def _print_failures(failed: Sequence[JsonObject]) -> None:
    for one in failed[:_FAILURES_SHOWN]:
        hint = in_shell_words(str(one.get("hint") or ""))
        where = f"{one['topic']} offset {one['offset']} stays pending"
        print_error(f"{where}: {one['error']}", hint=hint or None)
    if len(failed) > _FAILURES_SHOWN:
        print_error(f"{len(failed) - _FAILURES_SHOWN} more stay pending")
