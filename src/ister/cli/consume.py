"""`ister consume TOPIC`: messages to standard output, with or without a subscription.

Owns: arguments, when a message is acknowledged, exit codes. Does not own: lines (`messages_out`),
filters and formats (`message_options`), reading without a subscription (`topic_reading`), the
subscription (`ister.client`).

    --subscription   a cursor at the broker: messages whose lines were read are acknowledged,
                     and the next `consume` continues behind them
    without          no position is kept

Invariant: a message is acknowledged after its line has been written; where the output is a pipe (on
Linux), after its line has been read. What a crash leaves is delivered again.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from ister.base.clock import SystemClock
from ister.base.model import AckLevel, Start
from ister.cli.connection import (
    START_HELP,
    add_broker_arguments,
    connected,
    parse_count,
    parse_name,
    parse_seconds,
    parse_start,
)
from ister.cli.interrupts import Interrupts
from ister.cli.location import add_topic_argument
from ister.cli.message_options import (
    FILTER_HELP,
    add_filter_arguments,
    add_format_arguments,
    make_filter,
    make_formatter,
    matching,
)
from ister.cli.messages_out import LineOutput, Received, StoppedError
from ister.cli.output import Subparsers, add_command, print_error
from ister.cli.templates import TEMPLATE_HELP
from ister.config import StorageMode
from ister.errors import InvalidRequestError, NotFoundError, WaitTimeoutError

if TYPE_CHECKING:
    from ister.client import Client, Consumer, ReceivedMessage

_RETRY_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 0.25
_CLOSE_SECONDS: Final = 5.0
_BATCH_MESSAGES: Final = 1000
_BATCH_BYTES: Final = 1 << 20
# A subscription may be shared: what others were given does not come here.
_QUIET_SECONDS: Final = 2.0
_KINDS: Final = ("exclusive", "shared", "failover", "key_shared")

_DESCRIPTION: Final = """\
Prints the messages of a topic, one per line, and waits for new ones.

With --subscription, the broker remembers the position, and the next consumer of the subscription
continues there. A message is acknowledged after its line was written; if the output is a pipe,
after the program behind it has read the line: `ister consume T --subscription S | head -5` takes
five messages and leaves the rest. Without --subscription, no position is kept.

With filters, only matching messages are printed and counted. With a subscription, the others are
acknowledged."""


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "consume",
        help="print the messages of a topic, with or without a subscription",
        description=_DESCRIPTION,
        examples=(
            "ister consume /default/orders",
            "ister consume /default/orders --from 15m --format full",
            r"ister consume /default/orders --format '{offset}\t{key}\t{payload.user.id}'",
            "ister consume /default/orders --key 'eu-*' --where 'user.id == 7' --no-follow",
            "ister consume /default/orders --subscription billing | ./bill",
            "ister consume /default/orders --subscription peek --limit 10 --json",
            "ister consume /default/a --no-follow --json | ister produce /default/b --json-lines",
        ),
        notes=f"{TEMPLATE_HELP}\n\n{FILTER_HELP}",
    )
    add_topic_argument(parser)
    place = parser.add_argument_group("what to read")
    place.add_argument(
        "--from",
        dest="start",
        metavar="WHERE",
        type=parse_start,
        help=f"{START_HELP} (default: earliest); an existing subscription continues at its "
        "position",
    )
    place.add_argument(
        "--limit", metavar="N", type=parse_count, help="stop after this many messages"
    )
    place.add_argument(
        "--timeout",
        metavar="SECONDS",
        type=parse_seconds,
        help="stop after this long without a message",
    )
    place.add_argument(
        "--follow",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="keep waiting for new messages (default), or stop at the current end",
    )
    cursor = parser.add_argument_group("subscription")
    cursor.add_argument(
        "--subscription",
        metavar="NAME",
        type=parse_name,
        help="subscription name; created if it does not exist",
    )
    cursor.add_argument(
        "--kind",
        choices=_KINDS,
        default="exclusive",
        help="kind of a new subscription: how messages are divided among its consumers "
        "(default: exclusive)",
    )
    # Its name in earlier releases.
    cursor.add_argument("--type", dest="kind", choices=_KINDS, help=argparse.SUPPRESS)
    cursor.add_argument("--name", metavar="NAME", type=parse_name, help="consumer name")
    cursor.add_argument(
        "--no-ack",
        action="store_true",
        help="do not acknowledge: messages are redelivered later, and at most as many arrive "
        "as a consumer may have unacknowledged",
    )
    add_filter_arguments(parser)
    add_format_arguments(parser)
    add_broker_arguments(parser, retry_for=_RETRY_SECONDS)
    parser.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    if sys.stdout is None:
        raise InvalidRequestError("standard output is closed")
    fd = sys.stdout.fileno()
    is_careful = options.subscription is not None and not options.no_ack
    with Interrupts() as interrupts:
        work = _Consumption(
            options,
            interrupts,
            LineOutput(fd, interrupts, is_careful=is_careful),
            make_formatter(options, is_terminal=sys.stdout.isatty()),
        )
        try:
            if options.subscription is None:
                work.read()
            else:
                work.consume()
        except BrokenPipeError:
            # The reader is gone. Python would flush once more at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
            return 0
        except StoppedError:
            pass
    # A signal is the normal end without a limit; with a limit it is an interruption.
    is_early = options.limit is not None and work.count < options.limit
    if interrupts.is_set and is_early:
        print_error(f"interrupted after {work.count:,} of {options.limit:,} messages")
        return 1
    return 0


class _Consumption:
    """One run of the command."""

    def __init__(
        self,
        options: argparse.Namespace,
        interrupts: Interrupts,
        output: LineOutput,
        as_line: Callable[[Received], bytes],
    ) -> None:
        self.count = 0
        self._options = options
        self._topic = str(options.topic)
        self._interrupts = interrupts
        self._output = output
        self._as_line = as_line
        self._filter = make_filter(options)
        self._clock = SystemClock()

    # -- without a subscription -------------------------------------------------------------

    def read(self) -> None:
        """Prints messages, and leaves nothing behind."""
        from ister.cli.topic_reading import read_topic  # noqa: PLC0415 - needs an extra

        options = self._options
        for one in ("no_ack", "name"):
            if getattr(options, one):
                flag = one.replace("_", "-")
                raise InvalidRequestError(
                    f"--{flag} without a subscription", hint="--subscription NAME"
                )
        with connected(options) as client:
            self._check_readable(client)
        batches = read_topic(
            options,
            self._interrupts,
            start="earliest" if options.start is None else options.start,
            is_following=options.follow,
            timeout=options.timeout,
            on_idle=self._output.check_reader,
        )
        for batch in batches:
            some = matching(self._filter, batch)
            if not some:
                self._output.check_reader()
            if options.limit is not None:
                some = some[: options.limit - self.count]
            for first in range(0, len(some), _BATCH_MESSAGES):
                lines = map(self._as_line, some[first : first + _BATCH_MESSAGES])
                self._output.write(b"".join(lines))
            self.count += len(some)
            if self.count == options.limit:
                return

    def _check_readable(self, client: Client) -> None:
        names = client.partitions(self._topic)
        if not names:
            raise NotFoundError(f"topic {self._topic} does not exist", topic=self._topic)
        described = client.describe_topic(names[0])
        if not described.is_reliable:
            raise InvalidRequestError(
                f"{self._topic} stores no messages",
                hint="use --subscription NAME to receive new messages",
            )
        if described.ack == AckLevel.MEMORY:
            # Only what is in files is read this way, and a log in memory has none.
            mode = client.show_topic(names[0]).get("mode")
            if mode == StorageMode.MEMORY.value:
                raise InvalidRequestError(
                    f"{self._topic} is in memory only and can be read only with a subscription",
                    hint="use --subscription NAME",
                )

    # -- with one ---------------------------------------------------------------------------

    def consume(self) -> None:
        """Prints messages, and acknowledges them."""
        with connected(self._options) as client:
            names = client.partitions(self._topic)
            if not names:
                raise NotFoundError(f"topic {self._topic} does not exist", topic=self._topic)
            start = self._start(client, names)
            with self._interrupts.breaking():  # nothing has come yet
                consumer = client.consumer(
                    self._topic,
                    self._options.subscription,
                    name=self._options.name,
                    kind=self._options.kind,
                    start=start,
                    timeout=self._options.retry_for or None,
                )
            try:
                goals = None if self._options.follow else self._goals(client, names)
                self._print_all(consumer, goals)
            finally:
                with suppress(WaitTimeoutError):
                    consumer.close(_CLOSE_SECONDS)

    def _start(self, client: Client, names: list[str]) -> Start:
        """Where the subscription begins if it is new."""
        options = self._options
        start: Start = "earliest" if options.start is None else options.start
        subscription: str = options.subscription
        if subscription in client.subscriptions(self._topic):
            if options.start is not None:
                print(
                    f"ister: subscription {subscription} already exists: continuing at its "
                    "position (move it with `ister subscriptions seek`)",
                    file=sys.stderr,
                )
            return "latest"
        if isinstance(start, int) and names != [self._topic]:
            raise InvalidRequestError(
                f"{self._topic} is partitioned, and each partition has offsets of its own",
                hint=f"consume one of them: {names[0]}",
            )
        return start

    def _goals(self, client: Client, names: list[str]) -> dict[str, int]:
        """Up to where each topic goes that has something to give now."""
        goals: dict[str, int] = {}
        for name in names:
            described = client.describe_topic(name)
            for one in described.subscriptions:
                is_ours = one.subscription == self._options.subscription
                if is_ours and one.cursor is not None and one.cursor < described.next:
                    goals[name] = described.next
        return goals

    def _print_all(self, consumer: Consumer, goals: dict[str, int] | None) -> None:
        options, interrupts = self._options, self._interrupts
        timeout = options.timeout
        if goals is not None:
            timeout = _QUIET_SECONDS if timeout is None else timeout
        quiet_since = self._clock.monotonic()
        while not interrupts.is_set and (options.limit is None or self.count < options.limit):
            if goals is not None and not goals:
                return
            messages = self._take(consumer)
            now = self._clock.monotonic()
            if not messages:
                self._output.check_reader()
                if timeout is not None and now - quiet_since >= timeout:
                    return
                continue
            self._print(consumer, messages)
            quiet_since = self._clock.monotonic()
            if goals is not None:
                for message in messages:
                    if message.offset + 1 >= goals.get(message.topic, 0):
                        goals.pop(message.topic, None)

    def _take(self, consumer: Consumer) -> list[ReceivedMessage]:
        """What there is, within bounds; waits a little if there is nothing."""
        limit = self._options.limit
        most = _BATCH_MESSAGES if limit is None else min(_BATCH_MESSAGES, limit - self.count)
        timeout = self._options.timeout
        messages: list[ReceivedMessage] = []
        size = 0
        with suppress(WaitTimeoutError):
            wait = _LOOK_SECONDS if timeout is None else min(_LOOK_SECONDS, timeout)
            while len(messages) < most and size < _BATCH_BYTES:
                messages.append(consumer.receive(0 if messages else wait))
                size += len(messages[-1].payload)
        return messages

    def _print(self, consumer: Consumer, messages: list[ReceivedMessage]) -> None:
        is_acked = not self._options.no_ack
        if not self._output.is_stepwise:
            some = matching(self._filter, [_received(one) for one in messages])
            self._output.write(b"".join(map(self._as_line, some)))
            self.count += len(some)
            if is_acked:
                for message in messages:
                    consumer.ack(message)
            return
        for message in messages:
            for one in matching(self._filter, [_received(message)]):
                self._output.write(self._as_line(one))
                self._output.taken()
                self.count += 1
            consumer.ack(message)


def _received(message: ReceivedMessage) -> Received:
    return Received(
        message.topic,
        message.offset,
        message.publish_time_ms,
        message.producer_name,
        message.payload,
        message.attributes,
        message.routing_key,
        message.schema_id,
        message.schema_version,
    )
