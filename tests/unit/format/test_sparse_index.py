"""The sparse index: a bad tail costs entries, never the good ones before it."""

import pytest

from ister.format import sparse_index
from ister.format.sparse_index import INDEX_ENTRY_SIZE, IndexEntry, decode_index, encode_index
from tests.support.builders import with_bytes_at, with_valid_crc
from tests.support.cases import each

ENTRIES = [
    IndexEntry(offset=100, position=0, publish_time_max=0),
    IndexEntry(offset=101, position=1, publish_time_max=1760745600000),
    IndexEntry(offset=5000, position=2**32, publish_time_max=1760745600000),
    IndexEntry(offset=2**64 - 1, position=2**64 - 1, publish_time_max=2**64 - 1),
]
DATA = encode_index(ENTRIES)


@each("view", [bytes, bytearray, memoryview])
def test_index_survives_both_ways(view):
    assert len(DATA) == len(ENTRIES) * INDEX_ENTRY_SIZE
    assert decode_index(view(DATA)) == ENTRIES
    assert decode_index(view(b"")) == []


def test_entries_written_later_continue_the_index():
    assert encode_index(ENTRIES[:2]) + encode_index(ENTRIES[2:]) == DATA


@each(
    "tail",
    [
        pytest.param(bytes(1), id="one-zero"),
        pytest.param(bytes(4096), id="zeros"),
        pytest.param(b"\xff" * 4096, id="ones"),
        pytest.param(b"ISIX" * 64, id="marks"),
        pytest.param(DATA, id="the-index-again"),
        pytest.param(DATA[-INDEX_ENTRY_SIZE:], id="the-last-entry-again"),
        pytest.param(DATA[1:], id="out-of-step"),
    ],
)
def test_rubbish_behind_the_entries_is_ignored(tail):
    assert decode_index(DATA + tail) == ENTRIES


@each(
    "second",
    [
        pytest.param(IndexEntry(100, 51, 0), id="same-offset"),
        pytest.param(IndexEntry(99, 51, 0), id="lower-offset"),
        pytest.param(IndexEntry(101, 50, 0), id="same-position"),
        pytest.param(IndexEntry(101, 49, 0), id="lower-position"),
    ],
)
def test_entry_that_does_not_ascend_ends_the_index(second):
    first, third = IndexEntry(100, 50, 0), IndexEntry(200, 100, 0)
    assert decode_index(encode_index([first, second, third])) == [first]


def test_intact_entry_with_another_mark_ends_the_index():
    content = with_bytes_at(DATA, 2 * INDEX_ENTRY_SIZE + 24, b"ISIY")
    entry = content[2 * INDEX_ENTRY_SIZE :][: INDEX_ENTRY_SIZE - 4]
    assert (
        decode_index(with_bytes_at(content, 2 * INDEX_ENTRY_SIZE, with_valid_crc(entry)))
        == (ENTRIES[:2])
    )


@pytest.mark.parametrize("limit", [0, 1, 3, 4, 5])
def test_no_more_entries_are_read_than_the_limit(monkeypatch, limit):
    monkeypatch.setattr(sparse_index, "INDEX_ENTRIES_MAX", limit)
    assert decode_index(DATA) == ENTRIES[:limit]
