"""Whether a log accepts appends, and why not: its state, what holds appends back, its errors.

Appends are refused (the log is closed, failed, stalled on a full disk, or quarantined), or held
back for now, by name: by a low disk, by an upload backlog, by a lease that may have ended. What is
held waits until all holds have ended, or is refused with the reason of one.

Owns: `state`, the refusal, the holds, the appends that wait. Does not own: the buffer's space and
who writes it (`ister.wal.commit`). All methods that change something say who holds `lock`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from ister.base.metrics import Metrics
from ister.base.model import TopicState
from ister.errors import (
    CapacityError,
    ClosedError,
    CorruptDataError,
    InvalidRequestError,
    IsterError,
)
from ister.wal.buffer import AppendBuffer
from ister.wal.levels import Levels
from ister.wal.recovery import Damage
from ister.wal.settings import WalSettings
from ister.wal.signals import is_held
from ister.wal.waiters import ThreadWaiter


class Hold(NamedTuple):
    """What keeps appends back; the fields are the arguments of `AppendGate.hold`."""

    reason: Callable[[], IsterError]
    waits: bool
    on_append: Callable[[], None] | None


class AppendGate:
    """Lets appends pass, holds them back or refuses them; see the module header."""

    def __init__(
        self,
        buffer: AppendBuffer,
        levels: Levels,
        settings: WalSettings,
        *,
        damage: tuple[Damage, ...],
        metrics: Metrics,
    ) -> None:
        """With `damage`, the log is quarantined: it is read, and takes nothing."""
        self._buffer = buffer
        self._levels = levels
        self._lock = buffer.lock
        self._settings = settings
        self._metrics = metrics
        self._damage = damage
        self.state = TopicState.QUARANTINED if damage else TopicState.OPEN
        """Whether appends are accepted, and why not."""
        self.failure: IsterError | None = None
        """Why the writer stopped."""
        self.is_failure_told = False
        """Whether a call has got `failure`."""
        self.refusal: Callable[[], IsterError] | None = None
        """Creates the error of refused appends; None accepts them."""
        self.holds: dict[str, Hold] = {}
        """What keeps appends back for now, by name."""
        self.waiting: set[ThreadWaiter] = set()
        """The threads whose appends wait."""
        self.callbacks: list[Callable[[], None]] = []
        """Called once when waiting appends should be retried."""
        self._fork_error: ClosedError | None = None
        if damage:
            self.refuse(self._quarantine_error)

    # -- appends -------------------------------------------------------------------------------

    def enter(self) -> None:
        """Waits until no hold keeps appends back, or refuses the append; `lock` is held.

        Raises:
            IsterError: Appends are refused.
        """
        while True:
            if self.refusal is not None:
                self._metrics.count("wal.append_refused")
                raise self.refusal()
            if not self.holds:
                return
            for hold in self.holds.values():
                if self._refuses(hold):
                    self._metrics.count("wal.append_refused")
                    raise hold.reason()
            for hold in self.holds.values():
                if hold.on_append is not None:
                    hold.on_append()
            if _is_on_loop():
                self._metrics.count("wal.append_refused")
                raise _on_loop(hold.reason())
            self.wait(timeout=None)

    def wait(self, *, timeout: float | None) -> None:
        """Waits until a blocked append should be retried.

        Called with `lock` held; releases it while waiting.
        """
        waiter = ThreadWaiter(self._buffer.next)
        try:
            self.waiting.add(waiter)
            self._lock.release()
            waiter.block(timeout)
        finally:
            self.waiting.discard(waiter)
        self._lock.acquire()

    def wake(self) -> None:
        """Wakes all blocked appends; `lock` is held."""
        for waiter in tuple(self.waiting):
            waiter.finish(None)
        self.waiting = set()
        callbacks, self.callbacks = self.callbacks, []
        for on_room in callbacks:
            on_room()

    def notify_room(self, on_room: Callable[[], None]) -> bool:
        """Calls `on_room` once, in any thread, when a held append should be retried.

        It is called with `lock` held and must not block. For callers that cannot block in `enter`.

        Returns False if appends are refused and do not wait: the caller has to raise the error.
        """
        with self._lock:
            if self.refusal is not None:
                return False
            if not self.holds:
                if self._settings.blocks_when_full:
                    on_room()
                return self._settings.blocks_when_full
            if any(self._refuses(hold) for hold in self.holds.values()):
                return False
            self.callbacks.append(on_room)
            return True

    # -- holding appends back ------------------------------------------------------------------

    def hold(
        self,
        name: str,
        reason: Callable[[], IsterError],
        *,
        waits: bool,
        on_append: Callable[[], None] | None = None,
    ) -> None:
        """Keeps appends back until `unhold`.

        A second hold with the same name replaces it; `reason` creates the error of a refused
        append. With `waits`, appends wait for its end if the policy is to block; otherwise they are
        refused. With `on_append`, they wait whatever the policy is: it is called when an append
        begins to wait, with `lock` held, and has the hold ended soon without blocking itself.
        """
        with self._lock:
            self.holds[name] = Hold(reason, waits, on_append)
            self._buffer.is_refusing = True
            self.wake()

    def unhold(self, name: str) -> None:
        """Ends a hold, if it exists."""
        if name not in self.holds:
            return  # the common case: called for every topic at every renewal of the lease
        with self._lock:
            if self.holds.pop(name, None) is not None:
                self._buffer.is_refusing = self.refusal is not None or bool(self.holds)
                self.wake()

    def _refuses(self, hold: Hold) -> bool:
        """Whether appends are refused, instead of waiting for the end of a hold."""
        return hold.on_append is None and not (hold.waits and self._settings.blocks_when_full)

    # -- refusing them -------------------------------------------------------------------------

    def refuse(self, refusal: Callable[[], IsterError]) -> None:
        """Refuses appends from now on; `lock` is held."""
        self.refusal = refusal
        self._buffer.is_refusing = True

    def accept(self) -> None:
        """Ends the refusal, and wakes blocked appends; `lock` is held."""
        self.refusal = None
        self._buffer.is_refusing = bool(self.holds)
        self.wake()

    def close(self) -> None:
        """Refuses everything for good, unless the log has failed; `lock` is held."""
        if self.state is not TopicState.FAILED:
            self.state = TopicState.CLOSED
        self.refuse(self.closed_error)
        self.wake()

    def after_fork(self, error: ClosedError) -> None:
        """Refuses everything in a forked child."""
        self._fork_error = error
        self.state = TopicState.CLOSED
        self.refuse(self.closed_error)

    def check_process(self) -> None:
        """Refuses calls in a forked child.

        Raises:
            ClosedError: This process is a fork of the one that opened the log.
        """
        if self._fork_error is not None:
            raise self.closed_error()

    @property
    def holds_lock(self) -> bool:
        """Whether this thread holds `lock`, because a signal handler interrupted a call."""
        return is_held(self._lock)

    def check_reentry(self) -> None:
        """Refuses a call by a signal handler or a finalizer that interrupted one of this topic.

        It would wait forever, or find the state half changed.

        Raises:
            InvalidRequestError: This thread holds the lock.
        """
        if self.holds_lock:
            raise InvalidRequestError(
                "called by a signal handler or a finalizer (__del__) that interrupted a call to "
                "the same topic",
                topic=self._settings.topic,
                hint="set a flag or raise an exception there, and make this call later",
            )

    # -- errors --------------------------------------------------------------------------------

    def closed_error(self) -> IsterError:
        """The error of calls to a log that was closed, or whose writer has stopped."""
        topic = self._settings.topic
        if self._fork_error is not None:
            told = self._fork_error.again()
            told.topic = topic
            return told
        if self.failure is not None:
            self.is_failure_told = True
            error = ClosedError(
                f"the topic's writer stopped: {self.failure.message}",
                topic=topic,
                offset=self._levels.synced,
                path=self.failure.path,
                hint="open the topic again; what was acknowledged is recovered",
            )
            error.__cause__ = self.failure
            return error
        return ClosedError("the topic is closed", topic=topic)

    def stalled_error(self, cause: CapacityError) -> CapacityError:
        """The error of calls to a log that waits for space on its disk."""
        error = CapacityError(
            f"the topic cannot be written to: {cause.message}",
            topic=self._settings.topic,
            path=cause.path,
            hint="nothing acknowledged is lost; writing resumes when there is room",
        )
        error.__cause__ = cause
        return error

    def _quarantine_error(self) -> CorruptDataError:
        return self._damage[0].as_error(self._settings.topic)


def _is_on_loop() -> bool:
    """Whether the calling thread runs an event loop, which must not be blocked."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _on_loop(error: IsterError) -> IsterError:
    """Adds a hint to the error of a hold, for a caller that would block its event loop."""
    error.hint = f"`await topic.aio.append(…)` waits without blocking the event loop; {error.hint}"
    return error
