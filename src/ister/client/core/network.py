"""Connections to brokers: which of them has a topic, calls, tokens, encryption.

Owns: channels, one or more per broker, and what is known of where topics are. Does not own:
streams (`senders`, `receivers`), which it opens for those who run them.

    a topic ─ TopicLookup at any broker ─► the broker that has it ─ Info ─► its Flight port

Belongs to one loop. What is known is forgotten when a call fails, and asked for again.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

from ister import wire
from ister.base import forks, threads
from ister.base.extras import missing_extra
from ister.base.model import TopicName
from ister.base.retry import AsyncRetry, can_retry
from ister.client.options import (
    TlsOptions,
    Token,
    parse_addresses,
    parse_token,
    parse_url,
    reachable,
)
from ister.client.tls_probe import find_tls_mismatch
from ister.errors import (
    ClosedError,
    InvalidRequestError,
    IsterError,
    NoAnswerError,
    NotFoundError,
    UnavailableError,
)
from ister.topic.arguments import as_timeout
from ister.wire.errors import error_of

if TYPE_CHECKING:
    import grpc
    from google.protobuf.message import Message

    from ister.client.flight import FlightClient

_Request = TypeVar("_Request", bound="Message")
_Response = TypeVar("_Response", bound="Message")
_Result = TypeVar("_Result")

_CALL_SECONDS: Final = 10.0
# The last attempt of a call takes so long at least: an error then says more than that time is up.
_ATTEMPT_SECONDS_MIN: Final = 1.0
DEFAULT_TIMEOUT_SECONDS = 10.0
"""How long a call is retried, unless the client has a timeout."""
# A look-up that takes longer is tried at another broker, if one is known.
_LOOKUP_SECONDS: Final = 3.0
_LEARNED_MAX: Final = 32
# How often producers and consumers of a partitioned topic look for new partitions.
_PARTITIONS_SECONDS: Final = 30.0
# Attempts to detect TLS at a port: the broker may still be starting when the first ones fail.
_PROBES_MAX: Final = 8
# A connection carries a bounded number of streams, and a call beyond it waits without a word.
_STREAMS_PER_CHANNEL: Final = 64
_OPTIONS: Final = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A broker that was restarted is found again soon: unless told, gRPC waits up to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 300),
    # Clients of one process share no connection, so that none uses up another's streams.
    ("grpc.use_local_subchannel_pool", 1),
]
# A connection that breaks silently is noticed within twenty seconds.
_KEEPALIVE: Final = [("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 8_000)]
# Flight's server takes more pings than that for an attack; answers are waited for with a limit.
_FLIGHT_KEEPALIVE: Final = [
    ("grpc.keepalive_time_ms", 330_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class Route(NamedTuple):
    """The broker to go to."""

    address: str
    headers: tuple[tuple[str, str], ...] = ()
    """What a proxy needs to find it."""


class Network:
    """See the module header."""

    def __init__(
        self,
        addresses: str | Sequence[str],
        *,
        token: Token | None = None,
        tls: TlsOptions | bool | None = None,
        timeout: float | None = None,
    ) -> None:
        """Connects when it is first needed.

        Raises:
            ConfigError: gRPC, protobuf or pyarrow is not installed, or a file cannot be read.
            InvalidRequestError: An address or the timeout is invalid.
        """
        # Errors are raised or logged; gRPC's own lines on standard error add nothing to them.
        os.environ.setdefault("GRPC_VERBOSITY", "NONE")
        try:
            import grpc  # noqa: PLC0415 - an extra
            import pyarrow  # noqa: F401, PLC0415

            from ister.wire import protos  # noqa: F401, PLC0415
        except ImportError as error:
            raise missing_extra("the client", "client", error) from error
        if token is not None and not (isinstance(token, str) or callable(token)):
            raise InvalidRequestError(
                f"token must be a str or a function, not {type(token).__name__}"
            )
        self.timeout = as_timeout(timeout, is_positive=True)
        """How long producers, consumers and reads retry; None for ever."""
        self._call_timeout = DEFAULT_TIMEOUT_SECONDS if timeout is None else self.timeout
        self._grpc = grpc
        self._addresses, self._tls = parse_addresses(addresses, tls)
        self._credentials = self._make_credentials()
        self._token = parse_token(token) if isinstance(token, str) else token
        self._home = 0
        # Brokers that look-ups have returned: asked if those above do not answer.
        self._learned: list[str] = []
        self._channels: dict[tuple[str, str], grpc.aio.Channel] = {}
        self._flight: dict[str, str] = {}
        self._streams: dict[str, int] = {}
        self._answering: set[str] = set()
        self._probes: dict[str, int] = {}
        self._is_closed = False
        self._fork_error: ClosedError | None = None
        forks.register(self)

    def _after_fork(self, error: ClosedError) -> None:
        """Abandons the parent's connections without closing them; see `ister.base.forks`."""
        forks.leak(*self._channels.values())
        self._channels = {}
        self._fork_error, self._is_closed = error, True

    def _make_credentials(self) -> grpc.ChannelCredentials | None:
        if self._tls is None:
            return None
        ca, cert, key = self._tls.texts()
        return self._grpc.ssl_channel_credentials(
            root_certificates=ca, private_key=key, certificate_chain=cert
        )

    # -- channels ---------------------------------------------------------------------------

    def _channel(self, address: str, purpose: str) -> grpc.aio.Channel:
        if self._fork_error is not None:
            raise self._fork_error.again()
        if self._is_closed:
            raise ClosedError("the client is closed")
        found = self._channels.get((address, purpose))
        if found is None:
            if not self._channels:
                forks.GRPC.use()
            is_flight = purpose.startswith("flight")
            options: list[tuple[str, int | str]] = [
                *_OPTIONS,
                *(_FLIGHT_KEEPALIVE if is_flight else _KEEPALIVE),
            ]
            if self._tls is not None and self._tls.server_name is not None:
                options.append(("grpc.ssl_target_name_override", self._tls.server_name))
            aio = self._grpc.aio
            found = (
                aio.insecure_channel(address, options=options)
                if self._credentials is None
                else aio.secure_channel(address, self._credentials, options=options)
            )
            self._channels[address, purpose] = found
        return found

    def channel_for_stream(self, address: str, purpose: str = "streams") -> grpc.aio.Channel:
        """A channel with room for a long stream: a connection takes a limited number of them."""
        number = self._streams.get(address, 0)
        self._streams[address] = number + 1
        return self._channel(address, f"{purpose}-{number // _STREAMS_PER_CHANNEL}")

    def stream_ended(self, address: str) -> None:
        """Makes room again."""
        self._streams[address] -= 1

    def headers(self, route: Route | None = None) -> tuple[tuple[str, str], ...]:
        """What each call carries.

        Raises:
            ConfigError: What gives the token has given something else.
        """
        more = () if route is None else route.headers
        token = self._token
        if token is None:
            return more
        if not isinstance(token, str):
            token = parse_token(token())
        return (*more, ("authorization", f"Bearer {token}"))

    @property
    def can_renew_token(self) -> bool:
        """Whether a token that has expired is followed by another."""
        return callable(self._token)

    # -- finding ----------------------------------------------------------------------------

    @property
    def home(self) -> Route:
        """A broker to ask anything."""
        known = self._known
        return Route(known[self._home % len(known)])

    @property
    def _known(self) -> list[str]:
        return self._addresses + self._learned

    @property
    def _lookup_seconds(self) -> float:
        return _LOOKUP_SECONDS if len(self._known) > 1 else _CALL_SECONDS

    def _learn(self, address: str) -> None:
        if address not in self._known:
            # The newest are kept.
            self._learned = [*self._learned[1 - _LEARNED_MAX :], address]

    def _leave_home(self) -> None:
        """Makes the next call go to another broker."""
        self._home = (self._home + 1) % len(self._known)

    async def locate(
        self, topic: str, *, or_home: bool = False, answer_within: float = math.inf
    ) -> Route:
        """The broker that has a topic; the one that is asked may take `answer_within` seconds.

        `or_home` takes any broker if there is no such topic yet.

        Raises:
            NotFoundError: There is no such topic.
            UnavailableError: No broker answers.
        """
        at = self.home
        try:
            found = await self._look_up(at, topic, min(self._lookup_seconds, answer_within))
        except NotFoundError:
            if or_home:
                return at
            raise
        except UnavailableError:
            self._leave_home()
            raise
        kinds = wire.danube.TopicLookupResponse.LookupType
        if found.response_type == kinds.Value("Failed"):
            raise UnavailableError("no broker has the topic at the moment", topic=topic)
        if found.proxy:
            address, _ = parse_url(found.connect_url)
            return Route(address, (("x-danube-broker-url", found.broker_url),))
        if found.response_type == kinds.Value("Connect"):
            # This broker, which has just been reached: by this address, whatever it calls itself.
            return at
        route = Route(parse_url(found.connect_url)[0])
        self._learn(route.address)
        return route

    async def check_owner(self, route: Route, topic: str, *, answer_within: float) -> None:
        """Checks that a broker responds, and has a topic.

        Raises:
            IsterError: It does not.
        """
        found = await self._look_up(route, topic, answer_within)
        if found.response_type != wire.danube.TopicLookupResponse.LookupType.Value("Connect"):
            raise UnavailableError(f"{route.address} does not have the topic", topic=topic)

    async def _look_up(
        self, at: Route, topic: str, answer_within: float
    ) -> wire.danube.TopicLookupResponse:
        request = wire.danube.TopicLookupRequest(topic=topic)
        rpc = wire.services.Discovery.TopicLookup
        return await self.call_at(at, rpc, request, topic=topic, answer_within=answer_within)

    async def flight_address(self, route: Route) -> str:
        """Where a broker's Flight port is."""
        known = self._flight.get(route.address)
        if known is None:
            info = await self.call_at(route, wire.services.Admin.Info, wire.ister_api.InfoRequest())
            known = self._flight[route.address] = reachable(info.flight_url, route.address)
        return known

    async def locate_flight(self, topic: str) -> list[tuple[str, str]]:
        """The topics behind a name, and the Flight address of the broker that has each.

        Raises:
            NotFoundError: There is no such topic.
            UnavailableError: No broker answers.
        """
        names = await self.partitions(topic)
        if not names:
            raise NotFoundError(f"topic {topic} does not exist", topic=topic)
        return [(name, await self.flight_address(await self.locate(name))) for name in names]

    def open_flight(self, address: str) -> FlightClient:
        """A blocking client of a broker's Flight port, for any thread; the caller closes it."""
        from ister.client.flight import FlightClient  # noqa: PLC0415 - the reader's alone

        token = self._token() if callable(self._token) else self._token
        if self._tls is None:
            return FlightClient(f"grpc://{address}", token=token)
        ca, cert, key = self._tls.texts()
        return FlightClient(
            f"grpc+tls://{address}",
            token=token,
            tls_ca=ca,
            tls_cert=cert,
            tls_key=key,
            server_name=self._tls.server_name,
        )

    def record_failure(self, route: Route, error: IsterError) -> None:
        """Makes the next look-up go elsewhere after a stream has failed.

        A broker that is cut off from the others may take itself for the owner of a topic. Its ports
        are asked for again, because it may be another one by now.
        """
        self._flight.pop(route.address, None)
        if can_retry(error) and self.home.address == route.address:
            self._leave_home()

    async def partitions(self, topic: str) -> list[str]:
        """The topics behind a name: itself, or its partitions in order; none if there is none.

        Raises:
            TopicNameError: Not a name.
            IsterError: No broker has answered in time.
        """
        TopicName.parse(topic)
        request = wire.danube.TopicLookupRequest(topic=topic)
        found = await self.call(
            wire.services.Discovery.TopicPartitions, request, answer_within=self._lookup_seconds
        )
        return list(found.partitions)

    async def grown_partitions(self, topic: str, known: Collection[str]) -> list[str]:
        """Waits until a topic has partitions that are not known; returns all of them."""
        while True:
            await asyncio.sleep(_PARTITIONS_SECONDS)
            with contextlib.suppress(IsterError):  # the streams report it, if it matters
                names = await self.partitions(topic)
                if any(name not in known for name in names):
                    return names

    # -- calls ------------------------------------------------------------------------------

    async def call_at(
        self,
        route: Route,
        rpc: wire.Rpc[_Request, _Response],
        request: _Request,
        *,
        topic: str | None = None,
        answer_within: float = _CALL_SECONDS,
    ) -> _Response:
        """Calls one broker, once.

        Raises:
            ConfigError: It uses TLS and this client does not, or the other way round.
            IsterError: What it has answered, or that it has not.
        """
        address = route.address
        channel = self._channel(address, "calls")
        call = rpc.call(channel, request, timeout=answer_within, metadata=self.headers(route))
        try:
            found = await self.answered(call, address, topic)
        except UnavailableError as error:
            await self._check_tls(address, error)
            raise
        self._answering.add(address)
        return found

    async def _check_tls(self, address: str, error: UnavailableError) -> None:
        """Raises a better error than `error` if TLS is why an address has never answered."""
        probes = self._probes.get(address, 0)
        if address in self._answering or probes == _PROBES_MAX or threads.have_pools_ended():
            return
        self._probes[address] = probes + 1
        mismatch = await asyncio.to_thread(
            find_tls_mismatch, address, is_encrypted=self._tls is not None
        )
        if mismatch is not None:
            raise mismatch from error

    async def answered(
        self, waiting: Awaitable[_Result], address: str, topic: str | None
    ) -> _Result:
        """What a call or a step of a stream gives.

        Raises:
            IsterError: In place of gRPC's errors.
        """
        try:
            return await waiting
        except self._grpc.aio.AioRpcError as error:
            raise error_of(error, address, topic) from error
        except (asyncio.InvalidStateError, self._grpc.aio.UsageError) as error:
            raise UnavailableError(f"the stream to {address} has ended", topic=topic) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._is_closed and not (task is not None and task.cancelling()):
                raise ClosedError("the client is closed", topic=topic) from None
            raise

    async def call(
        self,
        rpc: wire.Rpc[_Request, _Response],
        request: _Request,
        *,
        topic: str | None = None,
        done_before: type[IsterError] | None = None,
        answer_within: float = _CALL_SECONDS,
    ) -> _Response:
        """Calls the broker that has a topic, or any; retries until one responds.

        Args:
            rpc: The RPC.
            request: Its request.
            topic: The topic whose broker to call; None for any broker.
            done_before: The error of a second attempt if the first was carried out and its
                response lost. An empty response is returned then.
            answer_within: How many seconds one attempt may take.

        Raises:
            IsterError: The call was refused, or no broker responded in time.
        """
        retries, silent = AsyncRetry(self._call_timeout), dict[str, None]()
        retries.start()
        while True:
            left = max(retries.seconds_left(), _ATTEMPT_SECONDS_MIN)
            # What takes longer than other calls, as moves do, is not cut off.
            within = min(answer_within, left) if answer_within <= _CALL_SECONDS else answer_within
            try:
                route = self.home if topic is None else await self.locate(topic, answer_within=left)
                return await self.call_at(route, rpc, request, topic=topic, answer_within=within)
            except IsterError as error:
                if done_before is not None and retries.failures and isinstance(error, done_before):
                    return rpc.parse(b"")
                if isinstance(error, NoAnswerError):
                    silent[error.address] = None
                if topic is None and isinstance(error, UnavailableError):
                    self._leave_home()
                try:
                    await retries.pause(error)
                except NoAnswerError as last:
                    raise self._none_answers(last, silent) from last

    def _none_answers(self, last: NoAnswerError, silent: Iterable[str]) -> NoAnswerError:
        """The error of a call that no broker has answered; `silent` are those that were called."""
        return NoAnswerError(
            ",".join(silent),
            last.reason,
            topic=last.topic,
            within=self._call_timeout,
            hint="check that `ister serve` runs there; `Client(timeout=...)` sets how long calls "
            "are retried",
        )

    # -- the end ----------------------------------------------------------------------------

    async def close(self) -> None:
        """Ends all connections. May be called twice."""
        self._is_closed = True
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            await channel.close()
        if channels:
            forks.GRPC.release()

    def __repr__(self) -> str:
        return f"<Network {','.join(self._addresses)}>"
