"""Protocol Buffers schemas: descriptor sets, and .proto texts, which are stored without parsing.

Owns: reading a serialized FileDescriptorSet, the compatibility rules, and checking payloads.
Imports are resolved inside the set, and from the well-known types that come with the library. Each
definition has a descriptor pool of its own, so names of different schemas never meet. A payload is
a message of the first type of the last file, which is the file that imports the others.

Two versions are compatible if the same bytes mean the same: fields are compared by number, names
may change. A number may not return with another type, a reserved one not at all, and a field may
not move.

Danube's clients register the text of a .proto file. Danube stores it as it is: it compares no
versions of it and checks no payloads. So does this registry; whoever wants both registers the
output of `protoc --include_imports --descriptor_set_out`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    message_factory,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    unknown_fields,
    wrappers_pb2,
)
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from google.protobuf.message import DecodeError, Message

from ister.broker.schemas.definition import fingerprint, shorten
from ister.errors import InvalidRequestError
from ister.topic.schema_kinds import SchemaType

_PROTOC_HINT: Final = (
    "register a descriptor set: protoc --include_imports --descriptor_set_out=FILE NAME.proto"
)
_WELL_KNOWN: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (
        *(any_pb2, api_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2),
        *(source_context_pb2, struct_pb2, timestamp_pb2, type_pb2, wrappers_pb2),
    )
}
_FILES_MAX: Final = 200
_PROBLEMS_MAX: Final = 50
_TEXT_CONTROLS: Final = frozenset("\t\n\r\f\v")
_READS: Final = {
    "int64": {"int32", "uint32", "bool", "enum"},
    "int32": {"bool", "enum"},
    "uint64": {"uint32", "bool"},
    "uint32": {"bool"},
    "sint64": {"sint32"},
    "bytes": {"string", "message"},
    "enum": {"int32"},
}
"""The types that each type reads beside its own, without changing any value."""
_KINDS: Final[dict[int, str]] = {
    number: name.removeprefix("TYPE_").lower()
    for name, number in descriptor_pb2.FieldDescriptorProto.Type.items()
}


@dataclass(frozen=True, slots=True)
class ProtoText:
    """The text of a .proto file, which is stored and never parsed."""

    fingerprint: str
    schema_type: SchemaType = SchemaType.PROTOBUF

    def check(self, payload: bytes) -> str | None:
        """Refuses every payload: without a descriptor set none can be checked."""
        return f"payloads cannot be checked against .proto text; {_PROTOC_HINT}"

    def cannot_read(self, writer: ProtoText | ProtobufDefinition) -> list[str]:
        """Finds no problems, since texts are not compared."""
        return []

    def breaks(self, older: ProtoText | ProtobufDefinition) -> list[str]:
        """Why this text may not follow a descriptor set: it would end all checks."""
        if isinstance(older, ProtoText):
            return []
        return [f".proto text cannot be compared with a descriptor set; {_PROTOC_HINT}"]


class ProtobufDefinition:
    """A message type and the types it needs. Immutable, thread-safe."""

    schema_type: Final = SchemaType.PROTOBUF

    def __init__(self, file: FileDescriptor) -> None:
        self.messages = dict(file.message_types_by_name)
        if not self.messages:
            raise InvalidRequestError("the Protobuf schema has no message")
        self.fingerprint = fingerprint(_canonical(file))
        first = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(first)
        root = self.messages[first.message_type[0].name]
        self._message: type[Message] = message_factory.GetMessageClass(root)

    def decode(self, payload: bytes) -> Message:
        """A payload that `check` has accepted, as a message of the first type."""
        return self._message.FromString(payload)

    def check(self, payload: bytes) -> str | None:
        """Why a payload is not a message of the first type; None if it is."""
        try:
            decoded = self._message.FromString(payload)
        except DecodeError:
            return f"not a {self._message.DESCRIPTOR.full_name}"
        typed: Any = decoded  # types-protobuf does not know FindInitializationErrors
        missing = typed.FindInitializationErrors()
        if missing:
            return f"the required field {shorten(missing[0])} is missing"
        try:
            return next(_misread(decoded), None)
        except RecursionError:
            return "nested too deep"

    def cannot_read(self, writer: ProtobufDefinition | ProtoText) -> list[str]:
        """The messages and fields of `writer` that this schema does not read as written."""
        if isinstance(writer, ProtoText):
            return []
        comparison = _Comparison()
        for name, written in writer.messages.items():
            reader = self.messages.get(name)
            if reader is None or reader.full_name != written.full_name:
                comparison.problem(written.full_name, "is missing")
            else:
                comparison.compare(reader, written)
        return comparison.problems

    def breaks(self, older: ProtobufDefinition | ProtoText) -> list[str]:
        """Numbers used again, and fields that moved."""
        if isinstance(older, ProtoText):
            return []
        problems: list[str] = []
        new_messages = {item.full_name: item for item in _all_messages(self.messages.values())}
        for before in _all_messages(older.messages.values()):
            after = new_messages.get(before.full_name)
            if after is not None:
                problems += _broken(before, after)
        return problems[:_PROBLEMS_MAX]


def read_protobuf(data: bytes) -> ProtobufDefinition | ProtoText:
    """Reads a serialized FileDescriptorSet, or takes the text of a .proto file as it is."""
    if _is_text(data):
        if not data.strip():
            raise InvalidRequestError("the Protobuf schema is empty", hint=_PROTOC_HINT)
        return ProtoText(fingerprint(data))
    files = _read_set(data)
    pool = descriptor_pool.DescriptorPool()
    given = {file.name for file in files}
    try:
        for file in files:
            for name in file.dependency:
                if name not in given:
                    _add_well_known(pool, name)
            pool.AddSerializedFile(file.SerializeToString())
        return ProtobufDefinition(pool.FindFileByName(files[-1].name))
    except (TypeError, KeyError, ValueError, DecodeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        reason = shorten(
            str(error).removeprefix("Couldn't build proto file into descriptor pool: ")
        )
        raise InvalidRequestError(f"invalid Protobuf schema: {reason}") from error


def _is_text(data: bytes) -> bool:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return False
    # A descriptor set has lengths and tags, which are control characters as text.
    return all(character >= " " or character in _TEXT_CONTROLS for character in text)


def _read_set(data: bytes) -> list[descriptor_pb2.FileDescriptorProto]:
    try:
        files = list(descriptor_pb2.FileDescriptorSet.FromString(data).file)
    except DecodeError as error:
        raise InvalidRequestError(
            "the Protobuf schema is neither a FileDescriptorSet nor text", hint=_PROTOC_HINT
        ) from error
    if not 0 < len(files) <= _FILES_MAX:
        raise InvalidRequestError(
            f"a FileDescriptorSet must have 1 to {_FILES_MAX} files, not {len(files)}"
        )
    return files


def _add_well_known(pool: descriptor_pool.DescriptorPool, name: str) -> None:
    known = _WELL_KNOWN.get(name)
    if known is None:
        raise InvalidRequestError(
            f"the import {shorten(name)!r} is not part of the schema", hint=_PROTOC_HINT
        )
    for needed in known.dependencies:
        _add_well_known(pool, needed.name)
    pool.AddSerializedFile(known.serialized_pb)


def _canonical(file: FileDescriptor) -> bytes:
    """The schema without file names, comments, and options that do not change bytes."""
    parts = []
    for needed in _with_imports(file, {}):
        proto = descriptor_pb2.FileDescriptorProto()
        needed.CopyToProto(proto)
        proto.ClearField("name")
        proto.ClearField("dependency")
        proto.ClearField("public_dependency")
        proto.ClearField("weak_dependency")
        proto.ClearField("source_code_info")
        proto.ClearField("options")
        proto.ClearField("service")
        for message_type in proto.message_type:
            _tidy_message(message_type)
        for enum_type in proto.enum_type:
            _tidy_enum(enum_type)
        for extension in proto.extension:
            _tidy_field(extension)
        parts.append(proto.SerializeToString(deterministic=True))
    return b"\n".join(parts)


def _with_imports(file: FileDescriptor, seen: dict[str, FileDescriptor]) -> list[FileDescriptor]:
    if file.name not in seen:
        seen[file.name] = file
        for needed in file.dependencies:
            if needed.name not in _WELL_KNOWN:
                _with_imports(needed, seen)
    return list(seen.values())


def _tidy_message(item: descriptor_pb2.DescriptorProto) -> None:
    for field in (*item.field, *item.extension):
        _tidy_field(field)
    for other in (*item.oneof_decl, *item.extension_range):
        other.ClearField("options")
    for inner in item.nested_type:
        _tidy_message(inner)
    for enum in item.enum_type:
        _tidy_enum(enum)
    _keep_options(item, "map_entry", "message_set_wire_format")


def _tidy_field(field: descriptor_pb2.FieldDescriptorProto) -> None:
    # protoc writes the JSON name of every field, also the default one.
    words = field.name.split("_")
    usual = words[0] + "".join(word[:1].upper() + word[1:] for word in words[1:])
    if field.json_name == usual:
        field.ClearField("json_name")
    _keep_options(field, "packed", "features")


def _tidy_enum(item: descriptor_pb2.EnumDescriptorProto) -> None:
    for value in item.value:
        value.ClearField("options")
    _keep_options(item, "allow_alias", "features")


def _keep_options(
    item: descriptor_pb2.DescriptorProto
    | descriptor_pb2.FieldDescriptorProto
    | descriptor_pb2.EnumDescriptorProto,
    *names: str,
) -> None:
    """Clears all options but those named, which change bytes."""
    kept = type(item.options)()
    for option, value in item.options.ListFields():
        if option.name in names:
            if option.message_type is None:
                setattr(kept, option.name, value)
            else:
                getattr(kept, option.name).CopyFrom(value)
    item.ClearField("options")
    if kept.ListFields():
        item.options.MergeFromString(kept.SerializeToString())


def _all_messages(messages: Iterable[Descriptor]) -> Iterator[Descriptor]:
    for item in messages:
        yield item
        yield from _all_messages(item.nested_types)


def _misread(decoded: Message) -> Iterator[str]:
    """Fields whose bytes have another wire type than the schema says; protobuf skips these."""
    by_number = decoded.DESCRIPTOR.fields_by_number
    unknown_set = unknown_fields.UnknownFieldSet(decoded)
    for index in range(len(unknown_set)):
        unknown = unknown_set[index]
        field = by_number.get(unknown.field_number)
        # A number that a closed enumeration does not know is kept as an unknown field as well.
        if field is not None and field.type != field.TYPE_ENUM:
            yield f"the field {field.full_name} has another type"
    for field, value in decoded.ListFields():
        if field.message_type is None:
            continue
        if _is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                for inner in value.values():
                    yield from _misread(inner)
        elif field.is_repeated:
            for inner in value:
                yield from _misread(inner)
        else:
            yield from _misread(value)


# -- compatibility --------------------------------------------------------------------------


class _Comparison:
    """Compares the messages of a reader's schema with those of a writer's."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._seen: set[tuple[str, str]] = set()

    def compare(self, reader: Descriptor, writer: Descriptor) -> None:
        """Collects what `reader` does not read of `writer`."""
        waiting = [(reader, writer)]
        while waiting:
            reader, writer = waiting.pop()
            pair = reader.full_name, writer.full_name
            if pair in self._seen:
                continue
            self._seen.add(pair)
            for number, field in reader.fields_by_number.items():
                written = writer.fields_by_number.get(number)
                if written is None:
                    if field.is_required:
                        self.problem(field.full_name, "is required, but not written")
                    continue
                inner, written_inner = field.message_type, written.message_type
                if self._compare_fields(field, written) and inner and written_inner:
                    waiting.append((inner, written_inner))

    def _compare_fields(self, field: FieldDescriptor, written: FieldDescriptor) -> bool:
        """Collects problems of two fields; True if their message types must be compared too."""
        if field.is_required and not written.is_required:
            self.problem(field.full_name, "is required, but may be missing")
        kind, written_kind = _kind(field), _kind(written)
        if kind != written_kind:
            if written_kind not in _READS.get(kind, ()):
                self.problem(field.full_name, f"{written_kind} is not read as {kind}")
            return False
        if field.is_repeated != written.is_repeated and (
            written.is_repeated or kind not in ("string", "bytes", "message")
        ):
            self.problem(field.full_name, "is repeated on one side only")
        inner, written_inner = field.message_type, written.message_type
        if kind == "message" and inner and written_inner:
            if _is_map(field) and _is_map(written):
                return True
            if inner.full_name != written_inner.full_name:
                self.problem(field.full_name, f"{written_inner.full_name} is not {inner.full_name}")
                return False
            return True
        enum, written_enum = field.enum_type, written.enum_type
        if kind == "enum" and enum and written_enum and enum.is_closed:
            known = set(enum.values_by_number)
            missing = [n for n in written_enum.values_by_number if n not in known]
            if missing:
                self.problem(field.full_name, f"the enum value {missing[0]} is unknown")
        return False

    def problem(self, where: str, what: str) -> None:
        """Adds a problem, up to a maximum."""
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(f"{where}: {what}")


def _broken(before: Descriptor, after: Descriptor) -> list[str]:
    problems = []
    was = descriptor_pb2.DescriptorProto()
    before.CopyToProto(was)
    for number, field in after.fields_by_number.items():
        old = before.fields_by_name.get(field.name)
        if old is not None and old.number != number:
            problems.append(f"{field.full_name}: its number changed from {old.number} to {number}")
        if number not in before.fields_by_number and any(
            reserved.start <= number < reserved.end for reserved in was.reserved_range
        ):
            problems.append(f"{field.full_name}: the number {number} was reserved")
        if old is None and field.name in was.reserved_name:
            problems.append(f"{field.full_name}: the name was reserved")
    for oneof in after.oneofs:
        moved = [
            field
            for field in oneof.fields
            if (old := before.fields_by_number.get(field.number)) is not None
            and old.containing_oneof is None
        ]
        if len(moved) > 1:
            problems.append(f"{oneof.full_name}: joins fields that could be set together")
    return problems


def _kind(field: FieldDescriptor) -> str:
    return _KINDS[field.type]


def _is_map(field: FieldDescriptor) -> bool:
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)
