"""`ister produce TOPIC`: messages from standard input, a file or the command line.

Owns: what is printed. Does not own: taking input apart (`messages_in`), publishing
(`ister.client`).

    input ─► messages ─► the client, many on their way ─► outcomes, in order ─► `{offset}` a line

Exit code 0 means that every message of the input is acknowledged. When it is stopped by a signal,
by a reader of its output that went away or by an error, what was accepted is waited for a while,
and standard error says how many messages were acknowledged. The others may be in the topic as well:
sending them again may duplicate them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import sys
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated, Final

from ister.base.clock import SystemClock
from ister.base.model import AckLevel
from ister.cli.command import Arg, UsageError, command, register_command
from ister.cli.connection import PatientBroker, parse_count, parse_name
from ister.cli.interrupts import Interrupts
from ister.cli.location import Topic
from ister.cli.messages_in import InputMessage, InputOptions, read_messages
from ister.cli.output import ProgressBar, format_bytes, print_error, progress
from ister.errors import (
    CapacityError,
    InvalidRequestError,
    IsterError,
    NotFoundError,
    topic_not_found,
)

if TYPE_CHECKING:
    from ister.client import Producer, SentMessage

# After a signal, accepted messages have this long to be acknowledged.
_GRACE_SECONDS: Final = 10.0
_LOOK_SECONDS: Final = 0.25
_UNREPORTED_MAX: Final = 100_000
_ERRORS_SHOWN: Final = 5
_PROGRESS_EVERY: Final = 500
# A pipe with any room has room for this much.
_WRITE_BYTES: Final = 4096
_NEW: Final = "if the topic does not exist"


def _parse_attribute(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value


@command(None, "produce", json="print one JSON object per message, with its offset")
def produce(
    broker: PatientBroker,
    topic: Topic,
    text: Annotated[str | None, Arg("publish this text as one message", "MESSAGE")] = None,
    *,
    file: Annotated[
        str | None, Arg("read this file instead of standard input", "FILE", one_of="source")
    ] = None,
    message: Annotated[
        str | None, Arg("publish this text as one message", "TEXT", one_of="source")
    ] = None,
    delimiter: Annotated[
        str | None,
        Arg(
            "the separator between messages (default: newline)",
            "TEXT",
            group="messages",
            one_of="ends",
        ),
    ] = None,
    null: Annotated[
        bool,
        Arg(
            "messages are separated by a zero byte", flags=("-0",), group="messages", one_of="ends"
        ),
    ] = False,
    whole: Annotated[
        bool, Arg("publish the whole input as one message", group="messages", one_of="ends")
    ] = False,
    json_lines: Annotated[
        bool,
        Arg(
            "input is one JSON object per line, as printed by `ister consume --json`: payload or "
            "payload_base64, routing_key, attributes",
            group="messages",
            one_of="ends",
        ),
    ] = False,
    key: Annotated[
        str | None,
        Arg("routing key of messages without one", "KEY", flags=("-k",), group="messages"),
    ] = None,
    key_field: Annotated[
        str | None,
        Arg(
            "take the routing key from this field of each JSON message; a.b for a nested field",
            "FIELD",
            group="messages",
        ),
    ] = None,
    attribute: Annotated[
        list[tuple[str, str]],
        Arg(
            "attribute of every message; repeatable",
            "NAME=VALUE",
            _parse_attribute,
            group="messages",
        ),
    ] = [],  # noqa: B006 - copied
    name: Annotated[
        str | None,
        Arg(
            "producer name; only one producer may use it at a time",
            "NAME",
            parse_name,
            group="messages",
        ),
    ] = None,
    rate: Annotated[
        int | None, Arg("maximum messages per second", "N", parse_count, group="messages")
    ] = None,
    create: Annotated[
        bool | None,
        Arg(
            "create the topic even if brokers do not create topics automatically, or never create "
            "it",
            group=_NEW,
        ),
    ] = None,
    ack: Annotated[AckLevel | None, Arg("durability level of acknowledgements", group=_NEW)] = None,
    partitions: Annotated[
        int | None, Arg("number of partitions", "N", parse_count, group=_NEW)
    ] = None,
    json: bool,
) -> int:
    """Publish messages from standard input, a file or the command line.

    Publishes each line of standard input as a message, until the input ends. The topic is created
    if it does not exist and the broker allows that.

    The command ends with 0 only if the broker acknowledged every message. Standard error says how
    many were, and their offsets.

    Examples:
        ister produce orders hello
        ister produce /default/orders < orders.jsonl
        ister produce /default/orders --key-field customer.id --file orders.jsonl --json
        ister consume /default/a --no-follow --json | ister produce /default/b --json-lines
    """
    if text is not None and (message is not None or file is not None):
        raise UsageError("MESSAGE cannot be combined with --message or --file")
    if json_lines and key_field:
        raise InvalidRequestError(
            "--key-field cannot be used with --json-lines", hint="there, routing_key is the key"
        )
    message = text if message is None else message
    # Any bytes may be given, and Python has those that are no text as surrogates.
    between = (delimiter or "\n").encode(errors="surrogateescape")
    input_options = InputOptions(
        # With a message as argument, the text is all of it.
        is_whole=whole or message is not None,
        is_json=json_lines,
        delimiter=b"\0" if null else between,
        key=key,
        key_field=key_field,
        attributes=dict(attribute),
    )
    with contextlib.ExitStack() as stack:
        interrupts = stack.enter_context(Interrupts())
        read = _open_input(message, file, interrupts, stack)
        client = stack.enter_context(broker.connect())
        with interrupts.breaking():  # nothing is sent yet
            is_new = not client.admin.partitions(topic)
            if is_new and create is False:
                raise topic_not_found(topic)
            if is_new and (create or partitions):
                client.admin.create_topic(topic, partitions=partitions or 0, ack=ack)
            producer = client.producer(
                topic, name=name, create=create is None, ack=ack, timeout=broker.retry_for or None
            )
        if is_new:
            print(f"ister: {topic} created (broker {broker.address})", file=sys.stderr)
        # A bar would run into lines that are typed, or printed.
        is_in_the_way = json and sys.stdout is not None and sys.stdout.isatty()
        is_typed = file is None and sys.stdin is not None and sys.stdin.isatty()
        shown = None
        if message is None and not is_typed and not is_in_the_way:
            shown = stack.enter_context(progress(f"to {topic}"))
        report = _Report(
            is_json=json,
            is_partitioned=client.admin.partitions(topic) not in ([], [topic]),
            broker=broker.address,
        )
        work = _Production(producer, interrupts, report, rate=rate, shown=shown)
        failure = work.run(_counted(read_messages(read, input_options), report))
    if key_field and report.keyless:
        count = f"{report.keyless:,} message{'' if report.keyless == 1 else 's'}"
        print(f"ister: {count} without {key_field} to take a key from", file=sys.stderr)
    return _conclude(report, failure, is_interrupted=interrupts.is_set)


register = register_command(produce)


def _counted(messages: Iterator[InputMessage], report: _Report) -> Iterator[InputMessage]:
    """Passes messages on and counts those without a key."""
    for message in messages:
        report.keyless += message.routing_key is None
        yield message


def _open_input(
    message: str | None, file: str | None, interrupts: Interrupts, stack: contextlib.ExitStack
) -> Callable[[int], bytes]:
    if message is not None:
        pieces = iter([message.encode(errors="surrogateescape"), b""])
        return lambda size: next(pieces)
    if file is not None:
        try:
            fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise NotFoundError(f"{file} cannot be read: {error.strerror}") from error
        stack.callback(os.close, fd)
        return _readable(interrupts.reading(fd), file)
    if sys.stdin is None:
        raise InvalidRequestError("standard input is closed", hint="--file or --message")
    if sys.stdin.isatty():
        print("one message per line; press Ctrl-D to stop", file=sys.stderr)
    return _readable(interrupts.reading(sys.stdin.fileno()), "standard input")


def _readable(read: Callable[[int], bytes], name: str) -> Callable[[int], bytes]:
    def attempt(size: int) -> bytes:
        try:
            return read(size)
        except OSError as error:
            raise InvalidRequestError(f"{name} cannot be read: {error.strerror}") from error

    return attempt


# -- publishing -----------------------------------------------------------------------------


class _Production:
    """Publishes messages, and sees to their outcomes in a thread beside it."""

    def __init__(
        self,
        producer: Producer,
        interrupts: Interrupts,
        report: _Report,
        *,
        rate: int | None,
        shown: ProgressBar | None,
    ) -> None:
        self._producer = producer
        self._interrupts = interrupts
        self._report = report
        self._rate = rate
        self._shown = shown
        self._clock = SystemClock()
        self._sent: SimpleQueue[SentMessage | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._collect, name="ister-outcomes", daemon=True)

    def run(self, messages: Iterator[InputMessage]) -> IsterError | None:
        """Publishes all of them; returns why it could not."""
        self._thread.start()
        failure: IsterError | None = None
        try:
            self._send_all(messages)
        except IsterError as error:
            failure = error
        self._sent.put(None)
        self._await_outcomes()
        # Messages without an outcome by now fail.
        self._report.is_given_up = self._thread.is_alive()
        with contextlib.suppress(IsterError):
            self._producer.close(_LOOK_SECONDS if self._thread.is_alive() else None)
        self._thread.join()
        self._report.end(self._clock.monotonic())
        return failure

    def _send_all(self, messages: Iterator[InputMessage]) -> None:
        report, sent, stopped = self._report, self._sent, self._interrupts
        began = self._clock.monotonic()
        report.began = began
        for number, message in enumerate(messages):
            if self._rate is not None:
                stopped.wait(began + number / self._rate - self._clock.monotonic())
            while sent.qsize() > _UNREPORTED_MAX and not stopped.is_set:
                stopped.wait(_LOOK_SECONDS / 10)
                if not self._thread.is_alive():
                    return
            accepted = self._send(message)
            if accepted is None:
                return
            sent.put(accepted)
            report.accepted += 1
            report.bytes += len(message.payload)
            if self._shown is not None and report.accepted % _PROGRESS_EVERY == 0:
                self._shown.advance(_PROGRESS_EVERY)

    def _send(self, message: InputMessage) -> SentMessage | None:
        """Waits for room; None once the command is to stop."""
        while not self._interrupts.is_set:
            try:
                return self._producer.send(
                    message.payload,
                    routing_key=message.routing_key,
                    attributes=message.attributes,
                    timeout=_LOOK_SECONDS,
                )
            except CapacityError:
                continue  # a look whether to stop
        return None

    def _await_outcomes(self) -> None:
        clock = self._clock
        give_up_at: float | None = None
        while self._thread.is_alive():
            self._thread.join(_LOOK_SECONDS)
            if self._interrupts.is_set and give_up_at is None:
                give_up_at = clock.monotonic() + _GRACE_SECONDS
            if give_up_at is not None and clock.monotonic() > give_up_at:
                return

    def _collect(self) -> None:
        report, sent = self._report, self._sent
        while True:
            if sent.empty():
                report.flush()
            one = sent.get()
            if one is None:
                report.flush()
                return
            try:
                report.placed(one.topic, one.result())
            except IsterError as error:
                report.failed(error)
            if report.output_error is not None:
                self._interrupts.stop()


class _Report:
    """What has become of messages, in order. Belongs to one thread, then to the other."""

    def __init__(self, *, is_json: bool, is_partitioned: bool, broker: str) -> None:
        self.accepted = 0
        self.bytes = 0
        self.keyless = 0
        """Messages without a routing key."""
        self.acknowledged = 0
        self.errors: list[tuple[int, IsterError]] = []
        self.errors_total = 0
        self.offsets: dict[str, tuple[int, int]] = {}
        """The first and the last one, by topic."""
        self.began = self.ended = 0.0
        self.output_error: str | None = None
        """Why offsets are not printed any more."""
        self.is_given_up = False
        """Whether offsets are no longer printed because they were not read in time."""
        self._is_json = is_json
        self._is_partitioned = is_partitioned
        self.broker = broker
        self._lines: list[str] = []

    def placed(self, topic: str, offset: int) -> None:
        """The next message has an offset."""
        self.acknowledged += 1
        first, _ = self.offsets.get(topic, (offset, offset))
        self.offsets[topic] = (first, offset)
        if self._is_json:
            if self._is_partitioned:
                self._print(json.dumps({"offset": offset, "topic": topic}))
            else:
                self._print(f'{{"offset": {offset}}}')

    def failed(self, error: IsterError) -> None:
        """The next message has none, and why."""
        self.errors_total += 1
        if len(self.errors) < _ERRORS_SHOWN:
            self.errors.append((self.acknowledged + self.errors_total, error))
        if self._is_json:
            self._print(json.dumps({"offset": None, "code": error.code, "error": error.message}))

    def _print(self, line: str) -> None:
        self._lines.append(line)
        if len(self._lines) >= _PROGRESS_EVERY:
            self.flush()

    def flush(self) -> None:
        """Prints what is to be printed."""
        lines, self._lines = self._lines, []
        if not lines or self.output_error is not None:
            return
        try:
            self._write("\n".join(lines) + "\n")
        except BrokenPipeError:
            self.output_error = "the reader of the offsets closed the pipe"
        except OSError as error:
            self.output_error = f"cannot write the offsets: {error.strerror}"

    def _write(self, text: str) -> None:
        """Writes without waiting forever for a reader that never reads."""
        if sys.stdout is None:
            return
        sys.stdout.flush()
        data, fd = memoryview(text.encode()), sys.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLOUT)
        while data:
            if poll.poll(_LOOK_SECONDS * 1000):
                data = data[os.write(fd, data[:_WRITE_BYTES]) :]
            elif self.is_given_up:
                self.output_error = "the offsets were not read in time"
                return

    def end(self, now: float) -> None:
        """There are no more."""
        self.ended = now

    def words(self) -> str:
        """How many there are, and where."""
        places = [
            (f"offset {first}" if first == last else f"offsets {first}–{last}")
            + (f" of {topic}" if self._is_partitioned else "")
            for topic, (first, last) in sorted(self.offsets.items())[:_ERRORS_SHOWN]
        ]
        number = f"{self.acknowledged:,} message{'' if self.acknowledged == 1 else 's'}"
        return ", ".join((number, *places))


def _conclude(report: _Report, failure: IsterError | None, *, is_interrupted: bool) -> int:
    if report.output_error is not None and sys.stdout is not None:
        # Python would flush once more at its end, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    for number, error in report.errors:
        print_error(f"message {number}: {error.message}", hint=error.hint)
    if report.errors_total > len(report.errors):
        print_error(f"and {report.errors_total - len(report.errors):,} more")
    unknown = report.accepted - report.acknowledged
    is_done = failure is None and not unknown and report.output_error is None
    if is_done and not is_interrupted:
        print(_summary(report) if sys.stderr.isatty() else report.words(), file=sys.stderr)
        return 0
    if failure is not None:
        print_error(failure.message, hint=failure.hint)
    if report.output_error is not None:
        print_error(report.output_error)
    elif is_interrupted:
        print_error("interrupted before the end of the input")
    text = f"ister: acknowledged: {report.words()}"
    print(text + (f"; {unknown:,} not" if unknown else ""), file=sys.stderr)
    return 1


def _summary(report: _Report) -> str:
    seconds = max(report.ended - report.began, 1e-3)
    rate = f"{report.acknowledged / seconds:,.0f} messages/s"
    size = format_bytes(report.bytes)
    return f"{report.words()} (broker {report.broker}; {size} in {seconds:.1f} s, {rate})"
