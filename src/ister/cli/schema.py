"""`ister schema`: subjects of the schema registry, their versions, compatibility.

Owns: arguments, output, detection of a file's schema type. Does not own: the registry and the
compatibility check, which are the broker's (`ister.client`).
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Final

from ister.base.model import JsonObject
from ister.base.positions import format_time
from ister.cli.connection import add_broker_arguments, connected, parse_count, print_change
from ister.cli.errors_out import answer, print_json
from ister.cli.output import Subparsers, add_command, print_facts, print_table
from ister.cli.table import plain
from ister.errors import ConfigError, InvalidRequestError
from ister.topic.schema_kinds import CompatibilityMode, SchemaType

if TYPE_CHECKING:
    from ister.client.schemas import Schema

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


def register(commands: Subparsers) -> None:
    """Adds the command to the parser."""
    parser = add_command(
        commands,
        "schema",
        help="list, show, register and check schemas",
        description="The schema registry of a broker. A subject has the versions of one schema; "
        "the subject of a topic usually has the topic's name.",
        examples=(
            "ister schema list",
            "ister schema register orders order.avsc",
            "ister schema check orders order-2.avsc",
        ),
    )
    actions = parser.add_subparsers(metavar="ACTION", required=True)

    _register(
        actions, "list", _list, {"subjects": []}, help="list subjects", examples=("schema list",)
    )

    shown = _register(
        actions,
        "show",
        _show,
        {"ok": False},
        help="show a subject: its versions, and the definition of one",
        examples=("schema show orders", "schema show orders --version 1 --definition > order.avsc"),
    )
    _add_subject(shown)
    shown.add_argument(
        "--version", metavar="N", type=parse_count, help="version to show (default: the latest)"
    )
    shown.add_argument(
        "--definition", action="store_true", help="print the definition alone, byte for byte"
    )

    registered = _register(
        actions,
        "register",
        _add_version,
        {"ok": False},
        help="register a schema from a file",
        description="Adds a version to a subject; the first version creates the subject. A "
        "definition that is already registered keeps its version.",
        examples=(
            "schema register orders order.avsc",
            "schema register orders order.json --type json_schema --description 'with tax'",
        ),
    )
    _add_subject(registered)
    _add_definition(registered)
    registered.add_argument(
        "--description", metavar="TEXT", default="", help="description of the version"
    )
    registered.add_argument(
        "--tag", metavar="WORD", action="append", default=[], help="tag; repeatable"
    )

    checked = _register(
        actions,
        "check",
        _check,
        {"ok": False},
        help="check whether a file could be the next version",
        description="Checks a definition against the latest version of a subject and changes "
        "nothing. Exit code 1 if it is not compatible, with the reasons.",
        examples=("schema check orders order-2.avsc", "schema check orders o.avsc --mode full"),
    )
    _add_subject(checked)
    _add_definition(checked)
    checked.add_argument(
        "--mode",
        metavar="MODE",
        choices=[*CompatibilityMode],
        help=f"{', '.join(CompatibilityMode)} (default: the subject's own)",
    )

    compat = _register(
        actions,
        "compat",
        _compat,
        {"ok": False},
        help="show or set the compatibility mode of a subject",
        description="Shows or sets how new versions must be compatible with the latest one. "
        "backward: readers with the new version can read old messages; forward: readers with the "
        "old version can read new messages; full: both; none: not checked.",
        examples=("schema compat orders", "schema compat orders full"),
    )
    _add_subject(compat)
    compat.add_argument(
        "mode",
        metavar="MODE",
        nargs="?",
        choices=[*CompatibilityMode],
        help=f"{', '.join(CompatibilityMode)}; without it, the mode is shown",
    )


def _register(
    actions: Subparsers,
    name: str,
    run: Callable[[argparse.Namespace], int],
    facts: JsonObject,
    *,
    help: str,
    examples: tuple[str, ...],
    description: str | None = None,
) -> argparse.ArgumentParser:
    lines = tuple(f"ister {one}" for one in examples)
    parser = add_command(actions, name, help=help, description=description, examples=lines)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_broker_arguments(parser)
    parser.set_defaults(run=lambda options: answer(options, lambda: run(options), facts))
    return parser


def _add_subject(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("subject", metavar="SUBJECT", help="subject, such as orders")


def _add_definition(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="file with the definition; - for stdin")
    parser.add_argument(
        "--type",
        metavar="TYPE",
        choices=[*SchemaType],
        help=f"{', '.join(SchemaType)} (default: detected from the file's name and content)",
    )


# -- definitions ----------------------------------------------------------------------------


def _read(options: argparse.Namespace) -> tuple[bytes, str]:
    """The definition in a file, and its type."""
    try:
        if options.file == "-":
            data = sys.stdin.buffer.read()
        else:
            with open(options.file, "rb") as file:
                data = file.read()
    except OSError as error:
        raise ConfigError(f"cannot read the file: {error.strerror}", path=options.file) from error
    kind = options.type or detect_type(options.file, data)
    if kind is None:
        raise InvalidRequestError(
            f"cannot tell the schema type of {options.file}",
            hint=f"pass --type {'|'.join(SchemaType)}",
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


def _list(options: argparse.Namespace) -> int:
    with connected(options) as client:
        found = client.schema_subjects()
    if options.json:
        print_json({"subjects": [asdict(one) for one in found]})
    elif not found:
        print("no subjects; register one with `ister schema register`")
    else:
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
        print_table(("subject", "type", "version", "compatibility", "id", "tags"), rows)
    return 0


def _show(options: argparse.Namespace) -> int:
    with connected(options) as client:
        schema = client.schema(options.subject, options.version)
        versions = [] if options.definition else client.schema_versions(options.subject)
    if options.definition and not options.json:
        sys.stdout.flush()
        sys.stdout.buffer.write(schema.definition)
        sys.stdout.buffer.flush()
        return 0
    text = _text(schema.definition)
    if options.json:
        shown: JsonObject = {
            **asdict(schema),
            "definition": text,
            "definition_base64": base64.b64encode(schema.definition).decode("ascii"),
        }
        print_json({**shown, "versions": [asdict(one) for one in versions]})
        return 0
    print_facts(_facts(schema), title=f"{schema.subject}, version {schema.version}")
    print()
    rows = [
        (
            one.version,
            format_time(1000 * one.created_at),
            one.created_by or None,
            one.description or None,
        )
        for one in versions
    ]
    print_table(("version", "created", "by", "description"), rows)
    print()
    if text is None:
        print(f"({len(schema.definition)} bytes, binary)")
    else:
        print("\n".join(plain(line.expandtabs()) for line in text.rstrip().splitlines()))
    return 0


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


def _add_version(options: argparse.Namespace) -> int:
    data, kind = _read(options)
    with connected(options) as client:
        made = client.register_schema(
            options.subject,
            data,
            schema_type=kind,
            description=options.description,
            tags=options.tag,
        )
    verb = "registered" if made.is_new else "already registered"
    text = f"{verb}: {options.subject} version {made.version}, {kind}, id {made.schema_id}"
    print_change(options, text, {**asdict(made), "type": kind})
    return 0


def _check(options: argparse.Namespace) -> int:
    data, kind = _read(options)
    with connected(options) as client:
        problems = client.check_schema(options.subject, data, schema_type=kind, mode=options.mode)
    if options.json:
        print_json(
            {"subject": options.subject, "is_compatible": not problems, "problems": problems}
        )
    elif not problems:
        print(f"{options.file} is compatible with {options.subject}")
    else:
        print(f"{options.file} is not compatible with {options.subject}:")
        for problem in problems:
            print(f"  {plain(problem)}")
    return 1 if problems else 0


def _compat(options: argparse.Namespace) -> int:
    with connected(options) as client:
        if options.mode is None:
            mode = client.schema(options.subject).compatibility
            if options.json:
                print_json({"subject": options.subject, "compatibility": mode})
            else:
                print(mode)
            return 0
        client.set_compatibility(options.subject, options.mode)
    facts = {"subject": options.subject, "compatibility": options.mode}
    print_change(options, f"compatibility of {options.subject}: {options.mode}", facts)
    return 0
