"""This broker's rounds: keeps its entry and its keys, leads if it can, follows the assignments.

    round ─► own entry ─► lead, if it can ─► open topics assigned here, hand over those that are not
    lease not renewed ─► ask other brokers who owns the topics, until it is

Owns: when these things happen. Does not own: the decisions (`ister.broker.cluster`), topics
(`topics`).

A round runs when something in the cluster has changed, and regularly because a watch is only a
hint. Changes of single assignments are followed one by one; all of them are read now and then.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Final

from ister.base import threads
from ister.broker.cluster.cluster import AssignmentChanges
from ister.broker.topics.topics import Topics
from ister.bucket.members import Load, MemberState
from ister.errors import IsterError, NotFoundError
from ister.metadata.base import Watch

_log = logging.getLogger("ister.broker.topics.assignee")

_ROUND_SECONDS_MAX: Final = 5.0
_LEASE_CHECK_SECONDS_MAX: Final = 0.5
# All topics are looked at this often although nothing seems to have changed.
_SWEEP_SECONDS: Final = 15.0
# Changes that arrive together are one round.
_GATHER_SECONDS: Final = 0.02
_MOVES_AT_ONCE: Final = 8
# A topic that could not be handed over is tried again after this time.
_RETRY_SECONDS: Final = 5.0
_ASSIGNMENTS: Final = "assignments"


class Assignee:
    """Runs this broker's rounds. Belongs to the broker's loop."""

    def __init__(self, topics: Topics, *, ttl_seconds: float, measure: Callable[[], Load]) -> None:
        """Runs rounds for a broker whose lease has `ttl_seconds` and whose load `measure` reads."""
        self._topics = topics
        self._cluster = topics.cluster
        self._ttl = ttl_seconds
        self._measure = measure
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._changed: set[str] = set()
        self._sweep_at = 0.0
        self._members: frozenset[tuple[str, MemberState]] = frozenset()
        self._retry_at: dict[str, float] = {}
        self._busy: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(_MOVES_AT_ONCE)
        self._cpu = (os.times(), self._loop.time())
        self._watch: Watch | None = None
        self._running: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Starts the rounds."""
        self._watch = await asyncio.to_thread(self._cluster.watch, self._on_change)
        self._running = [asyncio.create_task(self._run()), asyncio.create_task(self._watch_lease())]
        for task in self._running:
            threads.watch_task("ister-assignee", task)

    async def stop(self) -> None:
        """Ends the rounds, and waits for moves that are under way."""
        if self._watch is not None:
            await asyncio.to_thread(self._watch.close)
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, *self._tasks, return_exceptions=True)

    # -- rounds -----------------------------------------------------------------------------

    def _on_change(self, part: str) -> None:
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._record_change, part)

    def _record_change(self, part: str) -> None:
        kind, _, name = part.partition("/")
        if kind == _ASSIGNMENTS:
            self._changed.add(f"/{name}")
        elif kind == "brokers":
            self._cluster.members.expire()
        self._wake.set()

    async def _run(self) -> None:
        pause = min(_ROUND_SECONDS_MAX, self._ttl / 3)
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(self._wake.wait(), pause)
                await asyncio.sleep(_GATHER_SECONDS)
            self._wake.clear()
            with threads.guard("ister-assignee"):
                try:
                    await self.run_round()
                except IsterError as error:
                    _log.warning(
                        "the state of the cluster cannot be read", extra={"error": str(error)}
                    )

    async def _watch_lease(self) -> None:
        # Not in a round, which waits for the metadata store.
        while True:
            await asyncio.sleep(min(_LEASE_CHECK_SECONDS_MAX, self._ttl / 10))
            with threads.guard("ister-assignee"):
                await self._topics.check_lease()

    async def run_round(self) -> None:
        """One round."""
        cluster, now = self._cluster, self._loop.time()
        members = await asyncio.to_thread(cluster.members.recent)
        is_alone = all(one.node == cluster.own.node for one in members)
        # Nobody reads the load of a broker that is alone.
        load = None if is_alone else self._load(now)
        await asyncio.to_thread(cluster.members.publish, load=load)
        for lost in await asyncio.to_thread(cluster.renew_unlogged):
            self._topics.lose(lost)
        states = frozenset((one.node, one.state) for one in members)
        is_due = now >= self._sweep_at
        has_changed = states != self._members or is_due
        try:
            await asyncio.to_thread(cluster.lead, has_changed=has_changed)
        except IsterError as error:
            # The next round leads again; what is assigned here is followed all the same.
            _log.warning("topics not assigned", extra={"error": str(error)})
        else:
            self._members = states
            if is_due:
                self._sweep_at = now + max(_SWEEP_SECONDS, self._ttl)
        changed, self._changed = self._changed, set()
        await self._topics.check_read_only()
        await self._topics.give_up_tails()
        if is_alone:
            return
        if has_changed or changed:
            topics = None if has_changed else changed
            self._follow(await asyncio.to_thread(cluster.assignment_changes, topics), now)

    def _load(self, now: float) -> Load:
        used, at = self._cpu
        times = os.times()
        self._cpu = (times, now)
        seconds = (times.user + times.system) - (used.user + used.system)
        cpu = round(seconds / (now - at), 2) if now > at else 0.0
        measured = self._measure()
        return Load(
            topics=len(self._topics.served),
            messages_in=round(measured.messages_in),
            messages_out=round(measured.messages_out),
            bytes_in=round(measured.bytes_in),
            bytes_out=round(measured.bytes_out),
            cpu=cpu,
            upload_lag_bytes=measured.upload_lag_bytes,
            is_disk_low=measured.is_disk_low,
        )

    # -- following --------------------------------------------------------------------------

    def _follow(self, changes: AssignmentChanges, now: float) -> None:
        """Starts to open and hand over topics as assigned, several at a time."""
        self._retry_at = {name: at for name, at in self._retry_at.items() if at > now}
        for name in changes.opens:
            if self._topics.find_open(name) is None:
                self._begin(name, self._open(name))
        for name, node in changes.leaves.items():
            self._begin(name, self._leave(name, node))

    def _begin(self, name: str, work: Coroutine[object, object, None]) -> None:
        if name in self._busy or name in self._retry_at or self._topics.is_draining:
            work.close()
            return
        self._busy.add(name)
        task = self._loop.create_task(work)
        threads.watch_task("ister-assignee", task)
        self._tasks.add(task)

        def on_done(done: asyncio.Task[None]) -> None:
            self._tasks.discard(done)
            self._busy.discard(name)

        task.add_done_callback(on_done)

    async def _open(self, name: str) -> None:
        async with self._gate:
            try:
                await self._topics.get(name)
            except NotFoundError:
                pass  # assigned, and not created yet
            except IsterError as error:
                self._retry_at[name] = self._loop.time() + _RETRY_SECONDS
                _log.info("topic not opened", extra={"topic": name, "error": str(error)})

    async def _leave(self, name: str, node: str) -> None:
        async with self._gate:
            try:
                await self._topics.unload(name, to=node, reason="moved")
            except IsterError as error:
                self._retry_at[name] = self._loop.time() + _RETRY_SECONDS
                _log.warning("topic not handed over", extra={"topic": name, "error": str(error)})
