"""What a principal may do: roles and bindings in the metadata store, judged from memory.

    <root>/auth/roles/<name>                        a role
    <root>/auth/bindings/cluster/<id>               a binding, by its scope and resource
    <root>/auth/bindings/namespace/<ns>/<id>
    <root>/auth/bindings/topic/<ns>/<topic>/<id>
    <root>/auth/generation                          raised by every change

Default deny: a right exists where a binding gives a role that has it, in the cluster, in the
topic's namespace, or for the topic itself. A binding for a topic holds for its partitions too
(`/default/orders` for `/default/orders-part-3`), because clients make those names out of it. The
answer does not depend on whether the topic exists.

Owns: the keys above, and the view of them in memory. Every change is one transaction that compares
the generation, so a role cannot be removed while a binding to it is being made. A crash leaves the
state before or after it. A change made here holds at once, one made elsewhere when the store's
watch tells, or at the next look, `REFRESH_SECONDS` later at most. A broker that cannot read
the store for `STALE_SECONDS_MAX` grants nothing more: it might not have heard of a revocation.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

from ister.base.clock import Clock
from ister.base.limits import NAME_PART_CHARACTERS_MAX
from ister.base.model import TopicName
from ister.base.partitions import base_of_partition
from ister.broker.followed import Followed
from ister.broker.security.principal import Principal, PrincipalKind, parse_principal_kind
from ister.broker.security.rights import (
    SYSTEM_ROLES,
    Binding,
    Permission,
    Role,
    Scope,
    resource_path,
)
from ister.config import AuthConfig
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    CommitUnknownError,
    ConflictError,
    CorruptDataError,
    InvalidRequestError,
    NotFoundError,
    TopicNameError,
    UnavailableError,
)
from ister.metadata.base import (
    Absent,
    Compare,
    Delete,
    MetadataStore,
    Operation,
    Put,
    RevisionIs,
)
from ister.metadata.transact import transact

_log = logging.getLogger("ister.broker.security.access")

REFRESH_SECONDS: Final = 2.0
STALE_SECONDS_MAX: Final = 30.0
# All of them are in memory, and read at once.
_ROLES_MAX: Final = 1_000
_BINDINGS_MAX: Final = 20_000
_ATTEMPTS: Final = 10
_TOPIC_CHARACTERS_MAX: Final = 2 * NAME_PART_CHARACTERS_MAX + 2

_WITHOUT_RIGHTS: Final = (PrincipalKind.ANONYMOUS, PrincipalKind.BROKER)
_NOTHING: Final[frozenset[Permission]] = frozenset()
_SEEING: Final = frozenset(
    {Permission.LOOKUP, Permission.PRODUCE, Permission.CONSUME, Permission.MANAGE_TOPIC}
)


@dataclass(slots=True)
class _Grants:
    """All that one principal may do."""

    cluster: frozenset[Permission] = _NOTHING
    namespaces: dict[str, frozenset[Permission]] = field(default_factory=dict)
    topics: dict[str, frozenset[Permission]] = field(default_factory=dict)

    def add(self, binding: Binding, permissions: frozenset[Permission]) -> None:
        if binding.scope is Scope.CLUSTER:
            self.cluster |= permissions
            return
        known = self.namespaces if binding.scope is Scope.NAMESPACE else self.topics
        known[binding.resource] = known.get(binding.resource, _NOTHING) | permissions


_NO_GRANTS: Final = _Grants()


@dataclass(frozen=True, slots=True)
class _State:
    """What the store held at one moment."""

    generation: int
    revision: int | None
    """Of the generation; None before the first change."""
    roles: Mapping[str, Role]
    bindings: Mapping[str, Binding]
    """By their keys."""
    grants: Mapping[tuple[PrincipalKind, str], _Grants]


class AccessControl:
    """Roles and bindings. Thread-safe; `allows` never waits for anything.

    `config` (`broker.auth`) names those who may do everything; staleness is measured by `clock`.
    """

    def __init__(
        self, metadata: MetadataStore, *, root_prefix: str, config: AuthConfig, clock: Clock
    ) -> None:
        self._metadata = metadata
        self._clock = clock
        self._prefix = f"{root_prefix}/auth/"
        self._admins = frozenset(map(_parse_admin, config.super_admins))
        self._lock = threading.Lock()
        self._state: _State | None = None
        self._loaded_at = 0.0
        self._followed: Followed | None = None

    def start(self) -> None:
        """Reads the rights, and keeps up with changes from now on."""
        self._reload()
        self._followed = Followed(
            self._metadata,
            self._prefix,
            self._read_again,
            thread="ister-access",
            seconds=REFRESH_SECONDS,
            log=_log,
            warning="the rights cannot be read",
        )

    def close(self) -> None:
        """Ends keeping up. May be called twice."""
        if self._followed is not None:
            self._followed.close()

    # -- judging ----------------------------------------------------------------------------

    def allows(
        self,
        principal: Principal,
        permission: Permission,
        *,
        topic: TopicName | str | None = None,
        namespace: str | None = None,
    ) -> bool:
        """Whether a principal has a permission on a topic, a namespace, or the cluster.

        A name that cannot be a topic's has no rights of its own.
        """
        if self.is_admin(principal):
            return True
        grants = self._grants_of(principal)
        if _has(grants.cluster, permission):
            return True
        if topic is not None:
            text = str(topic)
            # What is too long for a name must not be kept, either.
            parsed = _parse_topic(text) if len(text) <= _TOPIC_CHARACTERS_MAX else None
            if parsed is None:
                return False
            parent, names = parsed
            return _has(grants.namespaces.get(parent, _NOTHING), permission) or any(
                _has(grants.topics.get(name, _NOTHING), permission) for name in names
            )
        return namespace is not None and _has(
            grants.namespaces.get(namespace, _NOTHING), permission
        )

    def allows_anywhere(self, principal: Principal, permission: Permission) -> bool:
        """Whether a principal has a permission on any resource.

        For what belongs to no topic and is of use to whoever works with one, as schemas are.
        """
        if self.is_admin(principal):
            return True
        grants = self._grants_of(principal)
        held = (grants.cluster, *grants.namespaces.values(), *grants.topics.values())
        return any(_has(permissions, permission) for permissions in held)

    def is_admin(self, principal: Principal) -> bool:
        """Whether the settings name a principal as super admin."""
        return principal.kind not in _WITHOUT_RIGHTS and (
            (principal.kind, principal.name) in self._admins
            or (None, principal.name) in self._admins
        )

    def _grants_of(self, principal: Principal) -> _Grants:
        state = self._state
        age = self._clock.monotonic() - self._loaded_at
        if state is None or age > STALE_SECONDS_MAX:
            raise UnavailableError("the rights of callers could not be read for some time")
        if principal.kind in _WITHOUT_RIGHTS:
            return _NO_GRANTS
        return state.grants.get((principal.kind, principal.name), _NO_GRANTS)

    # -- roles ------------------------------------------------------------------------------

    def roles(self) -> list[Role]:
        """All roles, sorted by name. Reads the store, as all that follows."""
        roles = self._reload().roles
        return [roles[name] for name in sorted(roles)]

    def role(self, name: str) -> Role:
        """A role."""
        found = self._reload().roles.get(name)
        if found is None:
            raise NotFoundError(f"role {name[:120]!r} does not exist")
        return found

    def create_role(self, role: Role) -> bool:
        """Creates a role; False if it already exists with the same permissions.

        Raises:
            AlreadyExistsError: One of that name has other permissions.
            ConflictError: Others keep changing roles and bindings.
        """

        def plan(state: _State) -> list[Operation]:
            known = state.roles.get(role.name)
            if known is not None:
                if known.permissions == role.permissions:
                    return []
                raise AlreadyExistsError(
                    f"there is a role {role.name!r} with other permissions",
                    hint="remove it first, or take another name",
                )
            if len(state.roles) >= _ROLES_MAX:
                raise CapacityError(f"there are {len(state.roles)} roles already")
            return [Put(f"{self._prefix}roles/{role.name}", role.to_json())]

        return self._change(plan)

    def delete_role(self, name: str) -> None:
        """Removes a role."""

        def plan(state: _State) -> list[Operation]:
            known = state.roles.get(name)
            if known is None:
                raise NotFoundError(f"role {name[:120]!r} does not exist")
            if known.is_system:
                raise InvalidRequestError(f"the role {name!r} is always there")
            users = [binding.id for binding in state.bindings.values() if name in binding.roles]
            if users:
                raise ConflictError(
                    f"the role {name!r} is given by {len(users)} bindings",
                    hint=f"remove them first, such as {users[0]!r}",
                )
            return [Delete(f"{self._prefix}roles/{name}")]

        self._change(plan)

    # -- bindings ---------------------------------------------------------------------------

    def bindings(self, scope: Scope | None = None, resource: str = "") -> list[Binding]:
        """All bindings, or those of one scope and resource, sorted by their ids."""
        place = "" if scope is None else f"{resource_path(scope, resource)}/"
        prefix = f"{self._prefix}bindings/{place}"
        known = self._reload().bindings
        return [
            known[key]
            for key in sorted(known, key=lambda key: (key.rpartition("/")[2], key))
            if key.startswith(prefix) and (scope is None or "/" not in key[len(prefix) :])
        ]

    def binding(self, scope: Scope, resource: str, id: str) -> Binding:
        """A binding."""
        found = self._reload().bindings.get(self._key(scope, resource, id))
        if found is None:
            raise NotFoundError(f"binding {id[:120]!r} does not exist in this scope")
        return found

    def create_binding(self, binding: Binding) -> bool:
        """Creates a binding; False if it already exists.

        Raises:
            AlreadyExistsError: Another one has its id, in the same scope and resource.
            ConflictError: Others keep changing roles and bindings.
        """
        key = self._key(binding.scope, binding.resource, binding.id)

        def plan(state: _State) -> list[Operation]:
            known = state.bindings.get(key)
            if known is not None:
                if known == binding:
                    return []
                raise AlreadyExistsError(
                    f"there is a binding {binding.id!r} that gives something else",
                    hint="remove it first, or take another id",
                )
            missing = [role for role in binding.roles if role not in state.roles]
            if missing:
                raise NotFoundError(f"role {missing[0]!r} does not exist", hint="create it first")
            if len(state.bindings) >= _BINDINGS_MAX:
                raise CapacityError(f"there are {len(state.bindings)} bindings already")
            return [Put(key, binding.to_json())]

        return self._change(plan)

    def delete_binding(self, scope: Scope, resource: str, id: str) -> None:
        """Removes a binding; what it gave is gone at once in this process."""
        key = self._key(scope, resource, id)

        def plan(state: _State) -> list[Operation]:
            if key not in state.bindings:
                raise NotFoundError(f"binding {id[:120]!r} does not exist in this scope")
            return [Delete(key)]

        self._change(plan)

    def _key(self, scope: Scope, resource: str, id: str) -> str:
        if "/" in id:
            # It would be a key of another scope.
            raise NotFoundError("invalid binding id: it has a '/'")
        return f"{self._prefix}bindings/{resource_path(scope, resource)}/{id}"

    # -- the store --------------------------------------------------------------------------

    def _change(self, plan: Callable[[_State], Sequence[Operation]]) -> bool:
        """Applies `plan` to the stored state; retries when another writer was faster."""
        is_unknown = False

        def attempt() -> bool | None:
            nonlocal is_unknown
            state = self._reload()
            try:
                operations = plan(state)
            except NotFoundError:
                if is_unknown:  # it was removed by the attempt whose answer was lost
                    return True
                raise
            if not operations:
                return is_unknown
            key = f"{self._prefix}generation"
            compare: Compare = (
                Absent(key) if state.revision is None else RevisionIs(key, state.revision)
            )
            number = str(state.generation + 1).encode()
            try:
                revision = self._metadata.transact([compare], [Put(key, number), *operations])
            except CommitUnknownError:
                is_unknown = True
                raise
            if revision is None:
                return None
            self._reload()
            return True

        error = ConflictError("roles and bindings keep changing", hint="try it again")
        return transact(attempt, error, attempts=_ATTEMPTS)

    def _reload(self) -> _State:
        # One at a time, so that an older view never replaces a newer one.
        with self._lock:
            asked_at = self._clock.monotonic()
            state = self._read()
            self._state = state
            self._loaded_at = asked_at
            return state

    def _read_again(self, is_hint: bool) -> None:
        """Reads everything, without a hint only if the generation moved."""
        if is_hint:
            self._reload()
            return
        with self._lock:
            asked_at = self._clock.monotonic()
            found = self._metadata.get(f"{self._prefix}generation")
            state = self._state
            if state is None or state.revision != (None if found is None else found.revision):
                self._state = self._read()
            self._loaded_at = asked_at

    def _read(self) -> _State:
        generation, revision = 0, None
        roles: dict[str, Role] = {}
        bindings: dict[str, Binding] = {}
        for found in self._metadata.range(self._prefix):
            path = found.key.removeprefix(self._prefix)
            try:
                if path == "generation":
                    generation, revision = int(found.value), found.revision
                elif path.startswith("roles/"):
                    role = Role.from_json(found.value)
                    if path == f"roles/{role.name}":
                        roles[role.name] = role
                elif path.startswith("bindings/"):
                    binding = Binding.from_json(found.value)
                    # What a binding says has to be what its key says.
                    if found.key == self._key(binding.scope, binding.resource, binding.id):
                        bindings[found.key] = binding
            except (CorruptDataError, ValueError) as error:
                _log.error(
                    "an unreadable role or binding gives nothing",
                    extra={"key": found.key, "error": str(error)},
                )
        roles |= SYSTEM_ROLES
        return _State(generation, revision, roles, bindings, _compile(roles, bindings))


def _compile(
    roles: Mapping[str, Role], bindings: Mapping[str, Binding]
) -> dict[tuple[PrincipalKind, str], _Grants]:
    grants: dict[tuple[PrincipalKind, str], _Grants] = {}
    for binding in bindings.values():
        mine = grants.setdefault((binding.principal_kind, binding.principal_name), _Grants())
        for name in binding.roles:
            role = roles.get(name)
            if role is not None:
                mine.add(binding, role.permissions)
    return grants


def _has(held: frozenset[Permission], permission: Permission) -> bool:
    return permission in held or (permission is Permission.LOOKUP and not held.isdisjoint(_SEEING))


def _parse_admin(text: str) -> tuple[PrincipalKind | None, str]:
    """`alice` of any kind, or `user:alice`, `service:loader`."""
    word, colon, name = text.partition(":")
    if colon and name:
        try:
            return parse_principal_kind(word), name
        except InvalidRequestError:
            pass
    return None, text


@lru_cache(maxsize=4096)
def _parse_topic(topic: str) -> tuple[str, tuple[str, ...]] | None:
    """A topic's namespace, and the names of topics whose bindings hold for it."""
    try:
        name = TopicName.parse(topic)
    except TopicNameError:
        return None
    base = base_of_partition(topic)
    return name.namespace, (topic,) if base is None else (topic, base)
