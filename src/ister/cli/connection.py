"""The broker that a command talks to, and the hints of its errors.

Owns: `--broker`, `--token`, `--tls` and what goes with them, clients made of them, what a command
prints that changed a broker, and the hints of errors that a broker gives. Does not own: talking
(`ister.client`).

Every command that talks to a broker finds it here, and every command that changes one prints its
address: a command that acts on another broker than its user had in mind is seen at once.

    --broker, ISTER_BROKER      host:port, several with commas between them
    --token, ISTER_TOKEN        never part of any text
    --context, ISTER_CONTEXT    a named broker (`contexts`)

The first that is given is used: options, including `--context`; the environment; the context of
`ISTER_CONTEXT` or the current one; the default. If an option or the environment names the broker,
a context that `--context` does not name is ignored: its token is sent only to its own broker.

A token on a command line can be seen by everybody on the machine; one in the environment cannot.
"""

from __future__ import annotations

import argparse
import difflib
import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Final, Self

from ister.base.clock import SystemClock
from ister.base.model import Start, TopicName
from ister.base.positions import format_position, parse_position
from ister.cli.command import Shown
from ister.cli.contexts import CONTEXT_VARIABLE, Context, chosen_context
from ister.errors import (
    InvalidRequestError,
    IsterError,
    NoAnswerError,
    NotFoundError,
    PermissionDeniedError,
    UnauthenticatedError,
    UnsupportedOperationError,
    topic_not_found,
)

if TYPE_CHECKING:
    from ister.client import Client, TlsOptions

BROKER_DEFAULT: Final = "127.0.0.1:6650"

_BROKER: Final = "ISTER_BROKER"
_TOKEN: Final = "ISTER_TOKEN"  # noqa: S105 - the name of a variable
# Commands with a single request give up soon.
_ANSWER_SECONDS: Final = 4.0
_HTTP_PORT: Final = 9040


# -- arguments ------------------------------------------------------------------------------


def add_broker_arguments(
    parser: argparse.ArgumentParser, *, retry_for: float = _ANSWER_SECONDS
) -> None:
    """Adds `--broker` and what goes with it.

    `retry_for` is the default of --retry-for, in seconds.
    """
    group = parser.add_argument_group("broker")
    group.add_argument(
        "--broker",
        metavar="HOST:PORT",
        help=f"broker address (default: ${_BROKER}, else the context's, else {BROKER_DEFAULT})",
    )
    group.add_argument(
        "--context",
        metavar="NAME",
        help=f"use this context (default: ${CONTEXT_VARIABLE}, else the current one; see "
        "`ister context`)",
    )
    group.add_argument(
        "--token",
        metavar="TOKEN",
        help=f"token or API key (default: ${_TOKEN}; a command line is visible to other users)",
    )
    group.add_argument("--tls", action="store_true", help="use TLS and the system CA store")
    group.add_argument("--ca-file", metavar="FILE", help="use TLS and this CA (PEM)")
    group.add_argument("--cert-file", metavar="FILE", help="client certificate (PEM)")
    group.add_argument(
        "--key-file", metavar="FILE", help="private key of the client certificate (PEM)"
    )
    group.add_argument(
        "--server-name", metavar="NAME", help="name in the broker's certificate, if not the host"
    )
    first = "" if retry_for == _ANSWER_SECONDS else f"; {_ANSWER_SECONDS:g} for the first response"
    group.add_argument(
        "--retry-for",
        metavar="SECONDS",
        type=parse_seconds,
        default=retry_for,
        action=_RetryFor,
        help=f"retry for this long if no broker responds (default: {retry_for:g}{first})",
    )
    # A wrong address is reported soon, unless the user wants to wait.
    parser.set_defaults(answer_within=_ANSWER_SECONDS)


class _RetryFor(argparse.Action):
    """Sets the limit for the first response as well."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        namespace.retry_for = namespace.answer_within = values


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The broker that a command talks to, and how."""

    address: str
    is_named: bool
    """Whether the user named it, by option, environment or context."""
    token: str | None = field(default=None, repr=False)
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None

    @property
    def is_encrypted(self) -> bool:
        """Whether connections use TLS."""
        given = self.tls or self.ca_file or self.cert_file or self.key_file or self.server_name
        return bool(given) or self.address.startswith(("https://", "grpc+tls://"))

    def tls_options(self) -> TlsOptions | bool | None:
        """How connections are encrypted, for clients."""
        from ister.client import TlsOptions  # noqa: PLC0415

        if self.ca_file or self.cert_file or self.key_file or self.server_name:
            return TlsOptions(
                ca=self.ca_file,
                cert=self.cert_file,
                key=self.key_file,
                server_name=self.server_name,
            )
        return True if self.tls else None


class Broker:
    """The broker of a command, as its options name it."""

    RETRY_SECONDS: ClassVar = _ANSWER_SECONDS

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options

    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser) -> None:
        """Adds `--broker` and what goes with it."""
        add_broker_arguments(parser, retry_for=cls.RETRY_SECONDS)

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> Self:
        """The broker that was named."""
        return cls(options)

    @property
    def address(self) -> str:
        """Its address."""
        return broker_address(self.options)

    @property
    def is_named(self) -> bool:
        """Whether the user named it."""
        return names_broker(self.options)

    @property
    def retry_for(self) -> float:
        """How many seconds to retry if no broker responds."""
        return float(self.options.retry_for)

    def connect(self) -> AbstractContextManager[Client]:
        """A client; see `connected`."""
        return connected(self.options)

    def changed(self, text: str, *, ok: bool = True, **facts: object) -> Shown:
        """What a command has changed, and at which broker."""
        json = {"ok": ok, **facts, "broker": self.address}
        return Shown(json, f"{text} (broker {self.address})", ok)


class PatientBroker(Broker):
    """The broker of a command that runs for long."""

    RETRY_SECONDS: ClassVar = 60.0


def target_of(options: argparse.Namespace) -> Target:
    """The broker of a command; see the module header.

    Raises:
        NotFoundError: There is no such context.
        ConfigError: The contexts, or a token's file, cannot be read.
    """
    found: Target | None = getattr(options, "target", None)
    if found is None:
        found = options.target = _resolve(options)
    return found


def _resolve(options: argparse.Namespace) -> Target:
    environment = os.environ.get(_BROKER), os.environ.get(_TOKEN)
    is_chosen = options.context is not None
    if is_chosen:
        environment = None, None  # an option comes first
    context = None
    if is_chosen or not (options.broker or environment[0]):
        chosen = chosen_context(options)
        context = None if chosen is None else chosen[1]
    address = options.broker or environment[0]
    token = options.token or environment[1]
    is_named = bool(address or context)
    if context is None:
        context = Context(broker=BROKER_DEFAULT)
    is_tls_given = options.tls or options.ca_file
    return Target(
        address=address or context.broker,
        is_named=is_named,
        token=token or context.read_token() or None,
        tls=options.tls or context.tls,
        ca_file=options.ca_file if is_tls_given else context.ca_file,
        cert_file=options.cert_file or context.cert_file,
        key_file=options.key_file or context.key_file,
        server_name=options.server_name or context.server_name,
    )


def names_broker(options: argparse.Namespace) -> bool:
    """Whether the user named a broker."""
    return target_of(options).is_named


def broker_address(options: argparse.Namespace) -> str:
    """The address of the broker."""
    return target_of(options).address


FIXED_START_HELP: Final = (
    "earliest, latest, an offset, a time such as 2026-01-31T12:00:00Z (UTC without a zone), or "
    "milliseconds since 1970 such as @1769860800000"
)
"""What `parse_fixed_start` reads, for help texts."""
START_HELP: Final = FIXED_START_HELP.replace(", or ", ", ") + ", or an age such as 7d"
"""What `parse_start` reads, for help texts."""


def parse_seconds(text: str) -> float:
    """A length of time that is not negative, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number, 0 or higher")
    return seconds


def parse_count(text: str) -> int:
    """A number from 1 on, for argparse."""
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return int(text)


def parse_name(text: str) -> str:
    """A name of a subscription, a consumer or a producer, for argparse: any text in Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not valid Unicode") from error
    return text


def parse_start(text: str) -> Start:
    """A position in a topic, for argparse: earliest, latest, an offset, a time or an age.

    A time without a zone is in UTC, as all times are that commands print.
    """
    try:
        return parse_position(text, ages_from=SystemClock(), utc=True)
    except InvalidRequestError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def parse_fixed_start(text: str) -> Start:
    """A position that means the same in every run, for argparse: `parse_start` without ages."""
    start = parse_start(text)
    with suppress(InvalidRequestError):
        parse_position(text, utc=True)
        return start
    raise argparse.ArgumentTypeError(
        f"{text!r} is a different time in every run, so another run would not continue this one: "
        f"use {format_position(start)} or an offset"
    )


def existing_partitions(client: Client, topic: str) -> list[str]:
    """The topic itself, or its partitions.

    Raises:
        NotFoundError: It does not exist.
    """
    names = client.admin.partitions(topic)
    if not names:
        raise topic_not_found(topic)
    return names


# -- clients --------------------------------------------------------------------------------


@contextmanager
def connected(options: argparse.Namespace) -> Iterator[Client]:
    """A client for the broker that the arguments name; its errors have hints for a shell.

    Raises:
        ConfigError: The extra `ister[client]` is not installed, or a file cannot be read.
        IsterError: What calls raise.
    """
    from ister.client import Client  # noqa: PLC0415 - an extra, and it takes a while

    target = target_of(options)
    with explained(options):
        client = Client(
            target.address,
            token=target.token,
            tls=target.tls_options(),
            # What is done for a long time waits by itself, with a timeout of its own.
            timeout=min(options.retry_for, options.answer_within) or 0.1,
        )
        with client, _near_misses(client):
            yield client


@contextmanager
def explained(options: argparse.Namespace) -> Iterator[None]:
    """Adds hints for a shell to errors."""
    try:
        yield
    except UnauthenticatedError as error:
        error.hint = error.hint or f"--token, or {_TOKEN} in the environment, authenticates you"
        raise
    except PermissionDeniedError as error:
        error.hint = error.hint or (
            f"the principal of this token (--token, {_TOKEN}) lacks the permission"
        )
        raise
    except UnsupportedOperationError as error:
        error.hint = error.hint or "the broker may be older than this client"
        raise
    except NoAnswerError as error:
        raise _no_broker(options, error) from error


def _no_broker(options: argparse.Namespace, error: NoAnswerError) -> NoAnswerError:
    address, reason = broker_address(options), error.reason
    hint = f"start one with `ister up` or `ister serve`, or name yours with --broker or {_BROKER}"
    if "http1" in reason or address.endswith(f":{_HTTP_PORT}"):
        port = BROKER_DEFAULT.rpartition(":")[2]
        hint = f"this looks like the HTTP port; gRPC is on {port} by default"
    elif target_of(options).is_encrypted:
        hint += "; its certificate may be signed by a CA other than that of --ca-file, or name "
        hint += "another host (--server-name)"
    found = NoAnswerError(address, reason, hint=hint)
    found.message = f"no broker answers at {address}"
    if reason and "Connection refused" not in reason:
        found.message += f": {reason}"
    return found


@contextmanager
def _near_misses(client: Client) -> Iterator[None]:
    """Names similar topics if a topic does not exist."""
    try:
        yield
    except NotFoundError as error:
        with suppress(IsterError):
            if error.topic is not None and not client.admin.partitions(error.topic):
                error.hint = _similar(client, error.topic)
        raise


def _similar(client: Client, topic: str) -> str:
    names: set[str] = set()
    with suppress(IsterError):
        for namespace in {TopicName.parse(topic).namespace, *client.admin.namespaces()}:
            with suppress(NotFoundError):
                names.update(client.topics(namespace))
    near = _nearest(topic, names)
    if near:
        return f"did you mean {', '.join(near)}?"
    shown = ", ".join(sorted(names)[:10])
    return f"existing topics: {shown}" if names else "create it with `ister topics create`"


def _nearest(topic: str, names: Iterable[str]) -> list[str]:
    """Names whose last part is similar: the namespace makes all of its topics look alike."""
    by_part: dict[str, list[str]] = {}
    for name in sorted(names):
        by_part.setdefault(name.rpartition("/")[2], []).append(name)
    near = difflib.get_close_matches(topic.rpartition("/")[2], by_part)
    return [name for part in near for name in by_part[part]]
