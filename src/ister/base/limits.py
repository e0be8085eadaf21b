"""Every bound in one place, each with its reason, and how the bounds relate to each other.

Settings that a user may change live in `ister.config`; what stands here holds for every log, so
that a change of settings never makes bytes unreadable that were written before.
"""

from __future__ import annotations

from typing import Final

from ister.errors import check

KIB: Final = 1024
MIB: Final = 1024 * KIB
GIB: Final = 1024 * MIB

MESSAGE_SIZE_BYTES_DEFAULT: Final = 10 * MIB
"""`max_message_size` unless configured: what Danube's own policy allows."""

MESSAGE_SIZE_BYTES_MAX: Final = 64 * MIB
"""The most that `max_message_size` may be set to."""

ENVELOPE_SIZE_BYTES_MAX: Final = 1 * MIB
"""Names, attributes and keys of one message, encoded: they travel with every copy of it."""

FRAME_BODY_BYTES_MAX: Final = MESSAGE_SIZE_BYTES_MAX + ENVELOPE_SIZE_BYTES_MAX + 4 * KIB
"""Payload, envelope, and the ids, names and lengths around them. A length field above this is
damage. It is not a setting: a reader with a smaller limit than
the writer's would take good frames for bad ones and recovery would cut them off."""

APPEND_CHUNK_BYTES: Final = 256 * KIB
"""The append buffer is a list of chunks of about this size. A producer joins a full chunk itself,
so the size shows in its latency (some 30 µs, once in 250 messages of 1 KiB); chunk starts are where
the sparse index may put an entry."""

WRITE_BYTES_MAX: Final = 8 * MIB
"""One write(2) carries at most about this much. While a producer runs hot the writer gets the
interpreter lock only every few milliseconds, so each turn has to move megabytes."""

INDEX_STRIDE_BYTES: Final = 256 * KIB
"""The least distance between two entries of a sparse index: 2,048 entries in a 512 MiB file."""

INDEX_ENTRIES_MAX: Final = 1_000_000
"""No index file is read beyond this many entries."""

DESCRIPTOR_BYTES_MAX: Final = 64 * KIB
"""A descriptor's JSON. etcd keeps every value in memory on every node."""

EXPRESS_FOOTER_BYTES_MAX: Final = 64 * MIB
"""Largest footer of an express object: room for a hundred thousand topics."""

STAGED_FOOTER_BYTES_MAX: Final = 64 * MIB
"""Largest footer of a staged file: room for half a million segments."""

MANIFEST_BYTES_MAX: Final = 64 * MIB
"""The list of a batch's staged files: half a million of them."""

OBJECT_INDEX_ENTRIES_MAX: Final = 512
"""Entries in an object's index; beyond that every second one goes and the stride doubles."""

OWNER_LINEAGE_MAX: Final = 64
"""Changes of owner that a topic's record remembers."""

CHECKPOINT_BYTES_MAX: Final = 16 * MIB
"""A checkpoint file above this is damage: even 100,000 rotated files fit."""

CHECKPOINT_INTERVAL_SECONDS: Final = 1.0
"""How old the persisted durable watermark may become while a topic is written to."""

CHECKPOINT_BYTES_BEHIND_MAX: Final = 64 * MIB
"""How many synced bytes may lie behind the checkpoint: what opening after a crash has to scan."""

LAZY_WRITE_SECONDS: Final = 0.02
"""How long appended bytes may stay in the buffer when no caller waits for them."""

STALL_RETRY_SECONDS: Final = 0.25
"""How often a topic that met a full disk looks whether there is room again."""

IDLE_FILE_SECONDS: Final = 2.0
"""A topic without appends for this long holds no open file."""

SLOW_SYNC_SECONDS: Final = 1.0
"""A sync that takes this long is reported as a slow disk."""

SLOW_SYNC_SHOWN_SECONDS: Final = 60.0
"""A disk counts as slow for this long after its last slow sync."""

RECOVERY_CHUNK_BYTES: Final = 4 * MIB
"""How much recovery reads at once: reopening holds this much per topic, not a file."""

COMPILE_AFTER_BYTES: Final = 64 * MIB
"""Frames scanned in Python before the compiled scan is loaded: less is read in the time that
loading takes."""

MANY_ROWS: Final = 10_000
"""A call of a broker with as many rows loads the compiled loops first."""

LOAD_SECONDS: Final = 5.0
"""How long it waits for them."""

NAME_PART_CHARACTERS_MAX: Final = 120
"""Per part of a topic name: two parts, their slashes and a file name stay inside of the 255
bytes of a directory entry and of the 249 characters that other brokers allow for a name."""

SUFFIX_CACHE_ENTRIES_MAX: Final = 1024
"""Encoded producer suffixes kept per topic; the oldest half is dropped beyond that."""

check(INDEX_STRIDE_BYTES <= APPEND_CHUNK_BYTES, "an index entry is due at most once a chunk")
check(APPEND_CHUNK_BYTES <= WRITE_BYTES_MAX, "a write carries at least one chunk")
check(MESSAGE_SIZE_BYTES_DEFAULT <= MESSAGE_SIZE_BYTES_MAX, "the default is within the maximum")
check(FRAME_BODY_BYTES_MAX < 2**32, "a frame's length field has 32 bits")
