"""The engine of grpcio: a server on the broker's loop.

    call ─► coroutine of grpc.aio ─► guard ─► the method
                                         └──► calls that arrive together ─► its batch form

Owns: how methods are added to the server, and which calls make up a batch. Does not own: the server
and its ports (`server`), methods (`methods`), permissions (`ister.broker.security`).

grpc.aio hands over one call at a time. A call is handled at once if no other call of its method is
in progress; calls that arrive before those are answered become the next batch. So a batch is what
arrives during a sync of the disk. No call waits for longer than `_WINDOW_SECONDS`: one topic's slow
sync must not hold up another topic's calls.

Invariant: each call ends once: answered, refused or deferred. A crash leaves calls without answers.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Sequence
from typing import Final, TypeAlias, cast

import grpc

from ister.broker.rpc.batch_calls import BatchCall
from ister.broker.rpc.handlers import Context, explained
from ister.broker.rpc.methods import BatchForm, Handler, Method, check_size
from ister.broker.security.guard import Caller, current_caller
from ister.errors import IsterError
from ister.wire.errors import ANSWERED

_WINDOW_SECONDS: Final = 0.002

_Outcome: TypeAlias = bytes | tuple[grpc.StatusCode, str] | None
"""The answer, or the status and text of a refusal; None if the call was deferred."""


def add_methods(server: grpc.aio.Server, methods: Iterable[Method]) -> None:
    """Adds methods to a server of grpc.aio."""
    services: dict[str, dict[str, grpc.RpcMethodHandler]] = {}
    for method in methods:
        handle = method.handle if method.batch is None else _batched(method, method.batch)
        services.setdefault(method.service, {})[method.name] = method.grpc_handler(handle)
    server.add_generic_rpc_handlers(
        tuple(grpc.method_handlers_generic_handler(name, found) for name, found in services.items())
    )


class _Batches:
    """Collects the calls of one method. Used on the loop."""

    def __init__(self, method: Method, batch: BatchForm) -> None:
        self.method = method
        self._batch = batch
        self._calls: list[_LoopCall] = []
        self._unanswered = 0
        self._timer: asyncio.TimerHandle | None = None
        self.loop = asyncio.get_running_loop()
        self.thread = threading.get_ident()

    def add(self, call: _LoopCall) -> None:
        """Adds a call that has arrived."""
        if not self._calls:
            if self._unanswered:
                self._timer = self.loop.call_later(_WINDOW_SECONDS, self._hand_over)
            else:
                self.loop.call_soon(self._hand_over)
        self._calls.append(call)

    def _hand_over(self) -> None:
        """Hands the collected calls to the batch form."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        calls, self._calls = self._calls, []
        self._unanswered += len(calls)
        try:
            for appended in self._batch.handle(calls):
                appended.notify()
        except Exception as error:  # noqa: BLE001 - a bug, sent to the clients
            for call in calls:
                call.refuse(error)

    def record_end(self) -> None:
        """Counts a call that was answered, refused or deferred."""
        self._unanswered -= 1
        if not self._unanswered and self._calls:
            self._hand_over()


class _LoopCall(BatchCall):
    """A call whose coroutine waits on the loop."""

    __slots__ = ("batches", "is_over", "outcome")

    def __init__(self, data: bytes, caller: Caller | None, batches: _Batches) -> None:
        super().__init__(data, caller, time.monotonic())
        self.batches = batches
        self.is_over = False
        """Whether it was answered, refused or deferred."""
        self.outcome: asyncio.Future[_Outcome]
        self.outcome = batches.loop.create_future()

    def refuse(self, error: Exception) -> None:
        """Ends the call with the status of an error."""
        self._set_on_loop([self], [explained(error, self.batches.method.where)])

    def defer(self) -> None:
        """Lets the coroutine continue with the ordinary form."""
        self._set_on_loop([self], [None])

    @staticmethod
    def answer_all(calls: Sequence[BatchCall], answers: Sequence[bytes]) -> None:
        """Wakes the coroutines, all with one call of the loop."""
        first = calls[0]
        assert isinstance(first, _LoopCall)  # noqa: S101 - for mypy
        first._set_on_loop(calls, answers)  # noqa: SLF001 - of this class

    def _set_on_loop(self, calls: Sequence[BatchCall], outcomes: Sequence[_Outcome]) -> None:
        batches = self.batches
        if threading.get_ident() == batches.thread:
            _set_all(calls, outcomes)
        else:
            batches.loop.call_soon_threadsafe(_set_all, calls, outcomes)


def _set_all(calls: Sequence[BatchCall], outcomes: Sequence[_Outcome]) -> None:
    for call, outcome in zip(cast("Sequence[_LoopCall]", calls), outcomes, strict=True):
        if not call.is_over:
            call.is_over = True
            if not call.outcome.done():  # a caller that has left gets no answer
                call.outcome.set_result(outcome)
            call.batches.record_end()


def _batched(method: Method, batch: BatchForm) -> Handler:
    """Returns a method's handler that collects its calls into batches."""
    gate, counters = method.gate, method.counters
    batches: _Batches | None = None

    async def handle(data: bytes, context: Context) -> bytes:
        nonlocal batches
        outcome: _Outcome
        try:
            check_size(data, batch.size_max)
            gate.enter()
        except IsterError as error:
            outcome = explained(error, method.where)
        else:
            batches = batches or _Batches(method, batch)
            call = _LoopCall(data, current_caller(), batches)
            batches.add(call)
            try:
                outcome = await call.outcome
            except asyncio.CancelledError:
                counters.count_refused("CANCELLED")
                raise
            finally:
                gate.leave()
            if type(outcome) is bytes:
                counters.count_answers(1, time.monotonic() - call.arrived)
                return outcome
        if outcome is None:
            return await method.handle(data, context)
        assert type(outcome) is tuple  # noqa: S101 - for mypy
        status, text = outcome
        counters.count_refused(status.name)
        # As in `unary_handler`: what `abort` raises keeps everything that this frame holds.
        data = b""
        await context.abort(status, text, ANSWERED)
        raise AssertionError("abort raises")

    return handle
