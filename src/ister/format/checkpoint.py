"""Checkpoints: what a topic remembers beside its files, so that opening it is quick.

    0      4     5      6        8          12          16
    ┌──────┬─────┬──────┬────────┬──────────┬───────────┬──────┬───────┬───────┐
    │ ISTC │ ver │ kind │ 0  0   │ body_len │ extra_len │ body │ extra │ crc32 │
    └──────┴─────┴──────┴────────┴──────────┴───────────┴──────┴───────┴───────┘
       4     u8    u8      u16       u32         u32                      u32, over all before it

`body` has Danube's own fields in Danube's own order, in bincode 2; `extra` has what Ister adds.
The crc covers the version byte and is checked first: a flipped bit is damage, an intact envelope
with a higher version is `UnsupportedVersionError`, and the two are never mixed up.

A checkpoint is a hint. Damage makes `decode_*` return None, and recovery then works from the
files alone.

Offsets in `WalCheckpoint.last_offset` are inclusive, as Danube's are: `extra.synced` is the half
open watermark that the code works with, and the two are converted here and nowhere else.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from ister.base.model import Codec
from ister.errors import UnsupportedVersionError
from ister.format.bincode import (
    BincodeError,
    BodyReader,
    FixintReader,
    VarintReader,
    Writer,
    encode_fixint,
    encode_varint,
)
from ister.format.crc import crc32

_MAGIC: Final = b"ISTC"
_VERSION: Final = 1
_ENVELOPE: Final = struct.Struct("<4sBBHII")
_CRC: Final = struct.Struct("<I")


class _Kind(IntEnum):
    WAL = 1
    UPLOADER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class RotatedFile:
    """A file that is full and synced."""

    seq: int
    path: str
    first_offset: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WalCheckpoint:
    """Danube's WAL checkpoint. Ister writes file names relative to the topic's directory."""

    start_offset: int = 0
    """The first offset still in local files."""
    last_offset: int = 0
    """The last durable offset, inclusive; 0 also when there is none (see WalState.synced)."""
    file_seq: int = 0
    file_path: str = ""
    rotated_files: tuple[RotatedFile, ...] = ()
    active_file_name: str | None = None
    last_rotation_at: int | None = None
    """Seconds since the Unix epoch."""
    active_file_first_offset: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class WalState:
    """What Ister keeps beside Danube's fields."""

    synced: int
    """The durable watermark: damage below it is corruption, above it a torn tail."""
    synced_position: int
    """Where, in the active file, the frame `synced` begins or will begin."""
    is_poisoned: bool = False
    """A sync failed: what the files hold above `synced` may exist in the page cache only."""
    codec: Codec = Codec.BINCODE2
    ack: str = "synced"
    incarnation: str = ""
    """Which topic of its name this is; empty for a log without a bucket, and in older files."""
    epoch: int = 0
    """The epoch of the owner that wrote it; 0 for a log without a bucket, and in older files."""
    claim: str = ""
    """That owner's claim: distinguishes two owners with the same epoch."""
    checkpoint: WalCheckpoint = field(default_factory=WalCheckpoint)

    def first_offsets(self) -> dict[int, int]:
        """Where each file begins, by its number."""
        checkpoint = self.checkpoint
        known = {rotated.seq: rotated.first_offset for rotated in checkpoint.rotated_files}
        if checkpoint.active_file_first_offset is not None:
            known[checkpoint.file_seq] = checkpoint.active_file_first_offset
        return known


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderCheckpoint:
    """The uploader's progress, and where it continues to read."""

    last_committed_offset: int
    last_read_file_seq: int
    last_read_byte_position: int
    last_object_id: str | None
    updated_at: int
    """Seconds since the Unix epoch."""


def encode_wal_body(checkpoint: WalCheckpoint, codec: Codec) -> bytes:
    """Danube's fields, as Danube writes them."""
    writer = (
        _writer(codec)
        .u64(checkpoint.start_offset)
        .u64(checkpoint.last_offset)
        .u64(checkpoint.file_seq)
        .text(checkpoint.file_path)
        .u64(len(checkpoint.rotated_files))
    )
    for rotated in checkpoint.rotated_files:
        writer.u64(rotated.seq).text(rotated.path).u64(rotated.first_offset)
    writer.some(checkpoint.active_file_name is not None)
    if checkpoint.active_file_name is not None:
        writer.text(checkpoint.active_file_name)
    _write_optional_u64(writer, checkpoint.last_rotation_at)
    _write_optional_u64(writer, checkpoint.active_file_first_offset)
    return writer.finish()


def decode_wal_body(body: bytes, codec: Codec) -> WalCheckpoint:
    """Danube's fields, read back.

    Raises:
        BincodeError: The bytes are something else.
    """
    reader = _reader(body, codec)
    start_offset, last_offset, file_seq = reader.u64(), reader.u64(), reader.u64()
    file_path = reader.text()
    rotated_files = tuple(
        RotatedFile(seq=reader.u64(), path=reader.text(), first_offset=reader.u64())
        for _ in range(reader.u64())
    )
    checkpoint = WalCheckpoint(
        start_offset=start_offset,
        last_offset=last_offset,
        file_seq=file_seq,
        file_path=file_path,
        rotated_files=rotated_files,
        active_file_name=reader.text() if reader.some() else None,
        last_rotation_at=reader.u64() if reader.some() else None,
        active_file_first_offset=reader.u64() if reader.some() else None,
    )
    _expect_end(reader)
    return checkpoint


def encode_uploader_body(checkpoint: UploaderCheckpoint, codec: Codec) -> bytes:
    """Danube's fields, as Danube writes them."""
    writer = (
        _writer(codec)
        .u64(checkpoint.last_committed_offset)
        .u64(checkpoint.last_read_file_seq)
        .u64(checkpoint.last_read_byte_position)
        .some(checkpoint.last_object_id is not None)
    )
    if checkpoint.last_object_id is not None:
        writer.text(checkpoint.last_object_id)
    return writer.u64(checkpoint.updated_at).finish()


def decode_uploader_body(body: bytes, codec: Codec) -> UploaderCheckpoint:
    """Danube's fields, read back.

    Raises:
        BincodeError: The bytes are something else.
    """
    reader = _reader(body, codec)
    checkpoint = UploaderCheckpoint(
        last_committed_offset=reader.u64(),
        last_read_file_seq=reader.u64(),
        last_read_byte_position=reader.u64(),
        last_object_id=reader.text() if reader.some() else None,
        updated_at=reader.u64(),
    )
    _expect_end(reader)
    return checkpoint


def encode_wal_checkpoint(state: WalState) -> bytes:
    """The whole of `wal.ckpt`."""
    writer = (
        Writer(encode_varint)
        .u64(state.synced)
        .u64(state.synced_position)
        .some(state.is_poisoned)
        .text(state.codec)
        .text(state.ack)
    )
    if state.incarnation:
        writer.text(state.incarnation)
        if state.epoch:
            writer.u64(state.epoch).text(state.claim)
    extra = writer.finish()
    return _seal(_Kind.WAL, encode_wal_body(state.checkpoint, Codec.BINCODE2), extra)


def decode_wal_checkpoint(data: bytes) -> WalState | None:
    """The content of `wal.ckpt`, or None if it is damaged.

    Raises:
        UnsupportedVersionError: It is intact, and newer than this code.
    """
    if (opened := _open(_Kind.WAL, data)) is None:
        return None
    body, extra = opened
    try:
        reader = VarintReader(extra)
        return WalState(
            synced=reader.u64(),
            synced_position=reader.u64(),
            is_poisoned=reader.some(),
            codec=Codec(reader.text()),
            ack=reader.text(),
            incarnation="" if reader.at_end() else reader.text(),
            epoch=0 if reader.at_end() else reader.u64(),
            claim="" if reader.at_end() else reader.text(),
            checkpoint=decode_wal_body(body, Codec.BINCODE2),
        )
    except ValueError:
        return None


def encode_uploader_checkpoint(checkpoint: UploaderCheckpoint) -> bytes:
    """The whole of `uploader.ckpt`."""
    return _seal(_Kind.UPLOADER, encode_uploader_body(checkpoint, Codec.BINCODE2), b"")


def decode_uploader_checkpoint(data: bytes) -> UploaderCheckpoint | None:
    """The content of `uploader.ckpt`, or None if it is damaged.

    Raises:
        UnsupportedVersionError: It is intact, and newer than this code.
    """
    if (opened := _open(_Kind.UPLOADER, data)) is None:
        return None
    try:
        return decode_uploader_body(opened[0], Codec.BINCODE2)
    except BincodeError:
        return None


def _seal(kind: _Kind, body: bytes, extra: bytes) -> bytes:
    head = _ENVELOPE.pack(_MAGIC, _VERSION, kind, 0, len(body), len(extra))
    content = head + body + extra
    return content + _CRC.pack(crc32(content))


def _open(kind: _Kind, data: bytes) -> tuple[bytes, bytes] | None:
    if len(data) < _ENVELOPE.size + _CRC.size:
        return None
    content = data[: -_CRC.size]
    if _CRC.unpack_from(data, len(content))[0] != crc32(content):
        return None
    magic, version, found_kind, _, body_size, extra_size = _ENVELOPE.unpack_from(content)
    if magic != _MAGIC or version == 0:
        return None
    if version > _VERSION:
        raise UnsupportedVersionError(
            f"unsupported checkpoint version {version}; this Ister supports up to {_VERSION}",
            hint="open the log with the newer Ister that wrote it",
        )
    if found_kind != kind or len(content) != _ENVELOPE.size + body_size + extra_size:
        return None
    body_end = _ENVELOPE.size + body_size
    return content[_ENVELOPE.size : body_end], content[body_end:]


def _writer(codec: Codec) -> Writer:
    return Writer(encode_varint if codec is Codec.BINCODE2 else encode_fixint)


def _reader(body: bytes, codec: Codec) -> BodyReader:
    return VarintReader(body) if codec is Codec.BINCODE2 else FixintReader(body)


def _write_optional_u64(writer: Writer, value: int | None) -> None:
    writer.some(value is not None)
    if value is not None:
        writer.u64(value)


def _expect_end(reader: BodyReader) -> None:
    if not reader.at_end():
        raise BincodeError(f"bytes left over from {reader.position} on")
