"""The file of API keys: a line per key, with its digest and never the key itself.

    # name   digest                 settings
    loader   sha256:6f1c…           kind=service expires=2027-01-31T00:00:00Z

Owns: the lines, and reading them again when the file changes. A key is `ist_` and 32 random bytes,
so its plain SHA-256 gives nothing away: there is nothing to guess.

The file counts as it is now: a key whose line is gone is refused within about a second, and a file
that is gone holds no keys. A line that cannot be read is a key that does not work; the others do.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ister.base.clock import Clock
from ister.base.positions import format_time, parse_time
from ister.broker.security.principal import (
    Principal,
    PrincipalKind,
    check_principal_name,
    parse_principal_kind,
)
from ister.errors import ConfigError, InvalidRequestError

_log = logging.getLogger("ister.broker.security.api_keys")

API_KEY_PREFIX: Final = "ist_"
API_KEY_CHARACTERS_MAX: Final = 128
_DIGEST: Final = re.compile(r"(?:sha256:)?([0-9a-f]{64})")
_FILE_BYTES_MAX: Final = 16 * 1024 * 1024
_CHECK_SECONDS: Final = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """A line of the file."""

    name: str
    digest: str
    kind: PrincipalKind = PrincipalKind.SERVICE
    expires_at: float | None = None


def digest_of_key(key: str) -> str:
    """What is kept of a key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def format_line(key: ApiKey) -> str:
    """A line of the file."""
    parts = [key.name, f"sha256:{key.digest}", f"kind={key.kind}"]
    if key.expires_at is not None:
        parts.append(f"expires={format_time(key.expires_at * 1000)}")
    return " ".join(parts)


def parse_line(line: str) -> ApiKey | None:
    """Reads a line; None for an empty one or a comment."""
    parts = line.split("#", 1)[0].split()
    if not parts:
        return None
    if len(parts) < 2:
        raise InvalidRequestError("a line has a name, a digest, and settings")
    name, digest, *settings = parts
    match = _DIGEST.fullmatch(digest.lower())
    if match is None:
        raise InvalidRequestError("a digest is 'sha256:' and 64 hexadecimal digits")
    kind, expires_at = PrincipalKind.SERVICE, None
    for setting in settings:
        word, _, value = setting.partition("=")
        if word == "kind":
            kind = parse_principal_kind(value)
        elif word == "expires":
            expires_at = parse_time(value, utc=True).timestamp()
        else:
            raise InvalidRequestError("there is a setting that is neither kind= nor expires=")
    return ApiKey(
        name=check_principal_name(name), digest=match.group(1), kind=kind, expires_at=expires_at
    )


class ApiKeyFile:
    """The keys of a file, as it is now. Thread-safe."""

    def __init__(self, path: str, *, clock: Clock) -> None:
        self._path = path
        self._clock = clock
        self._lock = threading.Lock()
        self._checked_at = clock.monotonic()
        self._version: tuple[int, int, int] | None
        try:
            self._version = self._stat()
            self._keys, bad_lines = self._read()
        except OSError as error:
            raise ConfigError(
                f"broker.auth.api_keys_file cannot be read: {error.strerror}", path=path
            ) from error
        if bad_lines:
            number, reason = next(iter(bad_lines.items()))
            raise ConfigError(
                f"broker.auth.api_keys_file has a bad line {number}: {reason}", path=path
            )

    def find(self, key: str) -> Principal | None:
        """Returns the principal of a key; None for an unknown key."""
        if len(key) > API_KEY_CHARACTERS_MAX:
            return None
        digest = digest_of_key(key)
        found = self._current().get(digest)
        # A look-up by digest leaks no timing: the digest of a guess cannot be chosen.
        if found is None or not hmac.compare_digest(found.digest, digest):
            return None
        return Principal(
            name=found.name,
            kind=found.kind,
            expires_at=found.expires_at,
            via="api-key",
            credential=digest,
        )

    def is_current(self, principal: Principal) -> bool:
        """Whether the key that a principal came with is still in the file, and means the same."""
        key = self._current().get(principal.credential)
        return key is not None and (key.name, key.kind, key.expires_at) == (
            principal.name,
            principal.kind,
            principal.expires_at,
        )

    def _current(self) -> Mapping[str, ApiKey]:
        now = self._clock.monotonic()
        if now - self._checked_at >= _CHECK_SECONDS:
            with self._lock:
                if now - self._checked_at >= _CHECK_SECONDS:
                    self._reload()
                    self._checked_at = now
        return self._keys

    def _reload(self) -> None:
        try:
            version = self._stat()
            if version == self._version:
                return
            keys, bad_lines = self._read()
        except OSError as error:
            if self._version is not None:
                _log.error(
                    "cannot read the file of API keys; all keys are refused",
                    extra={"path": self._path, "error": error.strerror},
                )
            self._version, self._keys = None, {}
            return
        for number, reason in bad_lines.items():
            _log.error(
                "invalid line in the file of API keys",
                extra={"path": self._path, "line": number, "reason": reason},
            )
        self._version, self._keys = version, keys

    def _stat(self) -> tuple[int, int, int]:
        found = os.stat(self._path)
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> tuple[dict[str, ApiKey], dict[int, str]]:
        with open(self._path, encoding="utf-8", errors="replace") as file:
            text = file.read(_FILE_BYTES_MAX)
        keys: dict[str, ApiKey] = {}
        bad_lines: dict[int, str] = {}
        for number, line in enumerate(text.splitlines(), start=1):
            try:
                key = parse_line(line)
            except InvalidRequestError as error:
                bad_lines[number] = error.message
                continue
            if key is not None:
                keys[key.digest] = key
        return keys, bad_lines
