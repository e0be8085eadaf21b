"""Authenticates callers and checks their permissions, for all services.

    caller = guard.enter(headers, certificate=…, peer=…, action=…)   a transport, once a call
    guard.check(principal, Permission.PRODUCE, topic=name)           a service, before it acts

Owns: the way from credentials to a principal (remembered for a few seconds by their digest), the
judgement of rights, and that refusals and changes get into the audit log. With auth off everybody
is anonymous and may do everything.

A call that goes on and on is judged again while it does: whatever it was allowed is remembered in
its `Caller`, and `Caller.verify` refuses as soon as the credentials or one of the rights are gone.
The transports call it about once a second for every stream.

Nothing here knows a transport. A service that forgets to ask is not protected; a call without
a principal has no rights.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Protocol, Self

from ister.base.clock import Clock
from ister.base.model import TopicName
from ister.broker.security.access import AccessControl
from ister.broker.security.audit import AuditLog, Outcome
from ister.broker.security.authentication import CREDENTIAL_HEADERS, Authenticator
from ister.broker.security.principal import ANONYMOUS, Principal
from ister.broker.security.rights import MANAGE_PERMISSIONS, Permission
from ister.config import AuthMode, ClientAuth, Config
from ister.errors import ConfigError, PermissionDeniedError, UnauthenticatedError
from ister.metadata.base import MetadataStore

VERIFY_SECONDS: Final = 1.0
"""How often a stream's caller is judged again."""

REFUSAL_SECONDS: Final = 1.0
"""How long the refusal of a stream takes. Danube's client opens a refused stream again at once, and
for ever."""

_REMEMBERED_SECONDS: Final = 5.0
_REMEMBERED_MAX: Final = 4096
_REFUSALS_WAITING_MAX: Final = 256
_CHECKS_PER_CALL_MAX: Final = 64


@dataclass(frozen=True, slots=True)
class _Check:
    """A right that a call made use of."""

    permission: Permission
    topic: str | None
    namespace: str | None


class Restricted(Protocol):
    """A subscription that may be restricted to principals."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def principals(self) -> tuple[str, ...] | None:
        """Principals that may use it; None for all that may consume the topic."""
        ...


class Caller:
    """The caller of a call in progress. Belongs to that call."""

    __slots__ = (
        "_checked",
        "_guard",
        "_used",
        "_verified_at",
        "action",
        "credentials",
        "is_stream",
        "peer",
        "principal",
    )

    def __init__(
        self,
        guard: Guard,
        principal: Principal,
        *,
        peer: str,
        action: str,
        is_stream: bool,
        credentials: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self.principal = principal
        self.credentials = credentials
        """The headers that identify the caller, for calls that are forwarded."""
        self.is_stream = is_stream
        """Whether the call is a stream, whose rights are checked again while it runs."""
        self.peer = peer
        """Where the call comes from, as the transport says."""
        self.action = action
        """The name of the call."""
        self._guard = guard
        self._checked: dict[_Check, None] = {}
        self._used: tuple[Restricted, str] | None = None
        self._verified_at = guard.monotonic()

    def remember(self, check: _Check) -> None:
        """Records a right that must stay valid."""
        if len(self._checked) < _CHECKS_PER_CALL_MAX:
            self._checked[check] = None

    def remember_use(self, subscription: Restricted, topic: str) -> None:
        """Records a subscription that the caller must stay allowed to use."""
        self._used = (subscription, topic)

    def verify(self, *, at_once: bool = False) -> None:
        """Checks again what the call was allowed.

        `at_once` does so even if it was done less than `VERIFY_SECONDS` ago.

        Raises:
            UnavailableError: The rights could not be read for too long.
        """
        now = self._guard.monotonic()
        if at_once or now - self._verified_at >= VERIFY_SECONDS:
            self._verified_at = now
            self._guard.verify(self, self._checked, self._used)

    def __repr__(self) -> str:
        return f"Caller({self.principal}, {self.action})"


_caller: ContextVar[Caller | None] = ContextVar("ister_caller", default=None)


def current_caller() -> Caller | None:
    """Who makes the call that this task serves; None outside of guarded calls."""
    return _caller.get()


def current_principal() -> Principal:
    """The principal of the call that this task serves; anonymous outside of guarded calls."""
    caller = _caller.get()
    return ANONYMOUS if caller is None else caller.principal


@contextmanager
def entered(caller: Caller) -> Iterator[Caller]:
    """Sets the current caller for a block."""
    token = _caller.set(caller)
    try:
        yield caller
    finally:
        _caller.reset(token)


class Guard:
    """Who calls, and whether they may. Thread-safe.

    Remembered credentials grow old by `clock`. With `audits_changes`, changes are noted even with
    authentication off.
    """

    def __init__(
        self,
        *,
        authenticator: Authenticator,
        access: AccessControl,
        audit: AuditLog,
        clock: Clock,
        is_on: bool,
        audits_changes: bool = False,
    ) -> None:
        self.access = access
        self.audit = audit
        self.is_on = is_on
        self.monotonic = clock.monotonic
        self._authenticator = authenticator
        self._audits = is_on or audits_changes
        self._lock = threading.Lock()
        self._remembered: OrderedDict[bytes, tuple[Principal, float]] = OrderedDict()
        self._refusals_waiting = 0
        self.refused_logins = 0
        """Calls refused because their caller was not authenticated."""
        self.allowed_calls = 0
        """Calls whose callers had a right to them, with auth on."""
        self.refused_calls = 0
        """Calls refused because the caller had no right to them."""

    @classmethod
    def open(cls, config: Config, metadata: MetadataStore, *, clock: Clock) -> Self:
        """The guard that the settings ask for; `start` comes next."""
        auth, tls = config.broker.auth, config.broker.tls
        if auth.mtls_principal and tls.client_auth is not ClientAuth.REQUIRED:
            raise ConfigError(
                "broker.auth.mtls_principal is on, but clients need no certificate",
                hint="set broker.tls.client_auth to 'required'",
            )
        return cls(
            authenticator=Authenticator(auth, clock=clock),
            access=AccessControl(
                metadata, root_prefix=config.storage.metadata.root_prefix, config=auth, clock=clock
            ),
            audit=AuditLog(auth.audit_file, clock=clock),
            clock=clock,
            is_on=auth.mode is not AuthMode.NONE,
            audits_changes=auth.audit_file is not None,
        )

    def start(self) -> None:
        """Reads the rights, if there is any need to."""
        if self.is_on:
            self.access.start()

    def trust_brokers(self, secret: str) -> None:
        """Accepts callers that send the cluster's secret as brokers."""
        self._authenticator.cluster_secret = secret

    def close(self) -> None:
        """Closes everything. Idempotent."""
        self.access.close()
        self.audit.close()

    @property
    def is_needed(self) -> bool:
        """Whether transports must identify callers, for checks or for the audit log."""
        return self._audits

    @property
    def takes_certificates(self) -> bool:
        """Whether transports have to pass on client certificates."""
        return self._authenticator.takes_certificates

    # -- authentication ---------------------------------------------------------------------

    def enter(
        self,
        headers: Mapping[str, str],
        *,
        certificate: bytes | None = None,
        peer: str = "",
        action: str = "",
        is_stream: bool = False,
    ) -> Caller:
        """The caller of a call that begins.

        `headers` are as `authentication.collect_headers` gives them; TLS has checked `certificate`.
        A call that `is_stream` goes on, and `Caller.verify` is called while it does.
        """
        try:
            principal = self.principal_of(headers, certificate)
        except UnauthenticatedError as error:
            self.record_refused_login(error, peer=peer, action=action)
            raise
        return Caller(
            self,
            principal,
            peer=peer,
            action=action,
            is_stream=is_stream,
            credentials=tuple(headers.items()),
        )

    def principal_of(
        self, headers: Mapping[str, str], certificate: bytes | None = None
    ) -> Principal:
        """Who calls, by headers and client certificate.

        Good credentials are remembered for a few seconds, never beyond their end, and never
        after an API key was withdrawn.
        """
        if not self.is_on:
            return ANONYMOUS
        digest = _digest(headers, certificate)
        now = self.monotonic()
        found = self._remembered.get(digest)
        if found is not None and now < found[1] and self._authenticator.is_current(found[0]):
            return found[0]
        principal = self._authenticator.authenticate(headers, certificate=certificate)
        with self._lock:
            self._remembered[digest] = (principal, now + _REMEMBERED_SECONDS)
            self._remembered.move_to_end(digest)
            while len(self._remembered) > _REMEMBERED_MAX:
                self._remembered.popitem(last=False)
        return principal

    def record_refused_login(
        self, error: UnauthenticatedError, *, peer: str = "", action: str = ""
    ) -> None:
        """Counts and audits a call whose caller was not authenticated."""
        with self._lock:
            self.refused_logins += 1
        self.audit.record(Outcome.UNAUTHENTICATED, action=action, peer=peer, reason=error.message)

    # -- authorization ----------------------------------------------------------------------

    def check(
        self,
        principal: Principal,
        permission: Permission,
        *,
        topic: TopicName | str | None = None,
        namespace: str | None = None,
        action: str | None = None,
        detail: str = "",
    ) -> None:
        """Refuses what a principal may not do; allowed changes are audited.

        Within a stream that a transport guards, the right must hold until the stream ends.

        Args:
            principal: Who.
            permission: What.
            topic: On which topic; it does not matter whether it exists.
            namespace: Or in which namespace. With neither: in the cluster.
            action: What it is called in the audit log; the name of the call by default.
            detail: What else the audit log should say of a change.
        """
        if not self._audits:
            return
        caller = _caller.get()
        if caller is not None and caller.principal is not principal:
            caller = None
        resource = _resource(topic, namespace)
        if action is None:
            action = permission.value if caller is None or not caller.action else caller.action
        peer = "" if caller is None else caller.peer
        if self.is_on:
            if not self.access.allows(principal, permission, topic=topic, namespace=namespace):
                self._deny(principal, permission, resource=resource, action=action, peer=peer)
            with self._lock:
                self.allowed_calls += 1
            if caller is not None and caller.is_stream:
                name = None if topic is None else str(topic)
                caller.remember(_Check(permission, name, namespace))
        if permission in MANAGE_PERMISSIONS:
            self.audit.record(
                Outcome.ALLOWED,
                action=action,
                principal=principal,
                resource=resource,
                peer=peer,
                detail=detail,
            )

    def check_subscription(
        self, principal: Principal, subscription: Restricted, *, topic: str
    ) -> None:
        """Refuses a principal that may not use a restricted subscription.

        Principals with MANAGE_NAMESPACE on the topic's namespace may use all of its subscriptions.
        Within a stream, the right is checked again for as long as the stream is open.
        """
        if not self.is_on:
            return
        caller = _caller.get()
        if not self._may_use(principal, subscription, topic):
            resource = f"subscription {subscription.name} of {topic}"
            with self._lock:
                self.refused_calls += 1
            self.audit.record(
                Outcome.DENIED,
                action="" if caller is None else caller.action,
                principal=principal,
                resource=resource,
                peer="" if caller is None else caller.peer,
                reason="it is restricted to others",
            )
            raise _restricted(principal, resource)
        if caller is not None and caller.is_stream and caller.principal is principal:
            caller.remember_use(subscription, topic)

    def _may_use(self, principal: Principal, subscription: Restricted, topic: str) -> bool:
        principals = subscription.principals
        return (
            principals is None
            or str(principal) in principals
            or self.access.allows(
                principal,
                Permission.MANAGE_NAMESPACE,
                namespace=TopicName.parse(topic).namespace,
            )
        )

    async def check_stream(
        self,
        principal: Principal,
        permission: Permission,
        *,
        topic: TopicName | str | None = None,
        namespace: str | None = None,
    ) -> None:
        """As `check`, at the beginning of a stream: a refusal takes `REFUSAL_SECONDS`."""
        try:
            self.check(principal, permission, topic=topic, namespace=namespace)
        except PermissionDeniedError:
            await self.pause_refusal()
            raise

    async def pause_refusal(self) -> None:
        """Waits before a stream is refused; not if too many are waiting already."""
        if self._refusals_waiting >= _REFUSALS_WAITING_MAX:
            return
        self._refusals_waiting += 1
        try:
            await asyncio.sleep(REFUSAL_SECONDS)
        finally:
            self._refusals_waiting -= 1

    def check_anywhere(
        self, principal: Principal, permission: Permission, *, action: str | None = None
    ) -> None:
        """Refuses principals without any right; see `AccessControl.allows_anywhere`."""
        if self.is_on and not self.access.allows_anywhere(principal, permission):
            caller = _caller.get()
            self._deny(
                principal,
                permission,
                resource="anything",
                action=action or (permission.value if caller is None else caller.action),
                peer="" if caller is None else caller.peer,
            )

    def allows_anywhere(self, principal: Principal, permission: Permission) -> bool:
        """Like `check_anywhere`, but returns a bool; writes no audit record."""
        return not self.is_on or self.access.allows_anywhere(principal, permission)

    def allows(
        self,
        principal: Principal,
        permission: Permission,
        *,
        topic: TopicName | str | None = None,
        namespace: str | None = None,
    ) -> bool:
        """Whether a principal has a permission; writes no audit record."""
        return not self.is_on or self.access.allows(
            principal, permission, topic=topic, namespace=namespace
        )

    def visible(self, principal: Principal, topics: Iterable[str]) -> list[str]:
        """Returns the topics that a principal may see."""
        return [topic for topic in topics if self.allows(principal, Permission.LOOKUP, topic=topic)]

    def verify(
        self, caller: Caller, checked: Iterable[_Check], used: tuple[Restricted, str] | None
    ) -> None:
        """Checks a stream's rights again; raises as `Caller.verify`."""
        if not self.is_on:
            return
        principal = caller.principal
        if not self._authenticator.is_current(principal):
            error = UnauthenticatedError("the credentials have expired or were revoked")
            self._audit_ended(caller, error.message)
            raise error
        for check in checked:
            if not self.access.allows(
                principal, check.permission, topic=check.topic, namespace=check.namespace
            ):
                self._audit_ended(caller, f"the right to {check.permission} is gone")
                raise _denied(principal, check.permission, _resource(check.topic, check.namespace))
        if used is not None and not self._may_use(principal, *used):
            resource = f"subscription {used[0].name} of {used[1]}"
            self._audit_ended(caller, f"{resource} is restricted to others")
            raise _restricted(principal, resource)

    def _audit_ended(self, caller: Caller, reason: str) -> None:
        self.audit.record(
            Outcome.ENDED,
            action=caller.action,
            principal=caller.principal,
            peer=caller.peer,
            reason=reason,
        )

    def _deny(
        self,
        principal: Principal,
        permission: Permission,
        *,
        resource: str,
        action: str,
        peer: str,
    ) -> None:
        with self._lock:
            self.refused_calls += 1
        self.audit.record(
            Outcome.DENIED,
            action=action,
            principal=principal,
            resource=resource,
            peer=peer,
            reason=f"no right to {permission}",
        )
        raise _denied(principal, permission, resource)


def _denied(principal: Principal, permission: Permission, resource: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{principal} has no permission {permission} on {resource[:300]}",
        hint="a binding has to give a role that has it",
    )


def _restricted(principal: Principal, resource: str) -> PermissionDeniedError:
    return PermissionDeniedError(
        f"{principal} may not use {resource[:300]}",
        hint="it is restricted to other principals; `ister subscriptions describe` lists them",
    )


def _resource(topic: TopicName | str | None, namespace: str | None) -> str:
    if topic is not None:
        return str(topic)
    return "the cluster" if namespace is None else f"the namespace {namespace}"


def _digest(headers: Mapping[str, str], certificate: bytes | None) -> bytes:
    credentials = [headers.get(name) for name in CREDENTIAL_HEADERS]
    # JSON keeps one text from being taken for two, and none from being taken for an empty one.
    content = json.dumps(credentials).encode("utf-8", "surrogatepass")
    return hashlib.sha256(content + (certificate or b"")).digest()
