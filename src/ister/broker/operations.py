"""What each operation needs: a permission of the caller's, and what it has to be for.

    @needs(Permission.MANAGE_TOPIC, topic="topic")      checked, and audited, before the operation
    @checks("`lookup` on each topic")                   the operation asks the guard by itself

Operations are the methods of `ister.broker.services`, with wire messages as arguments. Every door
leads to them: gRPC serves them as they are; the HTTP API (`ister.broker.http.api`) makes their
requests and words their answers. So each operation checks its permission, is audited and is
forwarded to the broker that has the topic (`ister.broker.services.forwarding`) in one place.

Owns: the two marks, from which the table in docs/reference is written. Does not
own: who has a permission (`ister.broker.security`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import grpc

from ister.broker.rpc.handlers import Refused
from ister.broker.security.guard import Guard, current_principal
from ister.broker.security.rights import Permission
from ister.errors import ConflictError


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What an operation needs."""

    permission: Permission | None
    """None if the operation asks the guard by itself."""
    on: str = "cluster"
    """`topic`, `namespace` or `cluster`."""
    field: str = ""
    """The field of the request that names the topic or the namespace."""
    by_itself: str = ""
    """What it asks the guard for, if it does so by itself."""

    @property
    def words(self) -> str:
        """What the reference says of it."""
        if self.permission is None:
            return self.by_itself
        return f"`{self.permission.value}` on the {self.on}"


class Guarded(Protocol):
    """A service whose operations are checked."""

    guard: Guard


_Service = TypeVar("_Service", bound=Guarded)
_Request = TypeVar("_Request")
_Answer = TypeVar("_Answer")
_Operation = Callable[[_Service, _Request, object], Coroutine[object, object, _Answer]]
_Marked = TypeVar("_Marked", bound=Callable[..., object])


def needs(
    permission: Permission,
    *,
    topic: str = "",
    namespace: str = "",
    detail: Callable[[Any], str] = lambda _: "",
) -> Callable[[_Operation[_Service, _Request, _Answer]], _Operation[_Service, _Request, _Answer]]:
    """Refuses callers without a permission; on the topic or namespace in a field of the request.

    `detail` is what else the audit log says of a change.
    """
    on, field = ("topic", topic) if topic else ("namespace", namespace)
    need = Need(permission=permission, on=on if field else "cluster", field=field)

    def wrap(
        operation: _Operation[_Service, _Request, _Answer],
    ) -> _Operation[_Service, _Request, _Answer]:
        @functools.wraps(operation)
        async def checked(service: _Service, request: _Request, context: object) -> _Answer:
            resource = {on: getattr(request, field)} if field else {}
            service.guard.check(current_principal(), permission, detail=detail(request), **resource)
            return await operation(service, request, context)

        checked.need = need  # type: ignore[attr-defined]
        return checked

    return wrap


def checks(words: str) -> Callable[[_Marked], _Marked]:
    """Says what an operation asks the guard for by itself."""

    def mark(operation: _Marked) -> _Marked:
        operation.need = Need(permission=None, by_itself=words)  # type: ignore[attr-defined]
        return operation

    return mark


@contextmanager
def conflicts_refused() -> Iterator[None]:
    """Answers FAILED_PRECONDITION to conflicts, as Danube does: a retry does not help."""
    try:
        yield
    except ConflictError as error:
        raise Refused(grpc.StatusCode.FAILED_PRECONDITION, str(error)) from error


def need_of(operation: Callable[..., object]) -> Need:
    """What an operation needs."""
    need: Need = operation.need  # type: ignore[attr-defined]
    return need
