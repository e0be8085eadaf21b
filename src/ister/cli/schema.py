"""`ister schema`: subjects of the schema registry, their versions, compatibility.

Owns: detection of a file's schema type. Does not own: the registry and the compatibility check,
which are the broker's (`ister.client`).
"""

from __future__ import annotations

import base64
import json
import os
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Final

from ister.base.positions import format_time
from ister.cli.command import Arg, Facts, Group, Shown, Table, command
from ister.cli.connection import Broker, parse_count
from ister.cli.table import plain
from ister.errors import ConfigError, InvalidRequestError
from ister.topic.schema_kinds import CompatibilityMode, SchemaType

if TYPE_CHECKING:
    from ister.client.descriptions import Schema

_BY_SUFFIX: Final = {
    ".avsc": SchemaType.AVRO,
    ".proto": SchemaType.PROTOBUF,
    ".pb": SchemaType.PROTOBUF,
    ".desc": SchemaType.PROTOBUF,
    ".binpb": SchemaType.PROTOBUF,
}
_JSON_SCHEMA_WORDS: Final = frozenset(
    {"$schema", "$id", "$ref", "$defs", "properties", "allOf", "anyOf", "oneOf", "const"}
)
_AVRO_TYPES: Final = frozenset({"record", "enum", "fixed", "map", "error"})
_MODES: Final = ", ".join(CompatibilityMode)

SCHEMA = Group(
    "schema",
    "list, show, register and check schemas",
    description="The schema registry of a broker. A subject has the versions of one schema; the "
    "subject of a topic usually has the topic's name.",
    examples=(
        "ister schema list",
        "ister schema register orders order.avsc",
        "ister schema check orders order-2.avsc",
    ),
)
register = SCHEMA.register

Subject = Annotated[str, Arg("subject, such as orders", "SUBJECT")]
File = Annotated[str, Arg("file with the definition; - for stdin", "FILE")]
Type = Annotated[
    SchemaType | None,
    Arg(f"{', '.join(SchemaType)} (default: detected from the file's name and content)", "TYPE"),
]


# -- definitions ----------------------------------------------------------------------------


def _read(path: str, kind: SchemaType | None) -> tuple[bytes, str]:
    """The definition in a file, and its type."""
    try:
        if path == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                data = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", path=path) from error
    kind = kind or detect_type(path, data)
    if kind is None:
        raise InvalidRequestError(
            f"cannot tell the schema type of {path}", hint=f"pass --type {'|'.join(SchemaType)}"
        )
    return data, str(kind)


def detect_type(path: str, data: bytes) -> SchemaType | None:
    """The type of a definition, by its file's suffix or its JSON content; None if unknown."""
    by_name = _BY_SUFFIX.get(os.path.splitext(path)[1].lower())
    if by_name is not None:
        return by_name
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        is_proto = b"syntax" in data[:1000] and b"proto" in data[:1000]
        return SchemaType.PROTOBUF if is_proto else None
    if not isinstance(content, dict):
        return None
    if content.get("type") in _AVRO_TYPES or "fields" in content:
        return SchemaType.AVRO
    if _JSON_SCHEMA_WORDS & content.keys() or content.get("type") in ("object", "array"):
        # An Avro array has `items` too, but neither of those keys.
        is_avro = content.get("type") == "array" and isinstance(content.get("items"), str)
        return SchemaType.AVRO if is_avro else SchemaType.JSON_SCHEMA
    return None


# -- commands -------------------------------------------------------------------------------


@command(SCHEMA, "list", "ls", failed={"subjects": []})
def list_subjects(broker: Broker) -> Shown:
    """List subjects.

    Examples:
        ister schema list
    """
    with broker.connect() as client:
        found = client.admin.schema_subjects()
    rows = [
        (
            one.subject,
            one.schema_type,
            one.latest_version,
            one.compatibility,
            one.schema_id,
            ", ".join(one.tags),
        )
        for one in found
    ]
    titles = ("subject", "type", "version", "compatibility", "id", "tags")
    empty = "no subjects; register one with `ister schema register`"
    return Shown({"subjects": [asdict(one) for one in found]}, Table(titles, rows, empty=empty))


@command(SCHEMA, "show", failed={"ok": False})
def show_schema(
    broker: Broker,
    subject: Subject,
    *,
    version: Annotated[
        int | None, Arg("version to show (default: the latest)", "N", parse_count)
    ] = None,
    definition: Annotated[bool, Arg("print the definition alone, byte for byte")] = False,
) -> Shown:
    """Show a subject: its versions, and the definition of one.

    Examples:
        ister schema show orders
        ister schema show orders --version 1 --definition > order.avsc
    """
    with broker.connect() as client:
        schema = client.admin.schema(subject, version)
        versions = [] if definition else client.admin.schema_versions(subject)
    text = _text(schema.definition)
    json = {
        **asdict(schema),
        "definition": text,
        "definition_base64": base64.b64encode(schema.definition).decode("ascii"),
        "versions": [asdict(one) for one in versions],
    }
    if definition:
        return Shown(json, lambda: _write(schema.definition))
    rows = [
        (
            one.version,
            format_time(1000 * one.created_at),
            one.created_by or None,
            one.description or None,
        )
        for one in versions
    ]
    shown = f"({len(schema.definition)} bytes, binary)"
    if text is not None:
        shown = "\n".join(plain(line.expandtabs()) for line in text.rstrip().splitlines())
    facts = Facts(_facts(schema), f"{schema.subject}, version {schema.version}")
    table = Table(("version", "created", "by", "description"), rows)
    return Shown(json, [facts, "", table, "", shown])


def _write(definition: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(definition)
    sys.stdout.buffer.flush()


def _facts(schema: Schema) -> dict[str, object]:
    return {
        "type": schema.schema_type,
        "id": schema.schema_id,
        "compatibility": schema.compatibility,
        "created": format_time(1000 * schema.created_at),
        "description": schema.description or None,
        "tags": ", ".join(schema.tags) or None,
        "fingerprint": schema.fingerprint,
    }


def _text(definition: bytes) -> str | None:
    try:
        text = definition.decode()
    except UnicodeDecodeError:
        return None
    # A descriptor set may happen to be valid UTF-8.
    return text if not any(ord(one) < 32 and one not in "\t\n\r" for one in text) else None


@command(SCHEMA, "register", failed={"ok": False})
def register_schema(
    broker: Broker,
    subject: Subject,
    file: File,
    *,
    type: Type = None,
    description: Annotated[str, Arg("description of the version", "TEXT")] = "",
    tag: Annotated[list[str], Arg("tag; repeatable", "WORD")] = [],  # noqa: B006 - copied
) -> Shown:
    """Register a schema from a file.

    Adds a version to a subject; the first version creates the subject. A definition that is already
    registered keeps its version.

    Examples:
        ister schema register orders order.avsc
        ister schema register orders order.json --type json_schema --description 'with tax'
    """
    data, kind = _read(file, type)
    with broker.connect() as client:
        made = client.admin.register_schema(
            subject, data, schema_type=kind, description=description, tags=tag
        )
    verb = "registered" if made.is_new else "already registered"
    text = f"{verb}: {subject} version {made.version}, {kind}, id {made.schema_id}"
    return broker.changed(text, **asdict(made), type=kind)


@command(SCHEMA, "check", failed={"ok": False})
def check_schema(
    broker: Broker,
    subject: Subject,
    file: File,
    *,
    type: Type = None,
    mode: Annotated[
        CompatibilityMode | None, Arg(f"{_MODES} (default: the subject's own)", "MODE")
    ] = None,
) -> Shown:
    """Check whether a file could be the next version.

    Checks a definition against the latest version of a subject and changes nothing. Exit code 1 if
    it is not compatible, with the reasons.

    Examples:
        ister schema check orders order-2.avsc
        ister schema check orders o.avsc --mode full
    """
    data, kind = _read(file, type)
    with broker.connect() as client:
        problems = client.admin.check_schema(subject, data, schema_type=kind, mode=mode)
    text = [f"{file} is {'not ' if problems else ''}compatible with {subject}"]
    if problems:
        text = [f"{text[0]}:", *(f"  {plain(problem)}" for problem in problems)]
    json = {"subject": subject, "is_compatible": not problems, "problems": problems}
    return Shown(json, text, not problems)


@command(SCHEMA, "compat", failed={"ok": False})
def set_compatibility(
    broker: Broker,
    subject: Subject,
    mode: Annotated[
        CompatibilityMode | None, Arg(f"{_MODES}; without it, the mode is shown", "MODE")
    ] = None,
) -> Shown:
    """Show or set the compatibility mode of a subject.

    Shows or sets how new versions must be compatible with the latest one. backward: readers with
    the new version can read old messages; forward: readers with the old version can read new
    messages; full: both; none: not checked.

    Examples:
        ister schema compat orders
        ister schema compat orders full
    """
    with broker.connect() as client:
        if mode is None:
            found = client.admin.schema(subject).compatibility
            return Shown({"subject": subject, "compatibility": found}, found)
        client.admin.set_compatibility(subject, mode)
    text = f"compatibility of {subject}: {mode}"
    return broker.changed(text, subject=subject, compatibility=mode)
