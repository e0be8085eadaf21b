"""`ister consume TOPIC`: messages to standard output, with or without a subscription.

Owns: when a message is acknowledged. Does not own: lines (`messages_out`),
filters and formats (`message_options`), the subscription, and reading without one
(`ister.client`).

    --subscription   a cursor at the broker: messages whose lines were read are acknowledged,
                     and the next `consume` continues behind them
    without          no position is kept

Invariant: a message is acknowledged after its line has been written; where the output is a pipe (on
Linux), after its line has been read. What a crash leaves is delivered again.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Final

from ister.base.clock import SystemClock
from ister.base.model import AckLevel, Start
from ister.cli.command import Arg, UsageError, command, register_command
from ister.cli.connection import (
    START_HELP,
    PatientBroker,
    existing_partitions,
    parse_count,
    parse_name,
    parse_seconds,
    parse_start,
)
from ister.cli.interrupts import Interrupts
from ister.cli.location import Topic
from ister.cli.message_options import FILTER_HELP, Filters, Format, matching
from ister.cli.messages_out import LineOutput, Received, StoppedError
from ister.cli.output import print_error
from ister.cli.templates import TEMPLATE_HELP
from ister.config import StorageMode
from ister.errors import InvalidRequestError, IsterError, PermissionDeniedError, WaitTimeoutError
from ister.subscription.policy import SubscriptionKind

if TYPE_CHECKING:
    from ister.client import Client, Consumer, Reader, ReceivedMessage, TopicMessage

_LOOK_SECONDS: Final = 0.25
_CLOSE_SECONDS: Final = 5.0
_BATCH_MESSAGES: Final = 1000
_BATCH_BYTES: Final = 1 << 20
# A subscription may be shared: what others were given does not come here.
_QUIET_SECONDS: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wish:
    """What is to be printed."""

    topic: str
    start: Start | None
    last: int | None
    limit: int | None
    timeout: float | None
    follow: bool
    subscription: str | None
    kind: SubscriptionKind
    name: str | None
    no_ack: bool


@command(None, "consume", json="", notes=f"{TEMPLATE_HELP}\n\n{FILTER_HELP}")
def consume(
    broker: PatientBroker,
    topic: Topic,
    filters: Filters,
    output: Format,
    *,
    start: Annotated[
        Start | None,
        Arg(
            f"{START_HELP} (default: earliest); an existing subscription continues at its position",
            "WHERE",
            parse_start,
            flags=("--from",),
            group="what to read",
            one_of="start",
        ),
    ] = None,
    last: Annotated[
        int | None,
        Arg(
            "begin with the last N messages, of each partition",
            "N",
            parse_count,
            group="what to read",
            one_of="start",
        ),
    ] = None,
    limit: Annotated[
        int | None,
        Arg("stop after this many messages", "N", parse_count, flags=("-n",), group="what to read"),
    ] = None,
    timeout: Annotated[
        float | None,
        Arg(
            "stop after this long without a message", "SECONDS", parse_seconds, group="what to read"
        ),
    ] = None,
    follow: Annotated[
        bool,
        Arg(
            "keep waiting for new messages (default), or stop at the current end",
            group="what to read",
        ),
    ] = True,
    subscription: Annotated[
        str | None,
        Arg(
            "subscription name; created if it does not exist",
            "NAME",
            parse_name,
            group="subscription",
        ),
    ] = None,
    kind: Annotated[
        SubscriptionKind,
        Arg(
            "kind of a new subscription: how messages are divided among its consumers "
            "(default: exclusive)",
            group="subscription",
        ),
    ] = SubscriptionKind.EXCLUSIVE,
    name: Annotated[
        str | None, Arg("consumer name", "NAME", parse_name, group="subscription")
    ] = None,
    no_ack: Annotated[
        bool,
        Arg(
            "do not acknowledge: messages are redelivered later, and at most as many arrive as a "
            "consumer may have unacknowledged",
            group="subscription",
        ),
    ] = False,
) -> int:
    r"""Print the messages of a topic, with or without a subscription.

    Prints the messages of a topic, one per line, and waits for new ones.

    With --subscription, the broker remembers the position, and the next consumer of the
    subscription continues there. A message is acknowledged after its line was written; if the
    output is a pipe, after the program behind it has read the line: `ister consume T --subscription
    S | head -5` takes five messages and leaves the rest. Without --subscription, no position is
    kept.

    With filters, only matching messages are printed and counted. With a subscription, the others
    are acknowledged.

    Examples:
        ister consume /default/orders
        ister consume orders --last 10
        ister consume /default/orders --from 15m --format full
        ister consume /default/orders --format '{offset}\t{key}\t{payload.user.id}'
        ister consume /default/orders --key 'eu-*' --where 'user.id == 7' --no-follow
        ister consume /default/orders --subscription billing | ./bill
        ister consume /default/orders --subscription peek -n 10 --json
        ister consume /default/a --no-follow --json | ister produce /default/b --json-lines
    """
    if last is not None and subscription is not None:
        raise UsageError("--last cannot be combined with --subscription")
    if sys.stdout is None:
        raise InvalidRequestError("standard output is closed")
    wish = _Wish(
        topic=topic,
        start=start,
        last=last,
        limit=limit,
        timeout=timeout,
        follow=follow,
        subscription=subscription,
        kind=kind,
        name=name,
        no_ack=no_ack,
    )
    fd = sys.stdout.fileno()
    with Interrupts() as interrupts:
        lines = LineOutput(fd, interrupts, is_careful=subscription is not None and not no_ack)
        form = output.formatter(is_terminal=sys.stdout.isatty())
        work = _Consumption(broker, wish, filters, interrupts, output=lines, as_line=form)
        try:
            if subscription is None:
                work.read()
            else:
                work.consume(subscription)
        except BrokenPipeError:
            # The reader is gone. Python would flush once more at its end, and complain.
            os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
            return 0
        except StoppedError:
            pass
    # A signal is the normal end without a limit; with a limit it is an interruption.
    if interrupts.is_set and limit is not None and work.count < limit:
        print_error(f"interrupted after {work.count:,} of {limit:,} messages")
        return 1
    return 0


register = register_command(consume)


class _Consumption:
    """One run of the command."""

    def __init__(
        self,
        broker: PatientBroker,
        wish: _Wish,
        filters: Filters,
        interrupts: Interrupts,
        *,
        output: LineOutput,
        as_line: Callable[[Received], bytes],
    ) -> None:
        self.count = 0
        self._broker = broker
        self._wish = wish
        self._topic = wish.topic
        self._interrupts = interrupts
        self._output = output
        self._as_line = as_line
        self._filter = filters.filter
        self._clock = SystemClock()

    # -- without a subscription -------------------------------------------------------------

    def read(self) -> None:
        """Prints messages, and leaves nothing behind."""
        wish = self._wish
        for given, flag in ((wish.no_ack, "--no-ack"), (wish.name, "--name")):
            if given:
                raise InvalidRequestError(
                    f"{flag} without a subscription", hint="--subscription NAME"
                )
        with self._broker.connect() as client:
            self._check_readable(client)
            with self._interrupts.breaking():  # nothing has come yet
                reader = client.reader(
                    self._topic,
                    "earliest" if wish.start is None else wish.start,
                    last=wish.last,
                    follow=wish.follow,
                    timeout=self._broker.retry_for,
                )
            with reader:
                self._print_read(reader)

    def _print_read(self, reader: Reader) -> None:
        limit, timeout = self._wish.limit, self._wish.timeout
        quiet_since = self._clock.monotonic()
        while not self._interrupts.is_set:
            found = reader.read(_LOOK_SECONDS if timeout is None else min(_LOOK_SECONDS, timeout))
            now = self._clock.monotonic()
            if not found:
                if reader.is_done or (timeout is not None and now - quiet_since >= timeout):
                    return
                self._output.check_reader()
                continue
            quiet_since = now
            some = matching(self._filter, [_received(one) for one in found])
            if not some:
                self._output.check_reader()
            if limit is not None:
                some = some[: limit - self.count]
            for first in range(0, len(some), _BATCH_MESSAGES):
                lines = map(self._as_line, some[first : first + _BATCH_MESSAGES])
                self._output.write(b"".join(lines))
            self.count += len(some)
            if self.count == limit:
                return

    def _check_readable(self, client: Client) -> None:
        names = existing_partitions(client, self._topic)
        described = client.admin.describe_topic(names[0])
        if not described.is_reliable:
            raise InvalidRequestError(
                f"{self._topic} stores no messages",
                hint="use --subscription NAME to receive new messages",
            )
        if described.ack == AckLevel.MEMORY:
            # Only what is in files is read this way, and a log in memory has none.
            mode = client.admin.show_topic(names[0]).get("mode")
            if mode == StorageMode.MEMORY.value:
                raise InvalidRequestError(
                    f"{self._topic} is in memory only and can be read only with a subscription",
                    hint="use --subscription NAME",
                )

    # -- with one ---------------------------------------------------------------------------

    def consume(self, subscription: str) -> None:
        """Prints messages, and acknowledges them."""
        wish = self._wish
        with self._broker.connect() as client:
            names = existing_partitions(client, self._topic)
            start = self._start(client, names, subscription)
            with self._interrupts.breaking():  # nothing has come yet
                try:
                    consumer = client.consumer(
                        self._topic,
                        subscription,
                        name=wish.name,
                        kind=wish.kind,
                        start=start,
                        timeout=self._broker.retry_for or None,
                    )
                except PermissionDeniedError as error:
                    if self._is_taken(client, names, subscription):
                        error.hint = (
                            "create the subscription with --kind shared or failover to allow "
                            "several consumers"
                        )
                    raise
            try:
                goals = None if wish.follow else self._goals(client, names, subscription)
                self._print_all(consumer, goals)
            finally:
                with suppress(WaitTimeoutError):
                    consumer.close(_CLOSE_SECONDS)

    def _is_taken(self, client: Client, names: list[str], subscription: str) -> bool:
        """Whether an exclusive subscription has another consumer."""
        with suppress(IsterError):
            return any(
                one.kind == SubscriptionKind.EXCLUSIVE and one.consumers
                for one in (
                    client.admin.describe_subscription(name, subscription) for name in names
                )
            )
        return False

    def _start(self, client: Client, names: list[str], subscription: str) -> Start:
        """Where the subscription begins if it is new."""
        given = self._wish.start
        start: Start = "earliest" if given is None else given
        if subscription in client.admin.subscriptions(self._topic):
            if given is not None:
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

    def _goals(self, client: Client, names: list[str], subscription: str) -> dict[str, int]:
        """Up to where each topic goes that has something to give now."""
        goals: dict[str, int] = {}
        for name in names:
            described = client.admin.describe_topic(name)
            for one in described.subscriptions:
                is_ours = one.subscription == subscription
                if is_ours and one.cursor is not None and one.cursor < described.next:
                    goals[name] = described.next
        return goals

    def _print_all(self, consumer: Consumer, goals: dict[str, int] | None) -> None:
        limit, timeout, interrupts = self._wish.limit, self._wish.timeout, self._interrupts
        if goals is not None:
            timeout = _QUIET_SECONDS if timeout is None else timeout
        quiet_since = self._clock.monotonic()
        while not interrupts.is_set and (limit is None or self.count < limit):
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
        limit = self._wish.limit
        most = _BATCH_MESSAGES if limit is None else min(_BATCH_MESSAGES, limit - self.count)
        timeout = self._wish.timeout
        messages: list[ReceivedMessage] = []
        size = 0
        with suppress(WaitTimeoutError):
            wait = _LOOK_SECONDS if timeout is None else min(_LOOK_SECONDS, timeout)
            while len(messages) < most and size < _BATCH_BYTES:
                messages.append(consumer.receive(0 if messages else wait))
                size += len(messages[-1].payload)
        return messages

    def _print(self, consumer: Consumer, messages: list[ReceivedMessage]) -> None:
        is_acked = not self._wish.no_ack
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


def _received(message: TopicMessage) -> Received:
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
