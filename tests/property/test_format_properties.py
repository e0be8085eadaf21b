"""Properties that hold for all messages and for all bytes, with inputs made by hypothesis.

A failure prints the smallest input and `@reproduce_failure`; put that above the test to replay it.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ister.base.model import Codec
from ister.format.checkpoint import (
    RotatedFile,
    UploaderCheckpoint,
    WalCheckpoint,
    WalState,
    decode_uploader_body,
    decode_uploader_checkpoint,
    decode_wal_body,
    decode_wal_checkpoint,
    encode_uploader_body,
    encode_uploader_checkpoint,
    encode_wal_body,
    encode_wal_checkpoint,
)
from ister.format.message import decode_message, decode_publish_time, encode_message, recognise
from ister.format.sparse_index import IndexEntry, decode_index, encode_index
from tests.support.builders import a_message, bincode_body, frames
from tests.support.invariants import check_body, check_frames
from tests.support.message_strategies import EXAMPLES, MESSAGES, OPTIONAL_TEXT, TEXT, U64, damaged

BOTH_CODECS = pytest.mark.parametrize("codec", list(Codec))

BODIES = st.lists(st.binary(min_size=1, max_size=100), max_size=6)


@BOTH_CODECS
@EXAMPLES
@given(data=st.data())
def test_any_message_survives_both_ways(codec, data):
    message = data.draw(MESSAGES[codec])
    body = encode_message(message, codec)
    assert body == bincode_body(message, codec)
    assert decode_message(body, codec) == message
    assert decode_publish_time(body, codec) == message.publish_time
    assert recognise(body, offset=message.msg_id.topic_offset) is codec


@EXAMPLES
@given(body=st.binary(max_size=200))
def test_any_bytes_decode_or_are_refused(body):
    check_body(body)


@pytest.mark.nightly
@BOTH_CODECS
@EXAMPLES
@given(data=st.data())
def test_damaged_message_decodes_or_is_refused(codec, data):
    message = data.draw(st.just(a_message()) | MESSAGES[codec])
    check_body(data.draw(damaged(encode_message(message, codec))))


FIRST_OFFSETS = st.integers(0, 2**64 - 10)


@EXAMPLES
@given(first_offset=FIRST_OFFSETS, bodies=BODIES, is_expected=st.booleans())
def test_frames_are_all_found(first_offset, bodies, is_expected):
    buffer = frames(first_offset, bodies)
    _, found = check_frames(buffer, expected_offset=first_offset if is_expected else None)
    assert [(frame.offset, frame.body) for frame in found] == [
        (first_offset + index, body) for index, body in enumerate(bodies)
    ]


@EXAMPLES
@given(data=st.data(), first_offset=FIRST_OFFSETS, bodies=BODIES)
def test_frames_found_among_damage_are_whole(data, first_offset, bodies):
    buffer = data.draw(damaged(frames(first_offset, bodies)))
    _, found = check_frames(buffer, expected_offset=first_offset)
    # Not always one of `bodies`: 00 00 00 ff is the crc of the body ff, and may have been put in.
    assert all(frames(frame.offset, [frame.body]) in buffer for frame in found)


@EXAMPLES
@given(buffer=st.binary(max_size=200), expected_offset=st.none() | U64)
def test_any_bytes_are_scanned_as_they_are_decoded(buffer, expected_offset):
    check_frames(buffer, expected_offset=expected_offset)


WAL_STATES = st.builds(
    WalState,
    synced=U64,
    synced_position=U64,
    is_poisoned=st.booleans(),
    codec=st.sampled_from(Codec),
    ack=TEXT,
    incarnation=TEXT,
    checkpoint=st.builds(
        WalCheckpoint,
        start_offset=U64,
        last_offset=U64,
        file_seq=U64,
        file_path=TEXT,
        rotated_files=st.lists(
            st.builds(RotatedFile, seq=U64, path=TEXT, first_offset=U64), max_size=4
        ).map(tuple),
        active_file_name=OPTIONAL_TEXT,
        last_rotation_at=st.none() | U64,
        active_file_first_offset=st.none() | U64,
    ),
)
UPLOADER_CHECKPOINTS = st.builds(
    UploaderCheckpoint,
    last_committed_offset=U64,
    last_read_file_seq=U64,
    last_read_byte_position=U64,
    last_object_id=OPTIONAL_TEXT,
    updated_at=U64,
)


@EXAMPLES
@given(state=WAL_STATES, uploader=UPLOADER_CHECKPOINTS)
def test_any_checkpoint_survives_both_ways(state, uploader):
    assert decode_wal_checkpoint(encode_wal_checkpoint(state)) == state
    assert decode_uploader_checkpoint(encode_uploader_checkpoint(uploader)) == uploader
    for codec in Codec:
        wal = state.checkpoint
        assert decode_wal_body(encode_wal_body(wal, codec), codec) == wal
        assert decode_uploader_body(encode_uploader_body(uploader, codec), codec) == uploader


@EXAMPLES
@given(
    entries=st.lists(
        st.builds(IndexEntry, offset=U64, position=U64, publish_time_max=U64),
        max_size=8,
        unique_by=(lambda entry: entry.offset, lambda entry: entry.position),
    ),
    data=st.data(),
)
def test_damaged_index_keeps_the_entries_before_the_damage(entries, data):
    """The entries are made to ascend, encoded and damaged.

    Those that lie before the damage must be read, and nothing that the bytes do not say.
    """
    ascending = [
        IndexEntry(offset, position, publish_time_max)
        for offset, position, publish_time_max in zip(
            sorted(entry.offset for entry in entries),
            sorted(entry.position for entry in entries),
            sorted(entry.publish_time_max for entry in entries),
            strict=True,
        )
    ]
    whole = encode_index(ascending)
    assert decode_index(whole) == ascending
    bad = data.draw(damaged(whole))
    intact = sum(bad.startswith(whole[: end * 32]) for end in range(1, len(ascending) + 1))
    decoded = decode_index(bad)
    assert decoded[:intact] == ascending[:intact]
    assert encode_index(decoded) == bad[: len(decoded) * 32]
