"""Which broker a command talks to, and what is said when that does not work.

Owns: `--broker`, `--token`, `--tls` and what goes with them, clients made of them, what a command
prints that changed a broker, and the hints of errors that a broker gives. Does not own: talking
(`ister.client`).

Every command that talks to a broker finds it here, and every command that changes one prints its
address: a command that acts on another broker than its user had in mind is seen at once.

    --broker, ISTER_BROKER      host:port, several with commas between them
    --token, ISTER_TOKEN        never part of any text

A token on a command line can be seen by everybody on the machine; one in the environment cannot.
"""

from __future__ import annotations

import argparse
import asyncio
import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from ister.cli.report import print_json
from ister.clock import SystemClock
from ister.errors import (
    ConfigError,
    IsterError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnavailableError,
    UnsupportedOperationError,
)
from ister.model import Start, TopicName

if TYPE_CHECKING:
    from ister.client import Client, TlsOptions
    from ister.client.flight import FlightClient

__all__ = [
    "BROKER_DEFAULT",
    "ReaderAddress",
    "add_broker_arguments",
    "broker_address",
    "connected",
    "explained",
    "locate_readers",
    "names_broker",
    "open_reader",
    "parse_count",
    "parse_name",
    "parse_seconds",
    "parse_start",
    "print_change",
]

BROKER_DEFAULT: Final = "127.0.0.1:6650"

_BROKER: Final = "ISTER_BROKER"
_TOKEN: Final = "ISTER_TOKEN"  # noqa: S105 - the name of a variable
# Commands that ask one thing end soon where nobody answers.
_ANSWER_SECONDS: Final = 4.0
_AGO: Final = re.compile(r"([0-9]+)(s|m|h|d)")
_AGO_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_OFFSET_MAX: Final = (1 << 63) - 1
_LAST_ERROR: Final = "last error: "
_HTTP_PORT: Final = 9040


# -- arguments ------------------------------------------------------------------------------


def add_broker_arguments(
    parser: argparse.ArgumentParser, *, retry_for: float = _ANSWER_SECONDS
) -> None:
    """Adds `--broker` and what goes with it.

    Args:
        parser: Of the command.
        retry_for: How long brokers may be out of reach, in seconds, unless the user says so.
    """
    group = parser.add_argument_group("broker")
    group.add_argument(
        "--broker",
        metavar="HOST:PORT",
        help=f"where a broker is (default: ${_BROKER} if set, else {BROKER_DEFAULT})",
    )
    group.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"a token or an API key (default: ${_TOKEN}, which others on the machine cannot see)",
    )
    group.add_argument(
        "--tls", action="store_true", help="encrypt, and trust whom this machine trusts"
    )
    group.add_argument(
        "--ca-file", metavar="FILE", help="encrypt, and trust brokers signed by this CA (PEM)"
    )
    group.add_argument("--cert-file", metavar="FILE", help="this client's certificate (PEM)")
    group.add_argument("--key-file", metavar="FILE", help="the key of the certificate (PEM)")
    first = "" if retry_for == _ANSWER_SECONDS else f"; {_ANSWER_SECONDS:g} for the first answer"
    group.add_argument(
        "--retry-for",
        metavar="SECONDS",
        type=parse_seconds,
        default=retry_for,
        action=_RetryFor,
        help=f"how long to go on while no broker answers (default: {retry_for:g}{first})",
    )
    # An address where nobody ever was is told soon, unless the user wants to wait.
    parser.set_defaults(answer_within=_ANSWER_SECONDS)


class _RetryFor(argparse.Action):
    """What the user says is for the first answer too."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,  # noqa: ANN401 - of any argument
        option_string: str | None = None,
    ) -> None:
        namespace.retry_for = namespace.answer_within = values


def names_broker(options: argparse.Namespace) -> bool:
    """Whether the user said where a broker is."""
    return bool(options.broker or os.environ.get(_BROKER))


def broker_address(options: argparse.Namespace) -> str:
    """Where the broker is."""
    return options.broker or os.environ.get(_BROKER) or BROKER_DEFAULT


def print_change(options: argparse.Namespace, text: str, facts: Mapping[str, Any]) -> None:
    """Prints what a command has changed, and at which broker.

    Args:
        options: The command's, with `json` and those of `add_broker_arguments`.
        text: What was done, for people.
        facts: What was done, for programs.
    """
    if options.json:
        print_json({"ok": True, **facts, "broker": broker_address(options)})
    else:
        print(f"{text} (broker {broker_address(options)})")


def parse_seconds(text: str) -> float:
    """A length of time that is not negative, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return seconds


def parse_count(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number, and at least 1")
    return int(text)


def parse_name(text: str) -> str:
    """A name of a subscription, a consumer or a producer, for argparse: any text in Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a text in Unicode") from error
    return text


def parse_start(text: str) -> Start:
    """A place in a topic, for argparse: an offset, an end, a point in time, or how long ago."""
    if text == "earliest":
        return "earliest"
    if text == "latest":
        return "latest"
    if text.isascii() and text.isdigit() and int(text) <= _OFFSET_MAX:
        return int(text)
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            now = datetime.fromtimestamp(SystemClock().now_ns() // 1_000_000_000, UTC)
            return now - timedelta(**{_AGO_UNITS[ago[2]]: int(ago[1])})
        moment = datetime.fromisoformat(text)
    except (ValueError, OverflowError) as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is no place in a topic: earliest, latest, an offset, a time such as "
            "2026-01-31T12:00:00Z, or 90s, 15m, 2h, 7d for so long ago"
        ) from error
    if moment.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone: {text}Z is UTC")
    return moment


# -- clients --------------------------------------------------------------------------------


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """A client for the broker that the arguments name; its errors have hints for a shell.

    Raises:
        ConfigError: The extra `ister[client]` is not installed, or a file cannot be read.
        IsterError: What calls raise.
    """
    _hush()
    from ister.client import Client  # noqa: PLC0415 - an extra, and it takes a while

    address = broker_address(options)
    with explained(options):
        client = Client(
            address,
            token=_token(options),
            tls=_tls(options),
            # What is done for a long time waits by itself, with a timeout of its own.
            timeout=min(options.retry_for, options.answer_within) or 0.1,
        )
        with client, _near_misses(client):
            yield client


def _hush() -> None:
    """Keeps gRPC from writing to standard error by itself; what it has to say comes as errors."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@contextmanager
def explained(options: argparse.Namespace) -> Iterator[None]:
    """Says in errors what to do about them in a shell."""
    try:
        yield
    except UnauthenticatedError as error:
        error.hint = error.hint or f"--token, or {_TOKEN} in the environment, says who you are"
        raise
    except PermissionDeniedError as error:
        error.hint = error.hint or _denied(error.message)
        raise
    except UnsupportedOperationError as error:
        error.hint = error.hint or "the broker may be older than this command"
        raise
    except UnavailableError as error:
        if "does not answer" not in error.message:
            raise
        raise _no_broker(options, error) from error


def _denied(message: str) -> str:
    if "is exclusive" in message:
        return "a subscription made with --type shared or failover has room for several"
    return f"the owner of this token (--token, {_TOKEN}) may not do that"


def _no_broker(options: argparse.Namespace, error: UnavailableError) -> UnavailableError:
    address = broker_address(options)
    reason = error.message.partition(_LAST_ERROR)[2] or error.message.partition("answer: ")[2]
    message = f"no broker answers at {address}"
    if "Connection refused" not in reason:
        message += f": {reason}" if reason else ""
    if "http1" in reason or address.endswith(f":{_HTTP_PORT}"):
        hint = f"is that the port of HTTP? gRPC is at {BROKER_DEFAULT.rpartition(':')[2]}"
        return UnavailableError(message, hint=f"{hint}, unless the broker is told otherwise")
    hint = f"is `ister serve` running? --broker or {_BROKER} says where it is"
    if _is_encrypted(options):
        hint += "; it may not speak TLS, or be signed by somebody whom --ca-file does not name"
    else:
        hint += "; --tls or --ca-file if it wants encrypted connections"
    return UnavailableError(message, hint=hint)


@contextmanager
def _near_misses(client: Client) -> Iterator[None]:
    """Names similar topics where there is none of a name."""
    try:
        yield
    except NotFoundError as error:
        topic = error.topic or _named_in(error.message)
        if topic is not None and f"no topic {topic}" in error.message:
            error.hint = _similar(client, topic)
            error.topic = None  # it is in the text
        raise


def _named_in(message: str) -> str | None:
    found = re.search(r"no topic (/[\w-]+/[\w-]+)", message)
    return found[1] if found is not None else None


def _similar(client: Client, topic: str) -> str:
    names: set[str] = set()
    with suppress(IsterError):
        for namespace in {TopicName.parse(topic).namespace, *client.namespaces()}:
            with suppress(NotFoundError):
                names.update(client.topics(namespace))
    near = _nearest(topic, names)
    if near:
        return f"did you mean {', '.join(near)}?"
    shown = ", ".join(sorted(names)[:10])
    return f"there are: {shown}" if names else "`ister topics create` makes one"


def _nearest(topic: str, names: Iterable[str]) -> list[str]:
    """Names whose last part is similar: the namespace makes all of its topics look alike."""
    by_part: dict[str, list[str]] = {}
    for name in sorted(names):
        by_part.setdefault(name.rpartition("/")[2], []).append(name)
    near = difflib.get_close_matches(topic.rpartition("/")[2], by_part)
    return [name for part in near for name in by_part[part]]


def _token(options: argparse.Namespace) -> str | None:
    return options.token or os.environ.get(_TOKEN) or None


def _is_encrypted(options: argparse.Namespace) -> bool:
    said = options.tls or options.ca_file or options.cert_file or options.key_file
    return bool(said) or broker_address(options).startswith(("https://", "grpc+tls://"))


def _tls(options: argparse.Namespace) -> TlsOptions | bool | None:
    from ister.client import TlsOptions  # noqa: PLC0415

    if options.ca_file or options.cert_file or options.key_file:
        return TlsOptions(ca=options.ca_file, cert=options.cert_file, key=options.key_file)
    return True if options.tls else None


# -- readers --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ReaderAddress:
    """Where a topic, or a partition of one, can be read without a subscription."""

    topic: str
    flight: str


def locate_readers(options: argparse.Namespace, topic: str) -> list[ReaderAddress]:
    """The topics behind a name, and which Flight port has each.

    Raises:
        NotFoundError: There is no such topic.
        IsterError: It is refused, or no broker has answered in time.
    """
    with explained(options):
        return asyncio.run(_locate(options, topic))


async def _locate(options: argparse.Namespace, topic: str) -> list[ReaderAddress]:
    _hush()
    from ister.client.network import Network  # noqa: PLC0415

    network = Network(
        broker_address(options),
        token=_token(options),
        tls=_tls(options),
        timeout=min(options.retry_for, _ANSWER_SECONDS) or 0.1,
    )
    try:
        found = []
        for name in await network.partitions(topic):
            route = await network.locate(name)
            address = await network.flight_address(route)
            found.append(ReaderAddress(topic=name, flight=address))
        return found
    finally:
        await network.close()


def open_reader(options: argparse.Namespace, address: str) -> FlightClient:
    """A client of a Flight port.

    Raises:
        ConfigError: pyarrow is not installed, or a file cannot be read.
    """
    from ister.client.flight import FlightClient  # noqa: PLC0415

    if options.cert_file:
        raise ConfigError(
            "without a subscription, a client's certificate cannot be shown",
            hint="--subscription consumes with one",
        )
    tls_ca = None
    tls = _tls(options)
    if tls is not None and not isinstance(tls, bool):
        tls_ca = tls.texts()[0]
    scheme = "grpc+tls" if _is_encrypted(options) else "grpc"
    return FlightClient(f"{scheme}://{address}", token=_token(options), tls_ca=tls_ca)
