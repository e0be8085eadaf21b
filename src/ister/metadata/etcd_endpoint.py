"""One member of an etcd cluster: its address, channel, certificates and login."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

from ister.base.clock import Clock
from ister.config import EtcdTlsConfig
from ister.errors import ConfigError
from ister.metadata.etcd_errors import NotConnectedError, StreamEndedError, judge, map_refusal
from ister.metadata.etcd_tls import ClientTls, explain_refusal

Message: TypeAlias = Any
"""Any: `aetcd` has no types; its messages, stubs and modules do not leave `metadata`."""
_ANSWER_BYTES_MAX: Final = 64 * 1024 * 1024
"""Sixteen times gRPC's default. A page of large values that is still over it is asked smaller."""
_CONNECT_SECONDS_MAX: Final = 2.0
_RETIRE_SECONDS: Final = 30.0
"""How long calls on a replaced channel may still take; longer than any timeout."""
_CHANNEL_OPTIONS: Final = (
    ("grpc.max_receive_message_length", _ANSWER_BYTES_MAX),
    # A repeated change would break the promise that a store never repeats one.
    ("grpc.enable_retries", 0),
    # A server that came back is found soon; the pauses between calls are ours.
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 1000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Connections that died without a word are noticed while a watch is all that uses them.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    # Two stores of one process do not share the fate of a connection.
    ("grpc.use_local_subchannel_pool", 1),
)
# A member without a leader refuses at once what carries this, before it proposes anything.
_REQUIRE_LEADER: Final = ("hasleader", "true")
_ENDPOINT: Final = re.compile(
    r"(?:(?P<scheme>https?)://)?(?P<target>(?:\[[0-9a-fA-F:.]+\]|[^\s:/@\[\]]+):\d+)/?"
)


class Endpoint:
    """One member: its channel, and the token that it gave. Used on the loop's thread alone."""

    def __init__(
        self, rpc: Message, target: str, credentials: tuple[str, str] | None, tls: ClientTls | None
    ) -> None:
        self._rpc = rpc
        self._target = target
        self._credentials = credentials
        self._tls = tls
        self._tls_serial = 0
        self._retiring: set[asyncio.Task[None]] = set()
        self._channel: Message = None
        self._token: str | None = None
        self.kv: Message = None
        self.lease: Message = None
        self.watch: Message = None
        self.maintenance: Message = None

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What every call carries."""
        if self._token is None:
            return (_REQUIRE_LEADER,)
        return (_REQUIRE_LEADER, ("token", self._token))

    async def connect(self, timeout: float) -> None:
        """Returns when calls can be sent.

        Raises:
            NotConnectedError: The endpoint does not take a connection.
        """
        if self._tls is not None and self._tls.material().serial != self._tls_serial:
            # A channel keeps the certificates that it was created with.
            self._retire_channel()
        if self._channel is None:
            self._channel = self._open_channel()
            self.kv = self._rpc.KVStub(self._channel)
            self.lease = self._rpc.LeaseStub(self._channel)
            self.watch = self._rpc.WatchStub(self._channel)
            self.maintenance = self._rpc.MaintenanceStub(self._channel)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(timeout, _CONNECT_SECONDS_MAX)
        pause = 0.001
        # Asked again and again, because gRPC's own wait for a change of state does not end when
        # it is cancelled.
        while (state := self._channel.get_state(try_to_connect=True).name) != "READY":
            if state in ("TRANSIENT_FAILURE", "SHUTDOWN") or loop.time() >= deadline:
                raise NotConnectedError(f"no connection to {self._target}")
            await asyncio.sleep(pause)
            pause = min(pause * 2, 0.05)
        if self._credentials is not None and self._token is None:
            await self._authenticate(timeout)

    def _open_channel(self) -> Message:
        if self._tls is None:
            return self._rpc.insecure_channel(self._target, options=_CHANNEL_OPTIONS)
        loaded = self._tls.material()
        material, self._tls_serial = loaded.value, loaded.serial
        credentials = importlib.import_module("grpc").ssl_channel_credentials(
            root_certificates=material.authorities,
            private_key=material.key,
            certificate_chain=material.certificates,
        )
        return self._rpc.secure_channel(self._target, credentials, options=_CHANNEL_OPTIONS)

    def _retire_channel(self) -> None:
        """Closes the channel once its calls have ended; watches continue on the next one."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            task = asyncio.get_running_loop().create_task(channel.close(_RETIRE_SECONDS))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)

    async def explain(self) -> str | None:
        """The reason for a missing connection if it is TLS, else None."""
        why = await explain_refusal(self._target, self._tls)
        return None if why is None else f"{self._target}: {why}"

    async def _authenticate(self, timeout: float) -> None:
        name, password = self._credentials or ("", "")
        request = self._rpc.AuthenticateRequest(name=name, password=password)
        try:
            answer = await self._rpc.AuthStub(self._channel).Authenticate(request, timeout=timeout)
        except self._rpc.AioRpcError as error:
            if "authentication is not enabled" in (error.details() or ""):
                return
            if map_refusal(error, "log in", judge(error)) is not None:
                raise
            # Whatever was to be asked after this has not been sent.
            raise NotConnectedError(
                f"authentication failed at {self._target}: {error.details()}"
            ) from error
        self._token = answer.token

    def forget_token(self) -> None:
        """Has the next call log in again."""
        self._token = None

    async def call(self, method: Message, request: Message, timeout: float) -> Message:
        """One request and its answer."""
        return await method(request, timeout=timeout, metadata=self.metadata)

    async def keep_alive(self, lease_id: int, timeout: float) -> Message:
        """One renewal, on a stream of its own."""
        stream = self.lease.LeaseKeepAlive(timeout=timeout, metadata=self.metadata)
        try:
            await stream.write(self._rpc.LeaseKeepAliveRequest(ID=lease_id))
            answer = await stream.read()
            if not hasattr(answer, "TTL"):
                # The end of the stream, without an answer: its status says why.
                raise StreamEndedError(f"renewal ended: {await stream.details()}")
            return answer
        finally:
            stream.cancel()

    async def close(self) -> None:
        """Lets go of the connection."""
        if self._channel is not None:
            channel, self._channel = self._channel, None
            await channel.close()


def parse_endpoints(
    endpoints: Sequence[str], config: EtcdTlsConfig, clock: Clock
) -> tuple[list[str], ClientTls | None]:
    """Parses endpoints into host:port targets and certificates; None without TLS."""
    schemes, targets = set(), []
    for endpoint in endpoints:
        match = _ENDPOINT.fullmatch(endpoint)
        if match is None:
            # Not repeated here: it may hold a password.
            raise ConfigError("etcd: an endpoint does not have the form host:port")
        schemes.add(match["scheme"])
        targets.append(match["target"])
    has_files = config != EtcdTlsConfig()
    if not has_files and "https" not in schemes:
        return targets, None
    if "http" in schemes:
        raise ConfigError(
            "etcd: an endpoint begins with http://, but "
            + ("storage.metadata.tls is set" if has_files else "another one begins with https://"),
            hint="use https:// for all endpoints; or http://, and remove storage.metadata.tls",
        )
    return targets, ClientTls(config, clock=clock)


def load_rpc() -> Message:
    """Imports the messages and stubs of `aetcd`.

    Raises:
        ConfigError: It is not installed.
    """
    # gRPC's fork handlers complain on stderr about forks that only start another program.
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
    try:
        return importlib.import_module("aetcd.rpc")
    except ImportError as error:
        raise ConfigError(
            "etcd: the package aetcd is not installed", hint="pip install 'ister[etcd]'"
        ) from error
