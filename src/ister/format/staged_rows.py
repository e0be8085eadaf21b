"""Staged rows: their format in the bucket, from a Spark task to the topic's owner.

    segment: block, block, …        block: u32 length · u32 crc32 · Arrow record batch (IPC)

A block is checked before it is used: nothing else would notice a bit that a store has flipped, and
after that the row would be a message like any other. The crc is of the topic's name and the record
batch: a block is never read as rows of another topic. All blocks have the schema `STAGED_SCHEMA`:
every column of a row but `topic` and `offset`, which the topic's owner gives.

The first version wrote a file for each topic: blocks alone, with the crc of the record batch alone.
Such files are read with the topic "".

Owns: the bytes of segments, and digests of rows. Does not own: where segments are in a file
(`ister.format.staged_file`), and what becomes of them.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Final

import pyarrow as pa

from ister.base.model import COLUMNS
from ister.errors import CorruptDataError
from ister.format.arrow.schema import arrow_schema
from ister.format.crc import Buffer, crc32

STAGED_COLUMNS: Final = tuple(name for name in COLUMNS if name not in ("topic", "offset"))
STAGED_SCHEMA: Final[pa.Schema] = arrow_schema(STAGED_COLUMNS)
_HEADER: Final = struct.Struct("<II")
BLOCK_HEADER_SIZE: Final = _HEADER.size
DIGEST_MODULUS: Final = 1 << 63


def encode_block(batch: pa.RecordBatch, topic: str) -> tuple[bytes, pa.Buffer]:
    """A batch with the staged schema as a block: header and body, to be written in this order."""
    body = batch.serialize()
    return _HEADER.pack(body.size, crc32(body, crc32(topic.encode()))), body


def parse_block_size(header: bytes) -> int:
    """How many bytes follow a block's header."""
    size: int = _HEADER.unpack(header)[0]
    return size


def decode_block(header: bytes, body: Buffer, *, key: str, topic: str) -> pa.RecordBatch:
    """The batch in a block.

    Raises:
        CorruptDataError: The bytes are not the ones that were written for this topic.
    """
    size, crc = _HEADER.unpack(header)
    if len(body) != size or crc32(body, crc32(topic.encode())) != crc:
        raise CorruptDataError("a staged block is damaged", path=key)
    try:
        return pa.ipc.read_record_batch(pa.py_buffer(body), STAGED_SCHEMA)
    except pa.ArrowException as error:
        raise CorruptDataError(f"a staged block has no rows: {error}", path=key) from error


def digest_rows(batch: pa.RecordBatch) -> int:
    """A digest of rows with the staged schema, whatever their order.

    The digest of two batches together is the sum of theirs, modulo `DIGEST_MODULUS`. Of each row
    the payload and the routing key count.
    """
    payloads = batch.column("payload").to_numpy(zero_copy_only=False).tolist()
    keys = batch.column("routing_key")
    if keys.null_count == len(keys):
        return sum(map(crc32, payloads)) % DIGEST_MODULUS
    texts = keys.cast(pa.binary()).fill_null(b"").to_numpy(zero_copy_only=False).tolist()
    return sum(map(crc32, texts, map(crc32, payloads))) % DIGEST_MODULUS


def join_batches(
    batches: Iterable[tuple[pa.RecordBatch, int]], *, bytes_min: int
) -> Iterator[pa.RecordBatch]:
    """Joins small batches that follow each other, until they have `bytes_min` or more bytes.

    Args:
        batches: Batches, each with its approximate size in bytes.
        bytes_min: Batches of this size or more are yielded as they are, without a copy.
    """
    few: list[pa.RecordBatch] = []
    size = 0
    for batch, batch_bytes in batches:
        if few and batch_bytes >= bytes_min:
            yield _joined(few)
            few, size = [], 0
        few.append(batch)
        size += batch_bytes
        if size >= bytes_min:
            yield _joined(few)
            few, size = [], 0
    if few:
        yield _joined(few)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    # `concat_batches` copies even a single batch.
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)
