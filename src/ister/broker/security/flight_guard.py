"""The guard in front of every Flight call.

Flight tells nothing about the certificate of a client before a handler runs, so the guard works in
two steps: a middleware looks at the headers and refuses bad credentials; `FlightAccess.caller`,
which every handler calls first, gives the caller, or refuses a call that nobody vouches for.

A stream asks `check` again while it runs. That judges the credentials too, at most once a second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pyarrow import flight

from ister.broker.security.authentication import collect_headers
from ister.broker.security.guard import Caller, Guard, entered
from ister.broker.security.rights import Permission
from ister.client.contract import encode_error
from ister.errors import UnauthenticatedError

__all__ = ["FlightAccess", "FlightCaller"]

_NAME: Final = "ister-guard"


class _FlightGuard(flight.ServerMiddlewareFactory):  # type: ignore[misc]
    """Looks at the headers of every call of a Flight server."""

    def __init__(self, guard: Guard) -> None:
        super().__init__()
        self._guard = guard

    def start_call(self, info: Any, headers: dict[str, list[str]]) -> flight.ServerMiddleware:  # noqa: ANN401
        """Refuses bad credentials; called by Flight with every call."""
        action = f"flight/{str(info.method).rpartition('.')[2].lower()}"
        pairs = [(name, value) for name, values in headers.items() for value in values]
        guard = self._guard
        try:
            found = collect_headers(pairs)
        except UnauthenticatedError as error:
            guard.note_refused_login(error, action=action)
            raise _refusal(error) from error
        if not found and guard.takes_certificates:
            return _Call(None, action)
        try:
            return _Call(guard.enter(found, action=action, is_stream=True), action)
        except UnauthenticatedError as error:
            raise _refusal(error) from error


class _Call(flight.ServerMiddleware):  # type: ignore[misc]
    """What is known of a call from its headers."""

    def __init__(self, caller: Caller | None, action: str) -> None:
        super().__init__()
        self.caller = caller
        self.action = action


class FlightAccess:
    """A guard as `ister.broker.flight` wants it."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard

    @property
    def middleware(self) -> Mapping[str, Any]:
        """Flight's middleware factories, by name."""
        return {_NAME: _FlightGuard(self._guard)}

    def caller(self, context: flight.ServerCallContext) -> FlightCaller:
        """Who makes a call.

        Raises:
            UnauthenticatedError: Nobody knows, or the middleware is not in front of the server.
        """
        call = context.get_middleware(_NAME)
        if not isinstance(call, _Call):
            raise UnauthenticatedError("nobody has looked at the caller's credentials")
        peer = str(context.peer())
        if call.caller is None:
            identity = context.peer_identity()
            names = [identity.decode("utf-8", "replace")] if identity else []
            call.caller = self._guard.enter(
                {}, peer_names=names, peer=peer, action=call.action, is_stream=True
            )
        call.caller.peer = peer
        return FlightCaller(self._guard, call.caller)


class FlightCaller:
    """Who makes a Flight call, and whether they may."""

    def __init__(self, guard: Guard, caller: Caller) -> None:
        self._guard = guard
        self._caller = caller

    @property
    def name(self) -> str:
        """Whom to count it for; "" for anybody."""
        return str(self._caller.principal) if self._guard.is_on else ""

    def check(self, permission: Permission, *, topic: str | None = None) -> None:
        """Lets a call go on.

        Raises:
            PermissionDeniedError: The caller may not do that, or not any more.
            UnauthenticatedError: The credentials are no longer good.
            UnavailableError: It is not known at the moment.
        """
        self._caller.verify()
        with entered(self._caller):
            self._guard.check(self._caller.principal, permission, topic=topic)

    def allows(self, permission: Permission, *, topic: str) -> bool:
        """Whether the caller may; raises UnavailableError as `check` does."""
        return self._guard.allows(self._caller.principal, permission, topic=topic)


def _refusal(error: UnauthenticatedError) -> flight.FlightUnauthenticatedError:
    return flight.FlightUnauthenticatedError(encode_error(error))
