"""RabbitMQ Streams: Debian's rabbitmq-server with its stream plugin, the client rstream."""

from __future__ import annotations

import asyncio
import importlib.metadata
import re
from collections.abc import Callable, Iterable
from pathlib import Path

import rstream

from benchmarks.peers import install
from benchmarks.peers.contender import Contender, Facts, MissingError, Quota, chunked
from benchmarks.peers.processes import Server, free_port, try_port, until

_BATCH = 1000
_PENDING = 10_000
_STORE_EVERY = 1000
_LOGIN = {"username": "guest", "password": "guest"}


class RabbitMqStreams(Contender):
    """A stream of one replica."""

    _server: Server | None = None
    _names: Server | None = None

    def facts(self) -> Facts:
        return Facts(
            server=f"RabbitMQ Streams {self._version}",
            client=f"rstream {importlib.metadata.version('rstream')} on uvloop, raw payloads",
            durability="a confirm comes before the sync; there is no setting for it",
            settings=f"one replica; batched: `send_batch` of {_BATCH:,}, {_PENDING:,} unconfirmed",
            consuming=f"the consumer's offset, stored after every {_STORE_EVERY:,} messages (one "
            "message cannot be acknowledged); replay: the same without it",
        )

    async def start(self) -> None:
        if self.is_synced:
            raise MissingError("streams are never synced before the answer")
        debian = install.debian_root(self.cache, "rabbitmq-server")
        (home,) = debian.root.glob("usr/lib/rabbitmq/lib/rabbitmq_server-*")
        self._version = home.name.rpartition("-")[2]
        erlang = debian.root / "usr/lib/erlang"
        _relocate(erlang)
        (self.directory / "enabled_plugins").write_text("[rabbitmq_stream].")
        self._port = free_port()
        (self.directory / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{free_port()}\n"
            f"stream.listeners.tcp.1 = 127.0.0.1:{self._port}\n"
            "stream.advertised_host = 127.0.0.1\n"
            f"stream.advertised_port = {self._port}\n"
            "log.console.level = warning\n"
        )
        environment = {
            **debian.environment,
            "HOME": str(self.directory),
            "ERL_EPMD_PORT": str(free_port()),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODENAME": "peers@localhost",
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_CONFIG_FILE": str(self.directory / "rabbitmq.conf"),
            "RABBITMQ_CONF_ENV_FILE": str(self.directory / "none"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.directory / "enabled_plugins"),
            "RABBITMQ_MNESIA_BASE": str(self.directory / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.directory / "logs"),
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        }
        log = self.directory / "log"
        # Otherwise Erlang starts one by itself, in the background, and leaves it behind.
        (epmd,) = erlang.glob("erts-*/bin/epmd")
        self._names = Server([str(epmd)], log, environment=environment)
        command = [str(home / "sbin" / "rabbitmq-server")]
        self._server = Server(command, log, environment=environment)
        await until(lambda: try_port(self._port), self._server)
        await until(self._connect, self._server)

    async def _connect(self) -> None:
        self._producer = rstream.Producer("127.0.0.1", self._port, **_LOGIN)
        await self._producer.start()

    async def open_topic(self, name: str) -> None:
        self.topic = name
        await until(lambda: self._producer.create_stream(name, exists_ok=True), self._server)

    async def stop(self) -> None:
        if self._server is not None:
            self._server.kill()
        if self._names is not None:
            self._names.kill()

    async def kill(self) -> None:
        await self.stop()

    def pids(self) -> list[int]:
        return [server.pid for server in (self._server, self._names) if server is not None]

    async def publish(self, payload: bytes) -> None:
        await self._producer.send_wait(self.topic, payload, timeout=60)

    async def publish_many(self, payloads: Iterable[bytes]) -> None:
        sent = confirmed = 0
        changed = asyncio.Event()

        def confirm(status: rstream.ConfirmationStatus) -> None:
            nonlocal confirmed
            if not status.is_confirmed:
                raise RuntimeError(f"not confirmed: {status}")
            confirmed += 1
            changed.set()

        async def wait(pending: int) -> None:
            while sent - confirmed > pending:
                changed.clear()
                await changed.wait()

        for chunk in chunked(payloads, _BATCH):
            sent += len(chunk)
            await self._producer.send_batch(self.topic, chunk, on_publish_confirm=confirm)
            await wait(_PENDING)
        await wait(0)

    async def _read(
        self,
        callback: Callable[..., object],
        kind: rstream.OffsetType,
        done: asyncio.Event,
        begun: Callable[[], None],
    ) -> None:
        consumer = rstream.Consumer("127.0.0.1", self._port, **_LOGIN)
        await consumer.start()
        try:
            begun()
            await consumer.subscribe(
                self.topic,
                callback,
                offset_specification=rstream.ConsumerOffsetSpecification(kind, None),
                initial_credit=50,
            )
            await done.wait()
        finally:
            await consumer.close()

    async def consume(self, name: str, quota: Quota) -> None:
        done = asyncio.Event()

        async def receive(_payload: bytes, context: rstream.MessageContext) -> None:
            if done.is_set():
                return
            goes_on = quota.take(1)
            if not goes_on or quota.count % _STORE_EVERY == 0:
                await context.consumer.store_offset(self.topic, name, context.offset)
            if not goes_on:
                quota.end()
                done.set()

        await self._read(receive, rstream.OffsetType.FIRST, done, quota.begin)

    async def replay(self, quota: Quota) -> None:
        done = asyncio.Event()

        def receive(_payload: bytes, _context: rstream.MessageContext) -> None:
            if not done.is_set() and not quota.take(1):
                done.set()

        await self._read(receive, rstream.OffsetType.FIRST, done, quota.begin)

    async def follow(self, on_message: Callable[[bytes], None], ready: asyncio.Event) -> None:
        consumer = rstream.Consumer("127.0.0.1", self._port, **_LOGIN)
        await consumer.start()
        await consumer.subscribe(
            self.topic,
            lambda payload, _context: on_message(payload),
            offset_specification=rstream.ConsumerOffsetSpecification(rstream.OffsetType.NEXT, None),
        )
        ready.set()
        try:
            await asyncio.Event().wait()
        finally:
            await consumer.close()

    async def stored(self) -> int:
        # The last chunk is read: a stream is not asked for its length.
        last = -1
        quiet = asyncio.Event()

        def receive(_payload: bytes, context: rstream.MessageContext) -> None:
            nonlocal last
            last = max(last, context.offset)
            asyncio.get_running_loop().call_later(0.2, settle, last)

        def settle(seen: int) -> None:
            if seen == last:
                quiet.set()

        await self._read(receive, rstream.OffsetType.LAST, quiet, lambda: None)
        return last + 1


def _relocate(erlang: Path) -> None:
    """Has an unpacked Erlang find itself: its start script has the path of an installed one."""
    script = erlang / "bin" / "erl"
    text = script.read_text()
    moved = re.sub(r"^( *)ROOTDIR=/usr/lib/erlang$", rf"\1ROOTDIR={erlang}", text, flags=re.M)
    if moved != text:
        script.write_text(moved)
