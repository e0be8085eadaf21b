"""The page of the documents' words has every word, and what it names here exists."""

from __future__ import annotations

import re

import pytest

import ister
from ister.config.aliases import ALIASES
from ister.config.reference import settings
from tests.doc_runner.pages import ROOT

PAGE = ROOT / "docs" / "howto" / "danube-words.md"
# What the design documents name: parts, calls, keys, files. Metrics are a section of their own.
WORDS = """
WalStorageFactory for_topic WalStorage PersistentStorage StorageBackend TopicStore TopicStream Wal
managed_storage Segment LogCommand run_writer WriterState WALCache TopicCache Cache ChainingStream
StartPosition::Latest StartPosition::Offset WalTailReader streaming_reader build_tail_stream
stream_from_wal_files CloudReader CloudRangeReader CloudStore BackendConfig CloudWriter Operator
EtcdMetadata ObjectDescriptor Uploader BackgroundUploader Flusher Deleter DeleterConfig
CheckpointStore WalCheckpoint UploaderCheckpoint UploaderConfig LocalBackend LocalDisk Memory
ReliableDispatch SubscriptionDispatch ProgressUpdater MessageEntry CheckpointEntry
append_message create_reader tail_reader read_range read_cached_since range_from ack_checkpoint
flush shutdown current_offset run_once wal_start_offset start_offset last_committed_offset
file_name topic_path root_prefix check_interval_minutes retention_time_minutes retention_size_mb
cache_capacity fsync_interval_ms fsync_max_batch_bytes rotate_max_bytes rotate_max_seconds
max_batch_bytes max_file_bytes max_file_seconds min_minutes min_bytes
active_subscription_grace_seconds interval_seconds stream_chunk_size concurrent_parts
max_object_bytes max_object_seconds fetch_chunk_size enable_ranged_reads credential_file
wal_cloud local_only progress_flush_interval_seconds progress_min_offset_delta
offset_index INDEX_EVERY_MSGS pending.dnb1 wal.ckpt uploader.ckpt wal.<seq>.log objects/cur
start_offset_padded upload/session active_upload upload_id wal/last_checkpoint O_DIRECT O_DSYNC
CRC32C Snappy LZ4 SSE-S3 broadcast WalFactory StreamMessage PersistentStorageError ParserState
StreamState parse_frames_from_carry scan_safe_frame_boundary_with_crc stream_frames_to_cloud
new_subscription_dispatch WalConfig UploaderBaseConfig CloudBackend read_range_streaming evict_to
put_object_descriptor get_object_descriptors get_object_descriptors_range put_current_pointer
get_wal update_wal get_uploader update_uploader current_wal_checkpoint
"""


@pytest.fixture(scope="module")
def page() -> str:
    return PAGE.read_text()


def test_page_has_every_word_of_the_documents(page):
    text = re.sub(r"^```.*?^```$", "", page, flags=re.DOTALL | re.MULTILINE)
    missing = [word for word in WORDS.split() if not re.search(rf"\b{re.escape(word)}\b", text)]
    assert missing == []


def test_page_has_every_other_name_of_a_setting(page):
    for alias in ALIASES:
        parts = alias.key.removeprefix("storage.").removesuffix(".*")
        assert f"`{parts}" in page, alias.key


def test_settings_of_the_page_exist(page):
    """A key in the right column is a setting, its section, or an option of a store."""
    known = {setting.path.removeprefix("storage.") for setting in settings()}
    sections = {path.rpartition(".")[0] for path in known}
    roots = {path.partition(".")[0] for path in known if "." in path}
    rows = re.findall(r"^\|.*\|(.*)\|$", page, re.MULTILINE)
    named = {
        name.removeprefix("storage.")
        for row in rows
        for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`?", row)
        if name.removeprefix("storage.").partition(".")[0] in roots
    }
    assert named
    for name in named:
        is_option = name.startswith("cloud.options.")
        is_file = name in {"wal.log", "wal.idx", "wal.ckpt", "uploader.ckpt"}
        assert name in known | sections or is_option or is_file, name


def test_files_and_names_of_the_page_exist(page):
    package = ROOT / "src" / "ister"
    for path in re.findall(r"`([a-z_]+/[\w/]+\.py)`", page):
        assert (package / path).exists(), path
    for name, path in re.findall(r"`(\w+)` \(`([a-z_/]+\.py)`\)", page):
        text = (package / path).read_text()
        assert re.search(rf"^(?:class|def) {name}\b", text, re.MULTILINE), f"{path}: {name}"
    members = re.findall(r"`(Topic|Log)\.(\w+)", page)
    assert members
    for kind, name in members:
        assert hasattr(getattr(ister, kind), name), f"{kind}.{name}"
