"""`ister context`: named brokers, each with its address, TLS and token.

    $XDG_CONFIG_HOME/ister/contexts.yaml     (~/.config without the variable), mode 0600

    current: prod
    contexts:
      prod:
        broker: broker.example:6650
        ca_file: /etc/ister/ca.pem
        token_file: /run/secrets/ister

Owns: that file, the commands, which context is chosen: `--context`, then `ISTER_CONTEXT`, then the
current one (`ister context use`). Does not own: how a context and other options come together
(`connection`).

Tokens are never shown. The file is replaced in one step: a crash leaves the old one or the new one.
"""

from __future__ import annotations

import argparse
import os
import re
import stat
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Annotated, Final

from ister.base.model import JsonObject
from ister.cli.command import Arg, Facts, Group, Shown, Table, command
from ister.cli.output import print_error
from ister.errors import ConfigError, NotFoundError

CONTEXT_VARIABLE: Final = "ISTER_CONTEXT"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_OTHERS: Final = 0o077
_WORDS: Final = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(
    ("false", "no", "off", "0"), False
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """A broker, and how to connect to it."""

    broker: str
    tls: bool = False
    ca_file: str | None = None
    cert_file: str | None = None
    key_file: str | None = None
    server_name: str | None = None
    token: str | None = field(default=None, repr=False)
    token_file: str | None = None

    @property
    def uses_tls(self) -> bool:
        """Whether connections are encrypted."""
        is_said = self.broker.startswith(("https://", "grpc+tls://"))
        return bool(is_said or self.tls or self.ca_file or self.cert_file or self.server_name)

    def read_token(self) -> str | None:
        """The token, read from its file where there is one.

        Raises:
            ConfigError: The file cannot be read.
        """
        if self.token_file is None:
            return self.token
        try:
            with open(self.token_file, encoding="utf-8") as file:
                return file.read().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError("cannot read the token file", path=self.token_file) from error

    def to_json(self) -> JsonObject:
        """The settings for JSON output; without the token, but whether there is one."""
        shown: JsonObject = {
            one.name: getattr(self, one.name) for one in fields(self) if one.name != "token"
        }
        return {**shown, "tls": self.uses_tls, "has_token": self._token_source is not None}

    @property
    def _token_source(self) -> str | None:
        if self.token_file is not None:
            return f"from {self.token_file}"
        return None if self.token is None else "stored, not shown"

    def facts(self) -> dict[str, object]:
        """The settings for text output, without the token."""
        return {
            "broker": self.broker,
            "tls": self.uses_tls,
            "ca file": self.ca_file,
            "cert file": self.cert_file,
            "key file": self.key_file,
            "server name": self.server_name,
            "token": self._token_source,
        }


@dataclass(slots=True)
class Contexts:
    """All contexts, and which is current."""

    by_name: dict[str, Context] = field(default_factory=dict)
    current: str | None = None

    def get(self, name: str) -> Context:
        """A context by its name.

        Raises:
            NotFoundError: It does not exist; the error names the others.
        """
        found = self.by_name.get(name)
        if found is None:
            known = ", ".join(sorted(self.by_name))
            raise NotFoundError(
                f"context {name!r} does not exist",
                hint=f"known: {known}" if known else "create it with `ister context add`",
            )
        return found


def chosen_context(options: argparse.Namespace) -> tuple[str, Context] | None:
    """The name and context that a command uses; None if it uses none.

    Raises:
        NotFoundError: It does not exist.
        ConfigError: The file cannot be read.
    """
    name = getattr(options, "context", None) or os.environ.get(CONTEXT_VARIABLE) or None
    if name is None and not os.path.exists(contexts_path()):
        return None
    known = load_contexts()
    name = name or known.current
    return None if name is None else (name, known.get(name))


# -- the file -------------------------------------------------------------------------------


def contexts_path() -> str:
    """Where contexts are stored."""
    # XDG Base Directory Specification: relative paths are ignored.
    home = os.environ.get("XDG_CONFIG_HOME") or ""
    if not os.path.isabs(home):
        home = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(home, "ister", "contexts.yaml")


def load_contexts() -> Contexts:
    """Reads the file; no contexts if it does not exist.

    Raises:
        ConfigError: The file cannot be read, or is invalid.
    """
    path = contexts_path()
    try:
        with open(path, encoding="utf-8") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
    except FileNotFoundError:
        return Contexts()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("cannot read the contexts", path=path) from error
    found = _parse(text, path)
    if mode & _OTHERS and any(one.token is not None for one in found.by_name.values()):
        print_error(f"other users may read the tokens in {path}", hint=f"chmod 600 {path}")
    return found


def _parse(text: str, path: str) -> Contexts:
    from ister.config.yaml_tree import parse_yaml  # noqa: PLC0415 - most commands have no contexts

    try:
        tree = parse_yaml(text).tree
        found = _named(tree.get("contexts") or {})
    except ConfigError as error:
        error.path = error.path or path
        raise
    current = tree.get("current")
    return Contexts(found, str(current) if current else None)


def _named(stored: object) -> dict[str, Context]:
    if not isinstance(stored, Mapping):
        raise ConfigError("contexts are not names with their settings")
    return {str(name): _context(str(name), one) for name, one in stored.items()}


def _context(name: str, stored: object) -> Context:
    known = {one.name for one in fields(Context)}
    if not isinstance(stored, Mapping) or "broker" not in stored:
        raise ConfigError(f"context {name!r} has no broker")
    if unknown := sorted(set(stored) - known):
        raise ConfigError(f"context {name!r} has the unknown setting {unknown[0]!r}")
    texts = {key: str(value) for key, value in stored.items() if value is not None}
    tls = texts.pop("tls", "false").lower()
    if tls not in _WORDS:
        # A token must not be sent in clear because of a typing error.
        raise ConfigError(f"context {name!r} has tls: {tls!r}", hint="use true or false")
    return Context(tls=_WORDS[tls], **texts)


def save_contexts(contexts: Contexts) -> None:
    """Replaces the file.

    Raises:
        ConfigError: It cannot be written.
    """
    import yaml  # noqa: PLC0415

    stored = {
        name: {
            one.name: value
            for one in fields(Context)
            if (value := getattr(context, one.name)) not in (None, False)
        }
        for name, context in sorted(contexts.by_name.items())
    }
    body = yaml.safe_dump({"current": contexts.current, "contexts": stored}, sort_keys=False)
    path = contexts_path()
    directory = os.path.dirname(path)
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        # Made by mkstemp, so nobody else can read it from the start.
        made, temporary = tempfile.mkstemp(dir=directory, prefix=".contexts-")
        try:
            with os.fdopen(made, "w", encoding="utf-8") as file:
                file.write(body)
            os.replace(temporary, path)  # noqa: TID251 - a file of the user, not of a log
        except BaseException:
            os.unlink(temporary)
            raise
    except OSError as error:
        raise ConfigError(f"cannot write the contexts: {error.strerror}", path=path) from error


# -- commands -------------------------------------------------------------------------------


_NOTES: Final = f"""\
precedence of addresses, tokens and TLS settings, highest first:
  1. options: --broker, --token, --tls and the like; and --context NAME
  2. environment: ISTER_BROKER, ISTER_TOKEN
  3. the context of {CONTEXT_VARIABLE}, or the current one (`ister context use`)
  4. 127.0.0.1:6650, without TLS or token
A context's token is sent only to the context's own broker: if --broker or ISTER_BROKER names
a broker and --context is not given, no context is used.
"""


CONTEXT = Group(
    "context",
    "name brokers with their TLS settings and tokens, and switch between them",
    description="Named brokers, each with its address, TLS settings and token. Stored in "
    "$XDG_CONFIG_HOME/ister/contexts.yaml, which only its owner may read.",
    examples=(
        (
            "ister context add prod --broker broker.example:6650 --ca-file ca.pem \\\n"
            "--token-file token.txt"
        ),
        "ister context use prod",
        "ister topics list --context prod",
    ),
    notes=_NOTES,
)
register = CONTEXT.register

Name = Annotated[str, Arg("context name, such as prod", "NAME")]


@command(CONTEXT, "add", failed={"ok": False}, echo=["name"])
def add_context(
    name: Name,
    *,
    broker: Annotated[str, Arg("broker address, or several separated by commas", "HOST:PORT")],
    tls: Annotated[bool, Arg("use TLS and the system CA store")] = False,
    ca_file: Annotated[str | None, Arg("use TLS and this CA (PEM)", "FILE")] = None,
    cert_file: Annotated[str | None, Arg("client certificate (PEM)", "FILE")] = None,
    key_file: Annotated[
        str | None, Arg("private key of the client certificate (PEM)", "FILE")
    ] = None,
    server_name: Annotated[
        str | None, Arg("name in the broker's certificate, if not the host", "NAME")
    ] = None,
    token_file: Annotated[
        str | None,
        Arg("file with the token or API key; read for each command", "FILE", one_of="token"),
    ] = None,
    token_stdin: Annotated[
        bool, Arg("read the token from standard input and store it", one_of="token")
    ] = False,
    use: Annotated[bool, Arg("make it the current context")] = False,
    replace: Annotated[bool, Arg("replace an existing context")] = False,
) -> Shown:
    r"""Add or replace a context.

    Adds a context. An existing one is replaced only with --replace.

    Examples:
        ister context add local --broker 127.0.0.1:6650 --use
        ister context add prod --broker broker.example:6650 --ca-file ca.pem \
        --token-stdin < token.txt
    """
    from ister.client.options import TlsOptions, parse_addresses, parse_token  # noqa: PLC0415

    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid context name {name!r}", hint="use up to 64 letters, digits, '_', '.' and '-'"
        )
    known = load_contexts()
    if name in known.by_name and not replace:
        raise ConfigError(f"context {name!r} already exists", hint="pass --replace")
    context = Context(
        broker=broker,
        tls=tls,
        server_name=server_name,
        token=sys.stdin.readline().strip() if token_stdin else None,
        ca_file=_absolute(ca_file),
        cert_file=_absolute(cert_file),
        key_file=_absolute(key_file),
        token_file=_absolute(token_file),
    )
    # Report errors now, not in the first command that uses the context.
    certificates = TlsOptions(ca=context.ca_file, cert=context.cert_file, key=context.key_file)
    certificates.texts()
    parse_addresses(context.broker, certificates if context.uses_tls else None)
    token = context.read_token()
    if token is not None:
        parse_token(token)
    known.by_name[name] = context
    if use:
        known.current = name
    save_contexts(known)
    return _changed(name, f"added context {name}", known)


def _absolute(path: str | None) -> str | None:
    """The command may be run from anywhere later."""
    return None if path is None else os.path.abspath(path)


def _changed(name: str | None, text: str, known: Contexts) -> Shown:
    facts = {"ok": True, "name": name, "current": known.current}
    return Shown(facts, f"{text}; current context: {known.current or 'none'}")


@command(CONTEXT, "list", "ls", failed={"contexts": []})
def list_contexts() -> Shown:
    """List contexts.

    Examples:
        ister context list
    """
    known = load_contexts()
    rows = []
    for name, one in known.by_name.items():
        facts = one.facts()
        is_current = "*" if name == known.current else ""
        rows.append((name, is_current, facts["broker"], facts["tls"], facts["token"]))
    empty = "no contexts; create one with `ister context add`"
    return Shown(
        {
            "current": known.current,
            "contexts": [{"name": name, **one.to_json()} for name, one in known.by_name.items()],
            "path": contexts_path(),
        },
        Table(("context", "current", "broker", "tls", "token"), rows, empty=empty),
    )


@command(CONTEXT, "show", failed={"ok": False})
def show_context(
    name: Annotated[str | None, Arg("context name (default: the current one)", "NAME")] = None,
) -> Shown:
    """Show a context without its token.

    Examples:
        ister context show
        ister context show prod --json
    """
    known = load_contexts()
    name = name or os.environ.get(CONTEXT_VARIABLE) or known.current
    if name is None:
        raise NotFoundError(
            "there is no current context", hint="choose one with `ister context use`"
        )
    context, is_current = known.get(name), name == known.current
    return Shown(
        {"name": name, "is_current": is_current, **context.to_json()},
        Facts({"current": is_current, **context.facts()}, name),
    )


@command(CONTEXT, "use", failed={"ok": False}, echo=["name"])
def use_context(
    name: Annotated[str | None, Arg("context name", "NAME")] = None,
    *,
    none: Annotated[bool, Arg("unset the current context")] = False,
) -> Shown:
    """Make a context the current one.

    Examples:
        ister context use prod
        ister context use --none
    """
    if (name is None) != none:
        raise ConfigError("name a context, or pass --none")
    known = load_contexts()
    if name is not None:
        known.get(name)
    known.current = name
    save_contexts(known)
    return _changed(name, "done", known)


@command(CONTEXT, "remove", "rm", "delete", failed={"ok": False}, echo=["name"])
def remove_context(name: Annotated[str, Arg("context name", "NAME")]) -> Shown:
    """Remove a context.

    Examples:
        ister context remove prod
    """
    known = load_contexts()
    known.get(name)
    del known.by_name[name]
    if known.current == name:
        known.current = None
    save_contexts(known)
    return _changed(name, f"removed context {name}", known)
