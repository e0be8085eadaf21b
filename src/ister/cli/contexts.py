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
from typing import Final

from ister.base.model import JsonObject
from ister.cli.errors_out import answer, print_json
from ister.cli.output import Subparsers, add_command, print_error, print_facts, print_table
from ister.errors import ConfigError, NotFoundError

CONTEXT_VARIABLE: Final = "ISTER_CONTEXT"

_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_FILES: Final = ("ca_file", "cert_file", "key_file", "token_file")
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


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "context",
        help="name brokers with their TLS settings and tokens, and switch between them",
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
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    added = add_command(
        actions,
        "add",
        help="add or replace a context",
        description="Adds a context. An existing one is replaced only with --replace.",
        examples=(
            "ister context add local --broker 127.0.0.1:6650 --use",
            (
                "ister context add prod --broker broker.example:6650 --ca-file ca.pem \\\n"
                "--token-stdin < token.txt"
            ),
        ),
    )
    added.add_argument("name", metavar="NAME", help="context name, such as prod")
    added.add_argument(
        "--broker",
        metavar="HOST:PORT",
        required=True,
        help="broker address, or several separated by commas",
    )
    added.add_argument("--tls", action="store_true", help="use TLS and the system CA store")
    added.add_argument("--ca-file", metavar="FILE", help="use TLS and this CA (PEM)")
    added.add_argument("--cert-file", metavar="FILE", help="client certificate (PEM)")
    added.add_argument(
        "--key-file", metavar="FILE", help="private key of the client certificate (PEM)"
    )
    added.add_argument(
        "--server-name", metavar="NAME", help="name in the broker's certificate, if not the host"
    )
    token = added.add_mutually_exclusive_group()
    token.add_argument(
        "--token-file", metavar="FILE", help="file with the token or API key; read for each command"
    )
    token.add_argument(
        "--token-stdin", action="store_true", help="read the token from standard input and store it"
    )
    added.add_argument("--use", action="store_true", help="make it the current context")
    added.add_argument("--replace", action="store_true", help="replace an existing context")
    added.set_defaults(run=_run_add)

    listed = add_command(actions, "list", help="list contexts", examples=("ister context list",))
    listed.set_defaults(run=_run_list)

    shown = add_command(
        actions,
        "show",
        help="show a context without its token",
        examples=("ister context show", "ister context show prod --json"),
    )
    shown.add_argument(
        "name", metavar="NAME", nargs="?", help="context name (default: the current one)"
    )
    shown.set_defaults(run=_run_show)

    used = add_command(
        actions,
        "use",
        help="make a context the current one",
        examples=("ister context use prod", "ister context use --none"),
    )
    used.add_argument("name", metavar="NAME", nargs="?", help="context name")
    used.add_argument("--none", action="store_true", help="unset the current context")
    used.set_defaults(run=_run_use)

    removed = add_command(
        actions, "remove", help="remove a context", examples=("ister context remove prod",)
    )
    removed.add_argument("name", metavar="NAME", help="context name")
    removed.set_defaults(run=_run_remove)

    for action in (added, listed, shown, used, removed):
        action.add_argument("--json", action="store_true", help="print one JSON object")


def _run_add(options: argparse.Namespace) -> int:
    return answer(options, lambda: _add(options), {"ok": False, "name": options.name})


def _add(options: argparse.Namespace) -> int:
    from ister.client.options import TlsOptions, parse_addresses, parse_token  # noqa: PLC0415

    name = options.name
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"invalid context name {name!r}", hint="use up to 64 letters, digits, '_', '.' and '-'"
        )
    known = load_contexts()
    if name in known.by_name and not options.replace:
        raise ConfigError(f"context {name!r} already exists", hint="pass --replace")
    context = Context(
        broker=options.broker,
        tls=options.tls,
        server_name=options.server_name,
        token=sys.stdin.readline().strip() if options.token_stdin else None,
        # The command may be run from anywhere later.
        **{
            file: os.path.abspath(path)
            for file in _FILES
            if (path := getattr(options, file)) is not None
        },
    )
    # Report errors now, not in the first command that uses the context.
    tls = TlsOptions(ca=context.ca_file, cert=context.cert_file, key=context.key_file)
    tls.texts()
    parse_addresses(context.broker, tls if context.uses_tls else None)
    token = context.read_token()
    if token is not None:
        parse_token(token)
    known.by_name[name] = context
    if options.use:
        known.current = name
    save_contexts(known)
    _print_change(options, f"added context {name}", known)
    return 0


def _print_change(options: argparse.Namespace, text: str, known: Contexts) -> None:
    if options.json:
        print_json({"ok": True, "name": options.name, "current": known.current})
    else:
        print(f"{text}; current context: {known.current or 'none'}")


def _run_list(options: argparse.Namespace) -> int:
    def show() -> int:
        known = load_contexts()
        if options.json:
            print_json(
                {
                    "current": known.current,
                    "contexts": [
                        {"name": name, **one.to_json()} for name, one in known.by_name.items()
                    ],
                    "path": contexts_path(),
                }
            )
        elif not known.by_name:
            print("no contexts; create one with `ister context add`")
        else:
            rows = []
            for name, one in known.by_name.items():
                facts = one.facts()
                is_current = "*" if name == known.current else ""
                rows.append((name, is_current, facts["broker"], facts["tls"], facts["token"]))
            print_table(("context", "current", "broker", "tls", "token"), rows)
        return 0

    return answer(options, show, {"contexts": []})


def _run_show(options: argparse.Namespace) -> int:
    def show() -> int:
        known = load_contexts()
        name = options.name or os.environ.get(CONTEXT_VARIABLE) or known.current
        if name is None:
            raise NotFoundError(
                "there is no current context", hint="choose one with `ister context use`"
            )
        context = known.get(name)
        if options.json:
            print_json({"name": name, "is_current": name == known.current, **context.to_json()})
        else:
            print_facts({"current": name == known.current, **context.facts()}, title=name)
        return 0

    return answer(options, show, {"ok": False})


def _run_use(options: argparse.Namespace) -> int:
    def use() -> int:
        if (options.name is None) != options.none:
            raise ConfigError("name a context, or pass --none")
        known = load_contexts()
        if options.name is not None:
            known.get(options.name)
        known.current = options.name
        save_contexts(known)
        _print_change(options, "done", known)
        return 0

    return answer(options, use, {"ok": False, "name": options.name})


def _run_remove(options: argparse.Namespace) -> int:
    def remove() -> int:
        known = load_contexts()
        known.get(options.name)
        del known.by_name[options.name]
        if known.current == options.name:
            known.current = None
        save_contexts(known)
        _print_change(options, f"removed context {options.name}", known)
        return 0

    return answer(options, remove, {"ok": False, "name": options.name})
