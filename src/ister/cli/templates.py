r"""Templates of `--format`: a message as a line of fields and text.

Owns: the fields, and the syntax of templates. Does not own: delimiters and output (`messages_out`),
paths in JSON (`ister.base.message_filter`).

    '{offset} {key} {payload}'      '{timestamp}\t{payload.user.id}'      '{attributes.kind}'

A field that a message does not have is empty. `{{` and `}}` are braces; `\n`, `\t`, `\r`, `\0`,
`\\` and `\xHH` are characters. A wrong field is an error before the first message is read.
"""

from __future__ import annotations

import base64
import difflib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final

from ister.base.message_filter import NOT_JSON, JsonPath, parse_payload
from ister.base.positions import format_time
from ister.cli.messages_out import Received, as_fields, format_attributes
from ister.errors import InvalidRequestError

_ATTRIBUTE: Final = "attributes."
_PAYLOAD: Final = "payload"
_ESCAPES: Final = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "\\": "\\"}
_PART: Final = re.compile(
    r"(?P<brace>\{\{|\}\})|\{(?P<field>[^{}]*)\}|\\x(?P<byte>[0-9a-fA-F]{2})|\\(?P<escape>.)"
    r"|(?P<text>[^{}\\]+)",
    re.DOTALL,
)


def _text(value: object) -> bytes:
    return b"" if value is None else str(value).encode(errors="replace")


_FIELDS: Final[Mapping[str, tuple[Callable[[Received], bytes], str]]] = {
    "topic": (lambda message: _text(message.topic), "topic, or the partition"),
    "offset": (lambda message: _text(message.offset), "offset"),
    "key": (lambda message: _text(message.routing_key), "routing key"),
    "payload": (lambda message: message.payload, "payload, unchanged"),
    "text": (
        lambda message: message.payload.decode(errors="replace").encode(),
        "payload as text; bytes that are not UTF-8 are replaced",
    ),
    "hex": (lambda message: message.payload.hex().encode(), "payload as hexadecimal digits"),
    "base64": (lambda message: base64.b64encode(message.payload), "payload in Base64"),
    "size": (lambda message: _text(len(message.payload)), "payload size in bytes"),
    "timestamp": (
        lambda message: _text(format_time(message.publish_time_ms)),
        "publish time, in UTC",
    ),
    "timestamp_ms": (
        lambda message: _text(message.publish_time_ms),
        "publish time, in milliseconds since 1970",
    ),
    "producer": (lambda message: _text(message.producer_name), "producer name"),
    "attributes": (
        lambda message: _text(format_attributes(message.attributes)),
        "all attributes: NAME=VALUE,NAME=VALUE",
    ),
    "schema_id": (lambda message: _text(message.schema_id), "schema id"),
    "schema_version": (lambda message: _text(message.schema_version), "schema version"),
    "json": (
        lambda message: json.dumps(as_fields(message)).encode(),
        "the whole message, as with --json",
    ),
}

TEMPLATE_HELP: Final = (
    "template fields:\n"
    + "\n".join(f"  {f'{{{name}}}':<20}{about}" for name, (_, about) in _FIELDS.items())
    + """
  {attributes.NAME}   one attribute
  {payload.PATH}      a value in a JSON payload: {payload.user.id}, {payload.items[0]}
  Missing fields are empty. {{ and }} are literal braces; \\n, \\t, \\r, \\0, \\\\ and \\xHH
  are escapes."""
)
"""The fields, for the help of commands."""


def is_template(text: str) -> bool:
    """Whether a value of `--format` is a template rather than a name."""
    return "{" in text or "}" in text or "\\" in text


def parse_template(
    text: str, shown: Callable[[bytes], bytes], *, more: Sequence[str] = ()
) -> Callable[[Received], bytes]:
    """Returns a function that formats a message by a template.

    Args:
        text: The template.
        shown: Applied to the values of fields, not to the text between them.
        more: Fields that messages have in `Received.more`.

    Raises:
        InvalidRequestError: The template is invalid; the message says where.
    """
    parts: list[bytes | Callable[[Received], bytes]] = []
    at = 0
    while at < len(text):
        found = _PART.match(text, at)
        if found is None:
            problem = "has no closing brace" if text[at] == "{" else "is not expected"
            raise InvalidRequestError(
                f"invalid template {text!r}: {text[at]!r} at character {at + 1} {problem}",
                hint="write {{ and }} for braces, and \\\\ for a backslash",
            )
        if found["field"] is not None:
            parts.append(_parse_field(found["field"], text, more))
        else:
            parts.append(_literal(found, text))
        at = found.end()

    def rendered(message: Received) -> bytes:
        return b"".join(part if isinstance(part, bytes) else shown(part(message)) for part in parts)

    return rendered


def _literal(found: re.Match[str], text: str) -> bytes:
    if found["brace"] is not None:
        return found["brace"][:1].encode()
    if found["byte"] is not None:
        return bytes.fromhex(found["byte"])
    if found["escape"] is not None:
        if found["escape"] not in _ESCAPES:
            raise InvalidRequestError(
                f"invalid template {text!r}: unknown escape {found[0]!r} at character "
                f"{found.start() + 1}",
                hint="known: \\n, \\t, \\r, \\0, \\\\ and \\xHH",
            )
        return _ESCAPES[found["escape"]].encode()
    return found["text"].encode(errors="surrogateescape")


def _parse_field(name: str, text: str, more: Sequence[str]) -> Callable[[Received], bytes]:
    if name in _FIELDS:
        return _FIELDS[name][0]
    if name in more:
        return lambda message: _text(message.more.get(name))
    if name.startswith(_ATTRIBUTE):
        attribute = name.removeprefix(_ATTRIBUTE)
        return lambda message: _text(message.attributes.get(attribute))
    if name.startswith((f"{_PAYLOAD}.", f"{_PAYLOAD}[")):
        return partial(_value, JsonPath.parse(name.removeprefix(_PAYLOAD)))
    near = difflib.get_close_matches(name, [*_FIELDS, *more], n=1)
    hint = f"did you mean {{{near[0]}}}? " if near else ""
    known = ", ".join([*_FIELDS, *more, "attributes.NAME", "payload.PATH"])
    raise InvalidRequestError(
        f"unknown field {{{name}}} in template {text!r}", hint=f"{hint}known fields: {known}"
    )


def _value(path: JsonPath, message: Received) -> bytes:
    """A value of a JSON payload: texts as they are, anything else as JSON."""
    document = parse_payload(message.payload)
    found = None if document is NOT_JSON else path.find(document)
    if found is None or isinstance(found, str):
        return _text(found)
    return json.dumps(found, ensure_ascii=False, separators=(",", ":")).encode(errors="replace")
