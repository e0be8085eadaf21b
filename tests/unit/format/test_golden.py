"""Bytes that other programs, or older versions of this one, have written or will read.

A failure here means that the format on disk has changed, not that a golden file is out of date.
"""

import zlib

from ister.base.model import Codec
from ister.format.checkpoint import (
    RotatedFile,
    UploaderCheckpoint,
    WalCheckpoint,
    WalState,
    decode_uploader_checkpoint,
    decode_wal_body,
    decode_wal_checkpoint,
    encode_uploader_checkpoint,
    encode_wal_body,
    encode_wal_checkpoint,
)
from ister.format.frame import Frame, decode_frame, encode_frame
from ister.format.message import decode_message, encode_message, recognise
from ister.format.sparse_index import IndexEntry, decode_index, encode_index
from tests.support.builders import a_message, golden
from tests.support.cases import each

WORKED_FRAMES = {
    "bincode1_frame": (Codec.BINCODE1, a_message(), 115, 0x2A0A9C08),
    "bincode2_frame": (
        Codec.BINCODE2,
        a_message(schema_id=300, schema_version=2, routing_key="k1"),
        49,
        0x76262929,
    ),
    "bincode2_frame_without_schema": (Codec.BINCODE2, a_message(), 42, 0xFB7C489A),
}

DANUBE_CHECKPOINT = WalCheckpoint(
    start_offset=0,
    last_offset=299,
    file_seq=1,
    file_path="/w/wal.1.log",
    rotated_files=(RotatedFile(seq=0, path="/w/wal.log", first_offset=0),),
    active_file_name="wal.1.log",
    last_rotation_at=None,
    active_file_first_offset=100,
)

WAL_STATE = WalState(
    synced=300,
    synced_position=6500,
    is_poisoned=True,
    codec=Codec.BINCODE1,
    ack="written",
    checkpoint=WalCheckpoint(
        start_offset=100,
        last_offset=299,
        file_seq=1,
        file_path="wal.1.log",
        rotated_files=(RotatedFile(seq=0, path="wal.log", first_offset=100),),
        active_file_name="wal.1.log",
        last_rotation_at=1760745600,
        active_file_first_offset=200,
    ),
)

UPLOADER_CHECKPOINT = UploaderCheckpoint(
    last_committed_offset=299,
    last_read_file_seq=1,
    last_read_byte_position=70000,
    last_object_id="data-100-299.dnb1",
    updated_at=1760745600,
)

INDEX = [
    IndexEntry(offset=100, position=0, publish_time_max=0),
    IndexEntry(offset=4196, position=262200, publish_time_max=1760745600000),
]


@each("name", WORKED_FRAMES)
def test_danubes_worked_message_matches_both_ways(name):
    codec, message, body_size, crc = WORKED_FRAMES[name]
    data = golden(name)
    assert encode_frame(7, encode_message(message, codec)) == data
    frame = decode_frame(data, expected_offset=7)
    assert frame == Frame(7, data[16:], 16 + body_size)
    assert zlib.crc32(frame.body) == crc
    assert decode_message(frame.body, codec) == message
    assert recognise(frame.body) is codec


@each(
    ("name", "codec", "size"),
    [
        ("bincode1_wal_checkpoint_body", Codec.BINCODE1, 114),
        ("bincode2_wal_checkpoint_body", Codec.BINCODE2, 46),
    ],
)
def test_danubes_worked_checkpoint_matches_both_ways(name, codec, size):
    data = golden(name)
    assert len(data) == size
    assert encode_wal_body(DANUBE_CHECKPOINT, codec) == data
    assert decode_wal_body(data, codec) == DANUBE_CHECKPOINT


@each(
    ("name", "encode", "decode", "value"),
    [
        ("wal_checkpoint", encode_wal_checkpoint, decode_wal_checkpoint, WAL_STATE),
        (
            "uploader_checkpoint",
            encode_uploader_checkpoint,
            decode_uploader_checkpoint,
            UPLOADER_CHECKPOINT,
        ),
        ("sparse_index", encode_index, decode_index, INDEX),
    ],
)
def test_own_file_matches_its_pinned_bytes_both_ways(name, encode, decode, value):
    assert encode(value) == golden(name)
    assert decode(golden(name)) == value
