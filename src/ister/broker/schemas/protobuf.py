"""Protocol Buffers: reading definitions, telling them apart, and whether one reads another's bytes.

Owns: what a definition may be (the text of a .proto file, or a serialized FileDescriptorSet), the
rules of compatibility, and payloads. Does not own: the grammar (`proto_text`).

Imports are resolved inside of the set, and from the well-known types that come with the library.
Each definition lives in a pool of its own: names of one never meet names of another. A payload is a
message of the first type in the file; in a set that is the last file, on which the others are
imported.

Compatible is what the same bytes mean: fields go by their numbers, names may change. A number may
not come back with another type, a reserved one not at all, and a field may not move.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from google.protobuf import (
    any_pb2,
    api_pb2,
    descriptor_pb2,
    descriptor_pool,
    duration_pb2,
    empty_pb2,
    field_mask_pb2,
    message,
    message_factory,
    source_context_pb2,
    struct_pb2,
    timestamp_pb2,
    type_pb2,
    unknown_fields,
    wrappers_pb2,
)

from ister.broker.schemas.definition import fingerprint, shorten
from ister.broker.schemas.kinds import SchemaType
from ister.broker.schemas.proto_text import read_proto_text
from ister.errors import InvalidRequestError

__all__ = ["ProtobufDefinition", "read_protobuf"]

_WELL_KNOWN: Final = {
    module.DESCRIPTOR.name: module.DESCRIPTOR
    for module in (
        *(any_pb2, api_pb2, descriptor_pb2, duration_pb2, empty_pb2, field_mask_pb2),
        *(source_context_pb2, struct_pb2, timestamp_pb2, type_pb2, wrappers_pb2),
    )
}
_FILE_NAME: Final = "schema.proto"
_FILES_MAX: Final = 200
_PROBLEMS_MAX: Final = 50
_TEXT_CONTROLS: Final = frozenset("\t\n\r\f\v")

_Field: Final = descriptor_pb2.FieldDescriptorProto
_READS: Final = {
    "int64": {"int32", "uint32", "bool", "enum"},
    "int32": {"bool", "enum"},
    "uint64": {"uint32", "bool"},
    "uint32": {"bool"},
    "sint64": {"sint32"},
    "bytes": {"string", "message"},
    "enum": {"int32"},
}
"""What each type reads beside its own: every value of these comes out as the same value."""


class ProtobufDefinition:
    """A message type and all that it needs. Immutable, thread-safe."""

    schema_type: Final = SchemaType.PROTOBUF

    def __init__(self, file: Any, pool: Any) -> None:  # noqa: ANN401 - protobuf's
        self.file = file
        """The file's descriptor."""
        self._pool = pool
        self.messages = dict(file.message_types_by_name)
        if not self.messages:
            raise InvalidRequestError("the Protobuf schema has no message")
        self.fingerprint = fingerprint(_canonical(file))
        first = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(first)
        root = self.messages[first.message_type[0].name]
        self._message = message_factory.GetMessageClass(root)

    @property
    def message_class(self) -> Any:  # noqa: ANN401 - protobuf's
        """The class of the first message type, which payloads are."""
        return self._message

    def check(self, payload: bytes) -> str | None:
        """Why a payload is not a message of the first type; None if it is."""
        try:
            decoded = self._message.FromString(payload)
        except message.DecodeError:
            return f"not a {self._message.DESCRIPTOR.full_name}"
        missing = decoded.FindInitializationErrors()
        if missing:
            return f"the required field {shorten(missing[0])} is missing"
        try:
            return next(_misread(decoded), None)
        except RecursionError:
            return "nested too deep"

    def cannot_read(self, writer: ProtobufDefinition) -> list[str]:
        """Which bytes of `writer` mean something else here, or nothing."""
        comparison = _Comparison()
        for name, written in writer.messages.items():
            reader = self.messages.get(name)
            if reader is None or reader.full_name != written.full_name:
                comparison.problem(written.full_name, "is not there")
            else:
                comparison.compare(reader, written)
        return comparison.problems

    def breaks(self, older: ProtobufDefinition) -> list[str]:
        """Numbers used again, and fields that moved."""
        problems: list[str] = []
        new_messages = {item.full_name: item for item in _all_messages(self.messages.values())}
        for before in _all_messages(older.messages.values()):
            after = new_messages.get(before.full_name)
            if after is not None:
                problems += _broken(before, after)
        return problems[:_PROBLEMS_MAX]


def read_protobuf(data: bytes) -> ProtobufDefinition:
    """Reads a Protobuf schema: the text of a .proto file, or a serialized FileDescriptorSet.

    Raises:
        InvalidRequestError: It is neither, or does not stand on its own.
    """
    text = _as_text(data)
    files = _read_set(data) if text is None else [read_proto_text(text, name=_FILE_NAME)]
    pool = descriptor_pool.DescriptorPool()
    given = {file.name for file in files}
    try:
        for file in files:
            for name in file.dependency:
                if name not in given:
                    _add_well_known(pool, name)
            pool.AddSerializedFile(file.SerializeToString())
        return ProtobufDefinition(pool.FindFileByName(files[-1].name), pool)
    except (TypeError, KeyError, ValueError, message.DecodeError, RecursionError) as error:
        if isinstance(error, InvalidRequestError):
            raise
        reason = shorten(
            str(error).removeprefix("Couldn't build proto file into descriptor pool: ")
        )
        raise InvalidRequestError(f"the Protobuf schema is wrong: {reason}") from error


def _as_text(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    # A descriptor has lengths and numbers in it, which are control characters as text.
    if any(character < " " and character not in _TEXT_CONTROLS for character in text):
        return None
    return text.removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")


def _read_set(data: bytes) -> list[Any]:
    try:
        files = list(descriptor_pb2.FileDescriptorSet.FromString(data).file)
    except message.DecodeError as error:
        raise InvalidRequestError(
            "the Protobuf schema is neither .proto text nor a FileDescriptorSet",
            hint="protoc --include_imports --descriptor_set_out makes one",
        ) from error
    if not 0 < len(files) <= _FILES_MAX:
        raise InvalidRequestError(f"a FileDescriptorSet has 1 to {_FILES_MAX} files")
    return files


def _add_well_known(pool: Any, name: str) -> None:  # noqa: ANN401 - a DescriptorPool
    known = _WELL_KNOWN.get(name)
    if known is None:
        raise InvalidRequestError(
            f"the import {shorten(name)!r} is not part of the schema",
            hint="send a FileDescriptorSet that includes its imports",
        )
    for needed in known.dependencies:
        _add_well_known(pool, needed.name)
    pool.AddSerializedFile(known.serialized_pb)


def _canonical(file: Any) -> bytes:  # noqa: ANN401 - a FileDescriptor
    """All files that matter, without their names, comments, spellings, and options of no effect."""
    parts = []
    for needed in _with_imports(file, {}):
        proto = descriptor_pb2.FileDescriptorProto()
        needed.CopyToProto(proto)
        for field in ("name", "dependency", "public_dependency", "weak_dependency"):
            proto.ClearField(field)
        for field in ("source_code_info", "options", "service"):
            proto.ClearField(field)
        for item in proto.message_type:
            _tidy_message(item)
        for item in proto.enum_type:
            _tidy_enum(item)
        for item in proto.extension:
            _tidy_field(item)
        parts.append(proto.SerializeToString(deterministic=True))
    return b"\n".join(parts)


def _with_imports(file: Any, seen: dict[str, Any]) -> list[Any]:  # noqa: ANN401
    if file.name not in seen:
        seen[file.name] = file
        for needed in file.dependencies:
            if needed.name not in _WELL_KNOWN:
                _with_imports(needed, seen)
    return list(seen.values())


def _tidy_message(item: Any) -> None:  # noqa: ANN401 - a DescriptorProto
    for field in (*item.field, *item.extension):
        _tidy_field(field)
    for other in (*item.oneof_decl, *item.extension_range):
        other.ClearField("options")
    for inner in item.nested_type:
        _tidy_message(inner)
    for inner in item.enum_type:
        _tidy_enum(inner)
    _keep_options(item, "map_entry", "message_set_wire_format")


def _tidy_field(field: Any) -> None:  # noqa: ANN401 - a FieldDescriptorProto
    # The compiler writes every field's name in JSON down, whether somebody chose it or not.
    words = field.name.split("_")
    usual = words[0] + "".join(word[:1].upper() + word[1:] for word in words[1:])
    if field.json_name == usual:
        field.ClearField("json_name")
    _keep_options(field, "packed", "features")


def _tidy_enum(item: Any) -> None:  # noqa: ANN401 - an EnumDescriptorProto
    for value in item.value:
        value.ClearField("options")
    _keep_options(item, "allow_alias", "features")


def _keep_options(item: Any, *names: str) -> None:  # noqa: ANN401 - a descriptor
    """Only what changes bytes is part of the schema."""
    kept = type(item.options)()
    for option, value in item.options.ListFields():
        if option.name in names:
            if option.message_type is None:
                setattr(kept, option.name, value)
            else:
                getattr(kept, option.name).CopyFrom(value)
    item.ClearField("options")
    if kept.ListFields():
        item.options.CopyFrom(kept)


def _all_messages(messages: Any) -> Iterator[Any]:  # noqa: ANN401 - descriptors
    for item in messages:
        yield item
        yield from _all_messages(item.nested_types)


def _misread(decoded: Any) -> Iterator[str]:  # noqa: ANN401 - a message
    """Fields whose bytes are of another type than their number says: they count as unknown."""
    by_number = decoded.DESCRIPTOR.fields_by_number
    for unknown in unknown_fields.UnknownFieldSet(decoded):
        field = by_number.get(unknown.field_number)
        # A number that a closed enumeration does not know is kept as an unknown field as well.
        if field is not None and field.type != field.TYPE_ENUM:
            yield f"the field {field.full_name} is of another type"
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
    """One comparison of a reader's messages with a writer's."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self._seen: set[tuple[str, str]] = set()

    def compare(self, reader: Any, writer: Any) -> None:  # noqa: ANN401 - descriptors
        """Notes down what `reader` does not read of `writer`."""
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
                        self.problem(field.full_name, "is required, and is not written")
                    continue
                if self._compare_fields(field, written) and field.message_type is not None:
                    waiting.append((field.message_type, written.message_type))

    def _compare_fields(self, field: Any, written: Any) -> bool:  # noqa: ANN401 - descriptors
        """Whether the types fit; True for messages means that these are to be compared."""
        if field.is_required and not written.is_required:
            self.problem(field.full_name, "is required, and may be missing")
        kind, written_kind = _kind(field), _kind(written)
        if kind != written_kind:
            if written_kind not in _READS.get(kind, ()):
                self.problem(field.full_name, f"{written_kind} is not read as {kind}")
            return False
        if field.is_repeated != written.is_repeated and (
            written.is_repeated or kind not in ("string", "bytes", "message")
        ):
            self.problem(field.full_name, "is repeated on one side only")
        if kind == "message":
            if _is_map(field) and _is_map(written):
                return True
            if field.message_type.full_name != written.message_type.full_name:
                self.problem(
                    field.full_name,
                    f"{written.message_type.full_name} is not {field.message_type.full_name}",
                )
                return False
            return True
        if kind == "enum" and field.enum_type.is_closed:
            known = set(field.enum_type.values_by_number)
            missing = [n for n in written.enum_type.values_by_number if n not in known]
            if missing:
                self.problem(field.full_name, f"the value {missing[0]} is not known")
        return False

    def problem(self, where: str, what: str) -> None:
        """Notes something down."""
        if len(self.problems) < _PROBLEMS_MAX:
            self.problems.append(f"{where}: {what}")


def _broken(before: Any, after: Any) -> list[str]:  # noqa: ANN401 - descriptors
    problems = []
    was = descriptor_pb2.DescriptorProto()
    before.CopyToProto(was)
    for number, field in after.fields_by_number.items():
        old = before.fields_by_name.get(field.name)
        if old is not None and old.number != number:
            problems.append(f"{field.full_name}: had the number {old.number}, and has {number}")
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
            problems.append(f"{oneof.full_name}: fields that could stand together exclude others")
    return problems


def _kind(field: Any) -> str:  # noqa: ANN401 - a FieldDescriptor
    name = _Field.Type.Name(field.type)
    return str(name).removeprefix("TYPE_").lower()


def _is_map(field: Any) -> bool:  # noqa: ANN401 - a FieldDescriptor
    kind = field.message_type
    return kind is not None and bool(kind.GetOptions().map_entry)
