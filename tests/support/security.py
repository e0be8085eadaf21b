"""A guard with everything it needs, for tests of what stands behind it.

with GuardRig(tmp_path) as rig:
    rig.allow("alice", "producer", topic="/default/orders")
    headers = {"authorization": f"Bearer {rig.token('alice')}"}
"""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any, Self

from ister.broker.security.access import AccessControl
from ister.broker.security.guard import Guard
from ister.broker.security.minting import make_api_key, make_token
from ister.broker.security.principal import PrincipalKind
from ister.broker.security.rights import Binding, Scope
from ister.config import load_config
from tests.support.clock import ManualClock
from tests.support.memory_metadata import MemoryMetadata

SECRET = "canary-jwt-0123456789abcdef0123456789abcdef"
_NUMBERS = count()
ISSUER, AUDIENCE = "https://issuer.example", "ister-tests"


def auth_settings(directory: Path, **more: Any) -> dict[str, Any]:
    """`broker.auth` with tokens, a file of API keys and an audit file in a directory."""
    keys = directory / "api-keys"
    keys.touch()
    jwt = {
        "algorithm": "HS256",
        "secret": SECRET,
        "issuer": ISSUER,
        "audience": AUDIENCE,
        "leeway_seconds": 0,
    }
    return {
        "mode": "token",
        "jwt": jwt,
        "api_keys_file": str(keys),
        "super_admins": ["root"],
        "audit_file": str(directory / "audit.jsonl"),
        **more,
    }


def sign(name: str, *, lifetime_seconds: float = 600, clock=None, kind="user") -> str:
    """A token of the issuer above."""
    return make_token(
        name,
        algorithm="HS256",
        key=SECRET,
        issuer=ISSUER,
        audience=AUDIENCE,
        lifetime_seconds=lifetime_seconds,
        kind=PrincipalKind(kind),
        clock=clock,
    )


def allow(
    access: AccessControl,
    name: str,
    role: str,
    *,
    topic: str | None = None,
    namespace: str | None = None,
    kind: str = "user",
) -> Binding:
    """Binds a role to somebody: in a topic, in a namespace, or in the cluster."""
    scope = Scope.CLUSTER if topic is None and namespace is None else Scope.NAMESPACE
    binding = Binding(
        id=f"b{next(_NUMBERS)}",
        principal_kind=PrincipalKind(kind),
        principal_name=name,
        roles=(role,),
        scope=scope if topic is None else Scope.TOPIC,
        resource=topic or namespace or "",
    )
    access.create_binding(binding)
    return binding


def headers_of(name: str) -> list[tuple[str, str]]:
    """The metadata of somebody's calls."""
    return [("authorization", f"Bearer {sign(name)}")]


class GuardRig:
    """A started guard on a store in memory, with a clock that moves by hand.

    Args:
        directory: For its files.
        **auth: Settings of `broker.auth` that differ.
    """

    def __init__(self, directory: Path, **auth: Any) -> None:
        self.directory = directory
        self.clock = ManualClock()
        self.store = MemoryMetadata()
        settings = auth_settings(directory, **auth)
        if settings["mode"] == "none":
            settings = {"audit_file": settings["audit_file"]}
        # The transports of tests bring their own certificates.
        tls = {"client_auth": "required"} if settings.get("mtls_principal") else {}
        config = load_config(
            {"storage": {"mode": "memory"}, "broker": {"auth": settings, "tls": tls}},
            environment={},
        )
        self.guard = Guard.open(config, self.store, clock=self.clock)

    def __enter__(self) -> Self:
        self.guard.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.guard.close()
        self.store.close()

    def token(self, name: str, **more: Any) -> str:
        return sign(name, clock=self.clock, **more)

    def bearer(self, name: str, **more: Any) -> dict[str, str]:
        """Headers with a token."""
        return {"authorization": f"Bearer {self.token(name, **more)}"}

    def api_key(self, name: str) -> str:
        """A new key, in the file at once."""
        key, line = make_api_key(name)
        path = self.directory / "api-keys"
        path.write_text(f"{path.read_text()}{line}\n")
        self.clock.advance(1.0)
        return key

    def withdraw_keys(self) -> None:
        (self.directory / "api-keys").write_text("")
        self.clock.advance(1.0)

    def allow(
        self,
        name: str,
        role: str,
        *,
        topic: str | None = None,
        namespace: str | None = None,
        kind: str = "user",
    ) -> Binding:
        """Binds a role to somebody."""
        return allow(self.guard.access, name, role, topic=topic, namespace=namespace, kind=kind)

    def revoke(self, binding: Binding) -> None:
        self.guard.access.delete_binding(binding.scope, binding.resource, binding.id)

    def audited(self) -> list[dict[str, Any]]:
        """The lines of the audit file."""
        path = self.directory / "audit.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]
