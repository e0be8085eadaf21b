"""Express objects byte by byte: footer and trailer, and every kind of damage to them."""

import json
from pathlib import Path

import pytest

from ister.base.model import Codec, TopicName
from ister.errors import CorruptDataError, UnsupportedVersionError
from ister.format.crc import crc32
from ister.format.descriptor import (
    FORMAT_EXPRESS,
    ObjectDescriptor,
    RunId,
    decode_descriptor,
    encode_descriptor,
    parse_run_id,
)
from ister.format.express import FOOTER, MAGIC, ExpressRun, decode_footer, encode_footer
from ister.format.footer import TRAILER_BYTES
from tests.support.cases import each

OBJECT = "0123456789abcdef/fedcba9876543210/00000000000000000007.dnbx"
GOLDEN = Path(__file__).parents[2] / "golden" / "express_footer.hex"


def a_run(topic, position, length, *, start=0, end=2):
    return ExpressRun(
        TopicName.parse(topic),
        ObjectDescriptor(
            object_id=str(RunId(OBJECT, position, length)),
            start=start,
            end=end,
            size_bytes=length,
            created_at=1_700_000_000,
            offset_index=((start, 0),),
            format=FORMAT_EXPRESS,
            codec=Codec.BINCODE2,
            epoch=3,
            incarnation="aaaabbbbccccdddd",
            messages=end - start,
            publish_time_min=1,
            publish_time_max=2,
            publish_time_index=(0,),
            checksum="crc32:00000001",
            arrival_time_max=5,
        ),
    )


RUNS = [a_run("/default/a", 0, 100), a_run("/default/b", 100, 50, start=7, end=9)]


def decode(data, size=None):
    """The runs of an object whose last bytes these are; all before them has 150 bytes."""
    size = 150 + len(data) if size is None else size
    place = FOOTER.find(data[-TRAILER_BYTES:], size, path="x")
    return decode_footer(data[:-TRAILER_BYTES], place, path="x")


def test_golden_bytes():
    assert encode_footer(OBJECT, RUNS, 150).hex() == GOLDEN.read_text().strip()


def test_every_flipped_bit_is_found():
    data = bytearray(encode_footer(OBJECT, RUNS, 150))
    for at in range(len(data)):
        data[at] ^= 1
        with pytest.raises((CorruptDataError, UnsupportedVersionError)):
            decode(bytes(data))
        data[at] ^= 1


def test_every_shortened_object_is_found():
    data = encode_footer(OBJECT, RUNS, 150)
    for size in range(len(data)):
        with pytest.raises(CorruptDataError):
            decode(data[:size])


def test_newer_version_is_told_from_damage():
    data = bytearray(encode_footer(OBJECT, RUNS, 150))
    data[-12:-8] = (2).to_bytes(4, "little")
    with pytest.raises(UnsupportedVersionError):
        decode(bytes(data))


def with_footer(fields):
    footer = json.dumps(fields).encode()
    numbers = (150).to_bytes(8, "little") + len(footer).to_bytes(8, "little")
    return footer + numbers + crc32(footer).to_bytes(4, "little") + b"\1\0\0\0" + MAGIC


def good():
    data = encode_footer(OBJECT, RUNS, 150)
    return json.loads(data[:-TRAILER_BYTES])


def change(at, **fields):
    footer = good()
    footer["runs"][at] |= fields
    return footer


@each(
    "fields",
    [
        [],
        {},
        {"name": OBJECT},
        {"name": OBJECT, "runs": 5},
        {"name": OBJECT, "runs": [5]},
        {"name": OBJECT, "runs": [{}]},
        change(0, topic="no topic"),
        change(0, topic=5),
        change(0, object_id=OBJECT.replace("7", "8")),
        change(0, object_id="../../x"),
        change(0, position=1),
        change(1, position=0),
        change(1, length=49, size=49),  # a gap before the footer
        change(1, length=49),  # not its size
        change(1, format="dnb1", object_id="data-7-8.dnb1"),
        change(0, start_offset=5, end_offset=4),
        change(0, offset_index=[[0]]),
        change(0, codec="morse"),
        {**good(), "name": "another/0000000000000000/00000000000000000001.dnbx"},
    ],
)
def test_footer_with_valid_checksum_and_wrong_fields_is_damage(fields):
    assert decode(with_footer(good())) == (OBJECT, RUNS)
    with pytest.raises(CorruptDataError):
        decode(with_footer(fields))


def test_descriptor_has_position_and_length():
    described = RUNS[1].descriptor
    fields = json.loads(encode_descriptor(described))
    assert (fields["object_id"], fields["position"], fields["length"]) == (OBJECT, 100, 50)
    assert (fields["format"], fields["size"]) == ("express", 50)
    assert decode_descriptor(encode_descriptor(described), key="k") == described


@each("object_id", ["data-0-1.dnb1", OBJECT, f"{OBJECT}@1", f"{OBJECT}@01+2", f"{OBJECT}@1+0", ""])
def test_other_names_are_no_runs(object_id):
    assert parse_run_id(object_id) is None
