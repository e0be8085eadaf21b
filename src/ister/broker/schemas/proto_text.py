"""The text of a .proto file as a descriptor, as the compiler of Protocol Buffers would make it.

Owns: tokens and grammar of proto2 and proto3. Does not own: whether names resolve and numbers are
free, which the pool says that the descriptor is put into (`protobuf`).

Read are messages, groups, fields, maps, oneofs, enumerations, reserved and extension ranges,
extensions, imports and the options that change bytes (`packed`, `default`, `allow_alias`). Services
and all other options are passed over. Editions are not read: they come as descriptors.

It takes time proportional to the text, and stops at a depth. A library that reads the same grammar
was passed over: it repairs what it cannot read and goes on, and keeps what it learns of every text
for the life of the process.
"""

from __future__ import annotations

import re
from typing import Any, Final, NoReturn

from google.protobuf import descriptor_pb2, text_encoding

from ister.broker.schemas.definition import shorten
from ister.errors import InvalidRequestError

__all__ = ["read_proto_text"]

_TOKEN: Final = re.compile(
    r"""
    (?P<space>[ \t\r\n\f\v]+|//[^\n]*|/\*(?:[^*]|\*(?!/))*\*/)
  | (?P<number>\.?[0-9](?:[eE][+-]?[0-9]|[0-9a-zA-Z_.])*)
  | (?P<word>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<text>"(?:[^"\\\n]|\\[^\n])*"|'(?:[^'\\\n]|\\[^\n])*')
  | (?P<sign>[-+=;:,.<>(){}\[\]]|/(?![*/]))
    """,
    re.VERBOSE,
)
_ESCAPED: Final = re.compile(
    r"(?P<plain>[^\\]+)|\\(?:(?P<sign>[abfnrtv\\'\"?])|(?P<octal>[0-3]?[0-7]{1,2})"
    r"|[xX](?P<hex>[0-9a-fA-F]{1,2})|u(?P<short>[0-9a-fA-F]{4})"
    r"|U(?P<long>00(?:0[0-9a-fA-F]|10)[0-9a-fA-F]{4}))"
)
_SIGNS: Final = dict(zip("abfnrtv\\'\"?", b"\a\b\f\n\r\t\v\\'\"?", strict=True))
_INTEGER: Final = re.compile(r"0[xX][0-9a-fA-F]{1,16}|0[0-7]{0,22}|[1-9][0-9]{0,19}")
_DEPTH_MAX: Final = 32
_NUMBER_MAX: Final = (1 << 29) - 1
_ENUM_MAX: Final = (1 << 31) - 1

_Field: Final = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final[dict[str, int]] = {
    name: getattr(_Field, f"TYPE_{name.upper()}")
    for name in (
        *("double", "float", "int64", "uint64", "int32", "fixed64", "fixed32", "bool", "string"),
        *("bytes", "uint32", "sfixed32", "sfixed64", "sint32", "sint64"),
    )
}
_LABELS: Final[dict[str, int]] = {
    "optional": _Field.LABEL_OPTIONAL,
    "required": _Field.LABEL_REQUIRED,
    "repeated": _Field.LABEL_REPEATED,
}


def read_proto_text(text: str, *, name: str) -> Any:  # noqa: ANN401 - a FileDescriptorProto
    """Reads the text of a .proto file.

    Args:
        text: The text.
        name: What the file is called in the descriptor.

    Raises:
        InvalidRequestError: It is not one, with the line where it stops being one.
    """
    return _Reader(text).read_file(name)


def _unescape(match: re.Match[str]) -> bytes:
    kind, text = str(match.lastgroup), match.group(str(match.lastgroup))
    if kind == "plain":
        return text.encode()
    if kind == "sign":
        return bytes([_SIGNS[text]])
    if kind in ("octal", "hex"):
        return bytes([int(text, 8 if kind == "octal" else 16)])
    return chr(int(text, 16)).encode("utf-8", "surrogatepass")


class _Reader:
    """Reads one file, from its first token to its last."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._kind = ""
        self._token = ""
        self._position = 0
        self._depth = 0
        self._is_proto3 = False
        self._advance()

    # -- tokens -----------------------------------------------------------------------------

    def _advance(self) -> str:
        """Goes on to the next token; returns the one that was there."""
        last = self._token
        while True:
            self._position = self._at
            if self._at == len(self._text):
                self._kind, self._token = "end", ""
                return last
            match = _TOKEN.match(self._text, self._at)
            if match is None:
                self._fail("a character that has no meaning")
            self._at = match.end()
            if match.lastgroup != "space":
                self._kind, self._token = str(match.lastgroup), match.group()
                return last

    def _fail(self, what: str) -> NoReturn:
        line = self._text.count("\n", 0, self._position) + 1
        raise InvalidRequestError(f"the .proto text is wrong: {what} (line {line})")

    def _takes(self, token: str) -> bool:
        if self._token != token or self._kind == "text":
            return False
        self._advance()
        return True

    def _expect(self, token: str) -> None:
        if not self._takes(token):
            found = shorten(self._token) if self._token else "the end"
            self._fail(f"{token!r} is missing before {found!r}")

    def _word(self) -> str:
        if self._kind != "word":
            self._fail("a name is missing")
        return self._advance()

    def _full_name(self) -> str:
        name = "." if self._takes(".") else ""
        name += self._word()
        while self._takes("."):
            name += f".{self._word()}"
        return name

    def _integer(self, largest: int = _NUMBER_MAX, *, is_signed: bool = False) -> int:
        is_negative = is_signed and self._takes("-")
        if self._kind != "number" or not _INTEGER.fullmatch(self._token):
            self._fail("a whole number is missing")
        digits = self._advance()
        is_octal = digits.startswith("0") and digits.isdecimal()
        value = int(digits, 8 if is_octal else 0)
        if value > largest + is_negative:
            self._fail(f"{digits} is above {largest}")
        return -value if is_negative else value

    def _string(self) -> str:
        try:
            return self._bytes().decode()
        except UnicodeDecodeError:
            self._fail("a text that is not UTF-8")

    def _bytes(self) -> bytes:
        if self._kind != "text":
            self._fail("a text in quotes is missing")
        parts: list[bytes] = []
        while self._kind == "text":
            at, text = 0, self._token[1:-1]
            while at < len(text):
                match = _ESCAPED.match(text, at)
                if match is None:
                    self._fail("a text with a wrong escape")
                parts.append(_unescape(match))
                at = match.end()
            self._advance()
        return b"".join(parts)

    def _enter(self) -> None:
        self._depth += 1
        if self._depth > _DEPTH_MAX:
            self._fail(f"more than {_DEPTH_MAX} levels")
        self._expect("{")

    def _leaves(self) -> bool:
        if self._kind == "end":
            self._fail("'}' is missing")
        if not self._takes("}"):
            return False
        self._depth -= 1
        return True

    # -- files ------------------------------------------------------------------------------

    def read_file(self, name: str) -> Any:  # noqa: ANN401 - a FileDescriptorProto
        file = descriptor_pb2.FileDescriptorProto(name=name)
        if self._takes("edition"):
            self._fail("editions are taken as a FileDescriptorSet only")
        if self._takes("syntax"):
            self._expect("=")
            syntax = self._string()
            self._expect(";")
            if syntax not in ("proto2", "proto3"):
                self._fail(f"there is no syntax {shorten(syntax)!r}")
            self._is_proto3 = syntax == "proto3"
        if self._is_proto3:
            file.syntax = "proto3"
        while self._kind != "end":
            self._read_top(file)
        return file

    def _read_top(self, file: Any) -> None:  # noqa: ANN401 - a FileDescriptorProto
        if self._takes(";"):
            return
        word = self._word()
        if word == "package":
            file.package = self._full_name()
            self._expect(";")
        elif word == "import":
            self._read_import(file)
        elif word == "option":
            self._skip_option()
        elif word == "message":
            self._read_message(file.message_type.add(name=self._word()))
        elif word == "enum":
            self._read_enum(file.enum_type.add(name=self._word()))
        elif word == "extend":
            self._read_extend(file.extension, file.message_type)
        elif word == "service":
            self._word()
            self._skip_block()
        else:
            self._fail(f"{shorten(word)!r} cannot stand here")

    def _read_import(self, file: Any) -> None:  # noqa: ANN401 - a FileDescriptorProto
        if self._takes("public"):
            file.public_dependency.append(len(file.dependency))
        else:
            self._takes("weak")
        file.dependency.append(self._string())
        self._expect(";")

    # -- messages ---------------------------------------------------------------------------

    def _read_message(self, message: Any) -> None:  # noqa: ANN401 - a DescriptorProto
        self._enter()
        optional_fields: list[Any] = []
        while not self._leaves():
            self._read_element(message, optional_fields)
        # A proto3 field that knows whether it was set is the only one of a oneof without a name,
        # and these oneofs stand behind those that the text has.
        for field in optional_fields:
            field.oneof_index = len(message.oneof_decl)
            message.oneof_decl.add(name=f"_{field.name}")

    def _read_element(self, message: Any, optional_fields: list[Any]) -> None:  # noqa: ANN401
        if self._takes(";"):
            return
        # What follows may be a field whose type has one of these names.
        word = self._token
        if word in _LABELS and self._kind == "word":
            self._advance()
            field = self._read_field(message.field.add(label=_LABELS[word]), message.nested_type)
            if word == "optional" and self._is_proto3:
                field.proto3_optional = True
                optional_fields.append(field)
            return
        if self._kind != "word" and word != ".":
            self._fail("a field is missing")
        if self._next_is("=", "."):
            self._read_plain_field(message)
        elif word == "message":
            self._advance()
            self._read_message(message.nested_type.add(name=self._word()))
        elif word == "enum":
            self._advance()
            self._read_enum(message.enum_type.add(name=self._word()))
        elif word == "oneof":
            self._advance()
            self._read_oneof(message)
        elif word == "map" and self._next_is("<"):
            self._advance()
            self._read_map(message)
        elif word == "reserved":
            self._advance()
            self._read_reserved(message, _NUMBER_MAX, past=1)
        elif word == "extensions":
            self._advance()
            self._read_extensions(message)
        elif word == "extend":
            self._advance()
            self._read_extend(message.extension, message.nested_type)
        elif word == "option":
            self._advance()
            self._skip_option()
        else:
            self._read_plain_field(message)

    def _next_is(self, *tokens: str) -> bool:
        """Whether a token follows on this one, where white space hides none."""
        rest = self._text[self._at : self._at + 64].lstrip()
        return rest.startswith(tokens)

    def _read_plain_field(self, message: Any) -> None:  # noqa: ANN401 - a DescriptorProto
        if not self._is_proto3:
            self._fail("a field of proto2 begins with optional, required or repeated")
        self._read_field(message.field.add(label=_Field.LABEL_OPTIONAL), message.nested_type)

    def _read_field(self, field: Any, nested: Any) -> Any:  # noqa: ANN401 - descriptors
        if self._token == "group" and self._kind == "word" and not self._next_is("=", "."):  # noqa: S105
            self._advance()
            return self._read_group(field, nested)
        self._read_type(field)
        field.name = self._word()
        self._expect("=")
        field.number = self._integer()
        self._read_field_options(field)
        self._expect(";")
        return field

    def _read_type(self, field: Any) -> None:  # noqa: ANN401 - a FieldDescriptorProto
        name = self._full_name()
        if name in _SCALARS:
            field.type = _SCALARS[name]
        else:
            # Whether it is a message or an enumeration is found out when the name is.
            field.type_name = name

    def _read_group(self, field: Any, nested: Any) -> Any:  # noqa: ANN401 - descriptors
        name = self._word()
        field.name = name.lower()
        field.type = _Field.TYPE_GROUP
        field.type_name = name
        self._expect("=")
        field.number = self._integer()
        if self._token == "[":  # noqa: S105
            self._skip_brackets()
        self._read_message(nested.add(name=name))
        return field

    def _read_map(self, message: Any) -> None:  # noqa: ANN401 - a DescriptorProto
        self._expect("<")
        key, value = _Field(), _Field()
        self._read_type(key)
        self._expect(",")
        self._read_type(value)
        self._expect(">")
        name = self._word()
        entry_name = "".join(part[:1].upper() + part[1:] for part in name.split("_")) + "Entry"
        self._expect("=")
        field = message.field.add(
            name=name,
            number=self._integer(),
            label=_Field.LABEL_REPEATED,
            type=_Field.TYPE_MESSAGE,
            type_name=entry_name,
        )
        self._read_field_options(field)
        self._expect(";")
        entry = message.nested_type.add(name=entry_name)
        entry.options.map_entry = True
        for part, label, number in ((key, "key", 1), (value, "value", 2)):
            part.name, part.number, part.label = label, number, _Field.LABEL_OPTIONAL
            entry.field.append(part)

    def _read_oneof(self, message: Any) -> None:  # noqa: ANN401 - a DescriptorProto
        index = len(message.oneof_decl)
        message.oneof_decl.add(name=self._word())
        self._enter()
        while not self._leaves():
            if self._takes(";"):
                continue
            if self._token == "option" and not self._next_is("="):  # noqa: S105
                self._advance()
                self._skip_option()
                continue
            field = message.field.add(label=_Field.LABEL_OPTIONAL, oneof_index=index)
            self._read_field(field, message.nested_type)

    def _read_extend(self, fields: Any, nested: Any) -> None:  # noqa: ANN401 - descriptors
        extendee = self._full_name()
        self._enter()
        while not self._leaves():
            if self._takes(";"):
                continue
            label = _Field.LABEL_OPTIONAL
            if self._token in _LABELS and self._kind == "word":
                label = _LABELS[self._advance()]
            self._read_field(fields.add(label=label, extendee=extendee), nested)

    def _read_extensions(self, message: Any) -> None:  # noqa: ANN401 - a DescriptorProto
        while True:
            start, end = self._read_range(_NUMBER_MAX, is_signed=False)
            message.extension_range.add(start=start, end=end + 1)
            if not self._takes(","):
                break
        if self._token == "[":  # noqa: S105
            self._skip_brackets()
        self._expect(";")

    def _read_reserved(self, owner: Any, largest: int, *, past: int) -> None:  # noqa: ANN401
        """Reserved names or ranges; `past` is 1 where ends are stored exclusive."""
        while True:
            if self._kind == "text":
                owner.reserved_name.append(self._string())
            else:
                start, end = self._read_range(largest, is_signed=past == 0)
                owner.reserved_range.add(start=start, end=end + past)
            if not self._takes(","):
                break
        self._expect(";")

    def _read_range(self, largest: int, *, is_signed: bool) -> tuple[int, int]:
        start = self._integer(largest, is_signed=is_signed)
        if not self._takes("to"):
            return start, start
        end = largest if self._takes("max") else self._integer(largest, is_signed=is_signed)
        return start, end

    # -- enumerations -----------------------------------------------------------------------

    def _read_enum(self, enum: Any) -> None:  # noqa: ANN401 - an EnumDescriptorProto
        self._enter()
        while not self._leaves():
            if self._takes(";"):
                continue
            word = self._word()
            if word == "option" and self._token != "=":  # noqa: S105
                if self._token == "allow_alias":  # noqa: S105
                    enum.options.allow_alias = True
                self._skip_option()
            elif word == "reserved" and self._token != "=":  # noqa: S105
                self._read_reserved(enum, _ENUM_MAX, past=0)
            else:
                self._expect("=")
                enum.value.add(name=word, number=self._integer(_ENUM_MAX, is_signed=True))
                if self._token == "[":  # noqa: S105
                    self._skip_brackets()
                self._expect(";")

    # -- options ----------------------------------------------------------------------------

    def _read_field_options(self, field: Any) -> None:  # noqa: ANN401 - a FieldDescriptorProto
        if not self._takes("["):
            return
        while True:
            name = self._token
            self._skip_option_name()
            self._expect("=")
            if name == "packed" and self._token in ("true", "false"):
                field.options.packed = self._advance() == "true"
            elif name == "json_name" and self._kind == "text":
                field.json_name = self._string()
            elif name == "default":
                self._read_default(field)
            else:
                self._skip_value()
            if not self._takes(","):
                break
        self._expect("]")

    def _read_default(self, field: Any) -> None:  # noqa: ANN401 - a FieldDescriptorProto
        if self._kind == "text":
            if field.type == _Field.TYPE_BYTES:
                field.default_value = text_encoding.CEscape(self._bytes(), False)
            else:
                field.default_value = self._string()
            return
        sign = "-" if self._takes("-") else ""
        if self._kind not in ("word", "number"):
            self._fail("a value is missing")
        value = self._advance()
        if _INTEGER.fullmatch(value):
            is_octal = value.startswith("0") and value.isdecimal()
            value = str(int(value, 8 if is_octal else 0))
        field.default_value = sign + value

    def _skip_option(self) -> None:
        self._skip_option_name()
        self._expect("=")
        self._skip_value()
        self._expect(";")

    def _skip_option_name(self) -> None:
        while True:
            if self._takes("("):
                self._full_name()
                self._expect(")")
            else:
                self._word()
            if not self._takes("."):
                return

    def _skip_value(self) -> None:
        if self._token == "{" and self._kind == "sign":  # noqa: S105
            self._skip_block()
        elif self._token == "[" and self._kind == "sign":  # noqa: S105
            self._skip_brackets()
        elif self._kind == "text":
            self._string()
        else:
            _ = self._takes("-") or self._takes("+")
            if self._kind not in ("word", "number"):
                self._fail("a value is missing")
            self._advance()

    def _skip_block(self) -> None:
        self._skip_nested("{", "}")

    def _skip_brackets(self) -> None:
        self._skip_nested("[", "]")

    def _skip_nested(self, opening: str, closing: str) -> None:
        self._expect(opening)
        depth = 1
        while depth:
            if self._kind == "end":
                self._fail(f"{closing!r} is missing")
            if self._kind == "sign":
                depth += (self._token == opening) - (self._token == closing)
            self._advance()
