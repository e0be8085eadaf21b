"""Checkpoints: round trips, and damage that always reads as "no checkpoint", never as another."""

from dataclasses import replace

import pytest

from ister.base.model import Codec
from ister.errors import UnsupportedVersionError
from ister.format.bincode import BincodeError, Writer, encode_varint
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
from tests.support.builders import (
    measured_allocation,
    with_bit_flipped,
    with_bytes_at,
    with_valid_crc,
)
from tests.support.cases import each

BOTH_CODECS = each("codec", list(Codec))
U64_MAX = 2**64 - 1

FULL_CHECKPOINT = WalCheckpoint(
    start_offset=100,
    last_offset=299,
    file_seq=2,
    file_path="wal.2.log",
    rotated_files=(
        RotatedFile(seq=0, path="wal.log", first_offset=100),
        RotatedFile(seq=1, path="größe.1.log", first_offset=2**32),
    ),
    active_file_name="wal.2.log",
    last_rotation_at=1760745600,
    active_file_first_offset=200,
)

UPLOADER_CHECKPOINT = UploaderCheckpoint(
    last_committed_offset=299,
    last_read_file_seq=1,
    last_read_byte_position=70000,
    last_object_id="data-100-299.dnb1",
    updated_at=1760745600,
)

STATE = WalState(synced=300, synced_position=6500, checkpoint=FULL_CHECKPOINT)
STATE_OF_A_TOPIC = replace(STATE, incarnation="0123456789abcdef")

ENVELOPES = each(
    ("data", "decode"),
    [
        pytest.param(encode_wal_checkpoint(STATE), decode_wal_checkpoint, id="older-wal.ckpt"),
        pytest.param(encode_wal_checkpoint(STATE_OF_A_TOPIC), decode_wal_checkpoint, id="wal.ckpt"),
        pytest.param(
            encode_uploader_checkpoint(UPLOADER_CHECKPOINT),
            decode_uploader_checkpoint,
            id="uploader.ckpt",
        ),
    ],
)


def resealed(data, position, new):
    """The envelope with other bytes at `position`, and a crc that holds for them."""
    return with_valid_crc(with_bytes_at(data[:-4], position, new))


def an_envelope(*, kind, body, extra):
    """An intact envelope with any content."""
    sizes = len(body).to_bytes(4, "little") + len(extra).to_bytes(4, "little")
    return with_valid_crc(b"ISTC" + bytes([1, kind, 0, 0]) + sizes + body + extra)


@BOTH_CODECS
def test_wal_body_with_a_thousand_files_survives_both_ways(codec):
    """Others are those of `test_any_checkpoint_survives_both_ways`."""
    checkpoint = replace(
        FULL_CHECKPOINT,
        rotated_files=tuple(
            RotatedFile(seq=n, path=f"wal.{n}.log", first_offset=n * 1000) for n in range(1000)
        ),
    )
    assert decode_wal_body(encode_wal_body(checkpoint, codec), codec) == checkpoint


def test_wal_checkpoint_of_an_older_ister_is_of_any_topic_of_its_name():
    """Goal: its files are still read, and one without the field is written as they are."""
    extra = (
        Writer(encode_varint)
        .u64(300)
        .u64(6500)
        .some(False)
        .text("bincode2")
        .text("synced")
        .finish()
    )
    older = an_envelope(kind=1, body=WAL_BODY, extra=extra)
    assert decode_wal_checkpoint(older) == STATE
    assert STATE.incarnation == ""
    assert encode_wal_checkpoint(STATE) == older


@ENVELOPES
def test_checkpoint_cut_anywhere_is_none(data, decode):
    assert decode(data) is not None
    assert [size for size in range(len(data)) if decode(data[:size]) is not None] == []


@ENVELOPES
def test_checkpoint_with_any_flipped_bit_is_none(data, decode):
    """A flip in the version byte too is damage, never a newer version."""
    wrong = [bit for bit in range(len(data) * 8) if decode(with_bit_flipped(data, bit)) is not None]
    assert wrong == []


@ENVELOPES
@each("extra", [b"\0", b"\xff", bytes(4), bytes(4096)], ids=len)
def test_checkpoint_with_bytes_behind_it_is_none(data, decode, extra):
    assert decode(data + extra) is None


@each("decode", [decode_wal_checkpoint, decode_uploader_checkpoint])
@each(
    "data",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"ISTC\1\1", id="cut-head"),
        pytest.param(bytes(16), id="head-of-zeros"),
        pytest.param(bytes(4096), id="zeros"),
        pytest.param(b"\xff" * 4096, id="ones"),
        pytest.param(b"ISTX" * 8, id="other-magic"),
    ],
)
def test_bytes_that_are_no_checkpoint_are_none(decode, data):
    assert decode(data) is None
    assert decode(with_valid_crc(data)) is None


@ENVELOPES
@each("version", [2, 3, 255])
def test_intact_checkpoint_of_a_newer_version_is_refused(data, decode, version):
    with pytest.raises(UnsupportedVersionError, match=f"version {version}"):
        decode(resealed(data, 4, bytes([version])))


@ENVELOPES
@each(
    ("position", "new"),
    [
        pytest.param(0, b"ISTX", id="other-magic"),
        pytest.param(4, b"\0", id="version-0"),
        pytest.param(5, b"\0", id="kind-0"),
        pytest.param(5, b"\3", id="unknown-kind"),
        pytest.param(8, b"\0\0\0\0", id="no-body"),
        pytest.param(8, b"\xff\xff\xff\xff", id="body-length-bomb"),
        pytest.param(12, b"\xff\xff\xff\xff", id="extra-length-bomb"),
    ],
)
def test_intact_envelope_with_an_impossible_head_is_none(data, decode, position, new):
    with measured_allocation() as allocation:
        assert decode(resealed(data, position, new)) is None
    assert allocation.peak_bytes < 64 * 1024


WAL_BODY = encode_wal_body(FULL_CHECKPOINT, Codec.BINCODE2)
EXTRA = Writer(encode_varint).u64(1).u64(2).some(False).text("bincode2").text("synced").finish()


@each(
    ("body", "extra"),
    [
        pytest.param(WAL_BODY + b"\0", EXTRA, id="bytes-behind-the-body"),
        pytest.param(WAL_BODY[:-1], EXTRA, id="cut-body"),
        pytest.param(b"", EXTRA, id="no-body"),
        pytest.param(WAL_BODY, b"", id="no-extra"),
        pytest.param(WAL_BODY, EXTRA[:-1], id="cut-extra"),
        pytest.param(WAL_BODY, EXTRA.replace(b"bincode2", b"bincode9"), id="unknown-codec"),
        pytest.param(WAL_BODY, EXTRA.replace(b"synced", b"\xff" * 6), id="ack-not-utf8"),
        pytest.param(WAL_BODY, EXTRA + b"\4abc", id="cut-incarnation"),
        pytest.param(WAL_BODY, EXTRA + b"\2\xff\xff", id="incarnation-not-utf8"),
    ],
)
def test_intact_envelope_with_bad_content_is_none(body, extra):
    assert decode_wal_checkpoint(an_envelope(kind=1, body=WAL_BODY, extra=EXTRA)) is not None
    assert decode_wal_checkpoint(an_envelope(kind=1, body=body, extra=extra)) is None


@each("body", [b"", b"\0\0\0", b"\0\0\0\2\0", b"\0\0\0\0\0\0"], ids=len)
def test_intact_uploader_envelope_with_bad_content_is_none(body):
    assert decode_uploader_checkpoint(an_envelope(kind=2, body=bytes(5), extra=b"")) is not None
    assert decode_uploader_checkpoint(an_envelope(kind=2, body=body, extra=b"")) is None


@pytest.mark.timeout(10)
@each("count", [2**20, 2**32, U64_MAX], ids=hex)
def test_count_bomb_of_rotated_files_allocates_nothing(count):
    body = b"\0\0\0\0" + encode_varint(count) + bytes(100)
    with measured_allocation() as allocation:
        assert decode_wal_checkpoint(an_envelope(kind=1, body=body, extra=EXTRA)) is None
    assert allocation.peak_bytes < 64 * 1024


@BOTH_CODECS
def test_body_of_danube_cut_anywhere_is_refused(codec):
    body = encode_wal_body(FULL_CHECKPOINT, codec)
    for size in range(len(body)):
        with pytest.raises(BincodeError):
            decode_wal_body(body[:size], codec)
    with pytest.raises(BincodeError, match="left over"):
        decode_wal_body(body + b"\0", codec)
