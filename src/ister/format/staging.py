"""Staged rows: how they lie in the bucket between whoever made them and the topic's owner.

    staged file: block, block, …        block: u32 length · u32 crc32 · Arrow record batch (IPC)
    manifest:    {"version": 1, "files": [{"key": …, "rows": …, "size": …}]}

A block is checked before it is used: nothing else would notice a bit that a store has flipped, and
after that the row would be a message like any other. All blocks have the schema `STAGED_SCHEMA`:
every column of a row but `topic` and `offset`, which the topic's owner gives.

Owns: the bytes. Does not own: where they are kept, and what becomes of them.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from ister.errors import CorruptDataError, UnsupportedVersionError
from ister.format.columnar import COLUMNS, arrow_schema
from ister.format.crc import Buffer, crc32

__all__ = [
    "BLOCK_HEADER_SIZE",
    "STAGED_COLUMNS",
    "STAGED_SCHEMA",
    "StagedFile",
    "decode_block",
    "decode_manifest",
    "encode_block",
    "encode_manifest",
    "parse_block_size",
]

STAGED_COLUMNS: Final = tuple(name for name in COLUMNS if name not in ("topic", "offset"))
STAGED_SCHEMA: Final[pa.Schema] = arrow_schema(STAGED_COLUMNS)
_HEADER: Final = struct.Struct("<II")
BLOCK_HEADER_SIZE: Final = _HEADER.size
_VERSION: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedFile:
    """One file of rows."""

    key: str
    rows: int
    size_bytes: int


def encode_block(batch: pa.RecordBatch) -> tuple[bytes, pa.Buffer]:
    """A batch with the staged schema as a block: header and body, to be written in this order."""
    body = batch.serialize()
    return _HEADER.pack(body.size, crc32(body)), body


def parse_block_size(header: bytes) -> int:
    """How many bytes follow a block's header."""
    size: int = _HEADER.unpack(header)[0]
    return size


def decode_block(header: bytes, body: Buffer, *, key: str) -> pa.RecordBatch:
    """The batch in a block.

    Raises:
        CorruptDataError: The bytes are not the ones that were written.
    """
    size, crc = _HEADER.unpack(header)
    if len(body) != size or crc32(body) != crc:
        raise CorruptDataError("a staged block is damaged", path=key)
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(body), STAGED_SCHEMA)
    except pa.ArrowException as error:
        raise CorruptDataError(f"a staged block has no rows: {error}", path=key) from error


def encode_manifest(files: Sequence[StagedFile]) -> bytes:
    """The list of files a batch is made of, in their order."""
    listed = [{"key": file.key, "rows": file.rows, "size": file.size_bytes} for file in files]
    return json.dumps({"version": _VERSION, "files": listed}, separators=(",", ":")).encode()


def decode_manifest(data: bytes, *, key: str) -> tuple[StagedFile, ...]:
    """Reads a manifest.

    Raises:
        CorruptDataError: It is something else.
        UnsupportedVersionError: A newer Ister wrote it.
    """
    try:
        fields = json.loads(data)
        if fields["version"] != _VERSION:
            raise UnsupportedVersionError(
                f"a manifest of version {fields['version']}",
                path=key,
                hint="finish the batch with the newer Ister that began it",
            )
        return tuple(
            StagedFile(key=str(f["key"]), rows=int(f["rows"]), size_bytes=int(f["size"]))
            for f in fields["files"]
        )
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise CorruptDataError(f"not a manifest: {error!r}", path=key) from error
