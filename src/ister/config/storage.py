"""`storage`: where and how messages are stored."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from ister.base.limits import GIB, KIB, MESSAGE_SIZE_BYTES_DEFAULT, MESSAGE_SIZE_BYTES_MAX, MIB
from ister.base.model import AckLevel, Codec, Layout
from ister.config.settings import setting


class StorageMode(StrEnum):
    """Where messages go."""

    WAL_CLOUD = "wal_cloud"
    """Local files first, then a bucket."""
    LOCAL_ONLY = "local_only"
    """Local files only."""
    MEMORY = "memory"
    """Nothing is kept on disk."""
    BUCKET = "bucket"
    """A bucket without local files; messages are in memory until they are uploaded."""

    @property
    def has_bucket(self) -> bool:
        """Whether messages go to a bucket, with a metadata store beside it."""
        return self in (StorageMode.WAL_CLOUD, StorageMode.BUCKET)


class Engine(StrEnum):
    """What uploads objects."""

    AUTO = "auto"
    """The holder of the pipeline lease; without one, threads of this process."""
    EMBEDDED = "embedded"
    SPARK = "spark"
    NONE = "none"


class Finalize(StrEnum):
    """How an object gets its final name."""

    DIRECT = "direct"
    """Written under its final name."""
    COPY = "copy"
    """It is written under a pending one and copied: for stores that list unfinished objects."""


class CloudBackend(StrEnum):
    """Kinds of object stores."""

    FS = "fs"
    LOCAL = "local"
    S3 = "s3"
    GCS = "gcs"
    AZBLOB = "azblob"
    MEMORY = "memory"


class MetadataBackend(StrEnum):
    """Kinds of metadata stores."""

    SQLITE = "sqlite"
    ETCD = "etcd"
    MEMORY = "memory"


class OnDamage(StrEnum):
    """What reading history does where an object is damaged."""

    ERROR = "error"
    SKIP = "skip"


class Verify(StrEnum):
    """How the bucket's copy is checked before a local file is removed."""

    CONTENT = "content"
    """Every byte is read and its checksum compared."""
    SIZE = "size"


class BufferFull(StrEnum):
    """What an append does when the buffer is full."""

    BLOCK = "block"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True, kw_only=True)
class WalRetentionConfig:
    """`storage.wal.retention`: when local files are removed.

    With a bucket, only files that were uploaded are removed, by limits (`time_minutes`, `size_mb`:
    either is enough) or by floors (`min_minutes`, `min_bytes`: both must allow it). With
    `local_only`, a file is the only copy: only limits that are set explicitly apply. Not used with
    mode `bucket`.
    """

    check_interval_minutes: int = setting(
        5, low=1, high=100_000, says="How often retention checks local files and objects."
    )
    time_minutes: int | None = setting(
        1440,
        low=0,
        says="Remove rotated files this long after their last write; null keeps them. With "
        "`local_only` the default is null, and a limit deletes the messages.",
    )
    size_mb: int | None = setting(
        10240,
        low=0,
        says="The oldest rotated files of a topic are removed while its files take more than this; "
        "null keeps them. With `local_only` the default is null.",
    )
    min_minutes: int | None = setting(
        None,
        low=0,
        says="Keep rotated files at least this long after their last write. With a floor, "
        "`min_minutes` or `min_bytes`, the limits do not apply: a file is removed once it is "
        "uploaded, active subscriptions have read it, and every floor that is set allows it. Not "
        "with `local_only`.",
    )
    min_bytes: int | None = setting(
        None,
        low=0,
        says="Keep rotated files while the topic's files take no more than this. A floor, as "
        "`min_minutes`.",
    )
    active_subscription_grace_seconds: int = setting(
        300,
        low=0,
        says="A subscription is active if a consumer is connected, or if it moved within this "
        "time. Files that an active subscription has not read are kept.",
    )
    verify: Verify = setting(
        Verify.CONTENT,
        says="How the bucket's copy is checked before the local file is removed: `content` (every "
        "byte) or `size`.",
    )

    @property
    def has_floors(self) -> bool:
        """Whether floors are set, in place of limits."""
        return self.min_minutes is not None or self.min_bytes is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """`storage.wal`: the write-ahead log, local files that messages are written to first."""

    dir: str | None = setting(
        None,
        is_path=True,
        says="Directory of all topics' logs; required by `wal_cloud`, refused by `bucket`. Without "
        "one, nothing is kept on disk.",
    )
    cache_capacity: int = setting(
        1024,
        low=1,
        high=1 << 24,
        says="Messages kept in memory per topic for readers near the tail.",
    )
    cache_max_bytes: int = setting(
        16 * MIB,
        low=KIB,
        says="Bytes kept in memory per topic; the limit that is reached first applies.",
    )
    fsync_interval_ms: int = setting(
        5000,
        low=1,
        high=3_600_000,
        says="How long written bytes may stay unsynced when no append waits for `synced`.",
    )
    fsync_max_batch_bytes: int = setting(
        10 * MIB,
        low=1,
        says="How many written bytes may stay unsynced when no append waits for `synced`.",
    )
    rotate_max_bytes: int = setting(
        512 * MIB,
        low=4 * KIB,
        says="Size at which a file is rotated; one write (8 MiB) may exceed it.",
    )
    rotate_max_seconds: int = setting(
        3600, low=1, says="Age at which a file is rotated, at the next append."
    )
    stream_chunk_size: int = setting(
        4 * MIB,
        low=64 * KIB,
        high=64 * MIB,
        says="Bytes that a reader reads from a file at once; bounds its memory.",
    )
    buffer_max_bytes: int = setting(
        64 * MIB, low=64 * KIB, says="Appended bytes per topic that are not yet written."
    )
    buffer_full: BufferFull = setting(
        BufferFull.BLOCK,
        says="Whether an append to a full buffer waits, or fails with `CapacityError`.",
    )
    writer_threads: int = setting(
        4,
        low=1,
        high=64,
        says="Threads that write and sync for all topics together; as many sync what no call waits "
        "for, and save checkpoints.",
    )
    max_open_files: int = setting(
        256,
        low=1,
        says="Files open for writing at once; beyond that, the longest idle are synced and closed.",
    )
    retention: WalRetentionConfig = field(default_factory=WalRetentionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpressConfig:
    """`storage.uploader.express`: express objects, which topics share to be tiered sooner."""

    all_topics: bool = setting(
        False,
        says="Whether all topics share express objects, not only those with ack level `tiered`.",
    )
    linger_ms: int = setting(
        250,
        low=1,
        high=60_000,
        says="Minimum time between the starts of two express objects; less if `max_bytes` wait.",
    )
    max_bytes: int = setting(
        8 * MIB,
        low=64 * KIB,
        high=256 * MIB,
        says="Size at which an express object is written at once; one message may exceed it.",
    )
    resort_seconds: int = setting(
        300,
        low=1,
        high=86_400,
        says="Age at which a topic's runs in express objects are re-sorted into an object of the "
        "topic; sooner if they fill an object, or if there are 100.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderConfig:
    """`storage.uploader`: how synced messages become objects."""

    engine: Engine = setting(
        Engine.AUTO,
        says="What uploads: `auto`, this process unless a pipeline holds the lease; `embedded`, "
        "this process in any case; `spark`, a pipeline in any case; `none`, calls of "
        "`Topic.upload`.",
    )
    interval_seconds: int = setting(
        10, low=1, high=86_400, says="Longest time from sync to the start of the upload."
    )
    max_batch_bytes: int = setting(
        8 * MIB, low=1, says="Uploads start early when this many bytes are waiting."
    )
    max_object_bytes: int = setting(
        128 * MIB,
        low=4 * KIB,
        says="Maximum size of an object; a larger message gets its own object.",
    )
    max_object_seconds: int = setting(
        300, low=1, says="Longest time between the arrival of an object's first and last message."
    )
    finalize: Finalize = setting(
        Finalize.DIRECT,
        says="How an object gets its final name: `direct`, or `copy` from a pending one, for "
        "stores that list unfinished objects.",
    )
    stream_chunk_size: int = setting(
        8 * MIB,
        low=64 * KIB,
        high=512 * MIB,
        says="Part size of a multipart upload; S3 requires at least 5 MiB.",
    )
    concurrent_parts: int = setting(4, low=1, high=64, says="Parts of one object uploaded at once.")
    index_every_messages: int = setting(
        1000,
        low=1,
        says="Messages (or 1 MiB) between the entries of an object's index; widens to keep at most "
        "512.",
    )
    threads: int = setting(
        4, low=1, high=64, says="Topics uploaded at once; bounds the memory of uploads."
    )
    max_bytes_per_second: int | None = setting(
        None,
        low=64 * KIB,
        says="Upload rate of this process, all topics together, in bytes per second; null is no "
        "limit. The tasks of a pipeline's `tier` job share it.",
    )
    max_lag_bytes: int = setting(
        8 * GIB,
        low=1,
        says="Synced bytes of a topic that are not in the bucket; beyond that producers wait, or "
        "are refused as `buffer_full` says.",
    )
    express: ExpressConfig = field(default_factory=ExpressConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRetentionConfig:
    """`storage.cloud.retention`: when objects are deleted; never by default."""

    time_minutes: int | None = setting(
        None,
        low=1,
        says="Delete objects this long after their last message arrived; null keeps them.",
    )
    size_mb: int | None = setting(
        None,
        low=1,
        says="Delete a topic's oldest objects while it has more than this; null keeps them.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """`storage.cloud`: where objects live."""

    backend: CloudBackend = setting(
        CloudBackend.FS, says="Kind of object store; `local` means `fs`."
    )
    root: str | None = setting(
        None,
        is_path=True,
        says="A directory for `fs` (`objects` beside `wal.dir` unless set), `s3://bucket/prefix`, "
        "`gs://…`, `azblob://…`",
    )
    options: Mapping[str, str] = setting(
        {},
        is_secret=True,
        says="Options of the store: `region`, `endpoint`, `access_key`, `secret_key`, …; values "
        "are redacted.",
    )
    layout: Layout = setting(
        Layout.OBJECTS,
        says="Folder and names of new objects of frames: `objects`, or `segments`, where Danube "
        "0.9 and later, and its Iceberg sidecar, look for them. Existing objects stay where they "
        "are.",
    )
    call_timeout_seconds: int = setting(
        60, low=1, high=3600, says="Timeout of a call to the store."
    )
    retention: CloudRetentionConfig = field(default_factory=CloudRetentionConfig)
    orphan_grace_minutes: int = setting(
        1440,
        low=0,
        says="Age at which objects that belong to no topic are deleted. Staged rows are kept for "
        "at least an hour, and so are objects that a compaction has replaced, and all such objects "
        "while jobs run.",
    )
    given_as: dict[str, str] = field(default_factory=dict, compare=False, repr=False)
    """The aliases that settings were given by, for errors of the store; not a setting."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudReaderConfig:
    """`storage.cloud_reader`: how history is read."""

    fetch_chunk_size: int = setting(
        4 * MIB,
        low=64 * KIB,
        high=64 * MIB,
        says="Bytes of an object read at once; bounds a reader's memory.",
    )
    enable_ranged_reads: bool = setting(
        True, says="Whether to read ranges of objects; turn it off for stores without ranged reads."
    )
    read_ahead: bool = setting(
        True, says="Whether to prefetch the next chunk, or small objects that follow."
    )
    on_damage: OnDamage = setting(
        OnDamage.ERROR,
        says="Whether a damaged message or a lost object is an error, or is skipped and logged.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdTlsConfig:
    """`storage.metadata.tls`: TLS connections to etcd. Changed files are read again."""

    ca_file: str | None = setting(
        None,
        is_path=True,
        says="CA certificates that sign those of etcd's members, PEM; unset, the CA certificates "
        "that come with gRPC.",
    )
    cert_file: str | None = setting(
        None, is_path=True, says="Client certificate chain, PEM, for etcd with mutual TLS."
    )
    key_file: str | None = setting(
        None, is_path=True, says="Private key of the client certificate, PEM."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataConfig:
    """`storage.metadata`: the store of ownership and of the list of objects."""

    backend: MetadataBackend = setting(
        MetadataBackend.SQLITE, says="Kind of metadata store; `etcd` needs the extra `ister[etcd]`."
    )
    path: str | None = setting(
        None,
        is_path=True,
        says="SQLite's file; `metadata.db` beside `wal.dir` unless set. Required by mode `bucket` "
        "with `sqlite`.",
    )
    endpoints: tuple[str, ...] = setting(
        (),
        says="Addresses of etcd's members, as host:port. TLS is used if they begin with "
        "`https://`, or if `tls` is set.",
    )
    username: str | None = setting(None, says="User name for etcd.")
    password: str | None = setting(None, is_secret=True, says="Password for etcd; redacted.")
    tls: EtcdTlsConfig = field(default_factory=EtcdTlsConfig)
    root_prefix: str = setting("/danube", says="Prefix of all keys.")
    lease_ttl_seconds: int = setting(
        15,
        low=2,
        high=3600,
        says="Time to live of a lease: how long a process that died still owns its topics.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """`storage.disk`: space kept free on the disks of the log, its SQLite file and its bucket."""

    min_free: int | None = setting(
        None,
        low=0,
        says="Free space, in bytes, below which appends fail with `CapacityError` and uploaded "
        "local files are removed. Appends resume when a quarter more is free. null is 256 MiB, or "
        "5 % of a smaller disk; 0 turns it off.",
    )
    reserve: int | None = setting(
        None,
        low=0,
        says="Size, in bytes, of the file `.reserve` beside the topics. It is truncated when the "
        "disk is full, because freeing space needs some for metadata and checkpoints. null is 1 % "
        "of the disk, 1 MiB to 16 MiB, and none on disks below 16 MiB; 0 turns it off.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketConfig:
    """`storage.bucket`: a log without local files (`mode: bucket`)."""

    memory_max_bytes: int = setting(
        256 * MIB,
        low=MIB,
        says="Memory for messages on their way to the bucket, all topics together; when it is "
        "full, producers wait or are refused, as `wal.buffer_full` says. Up to half of it keeps "
        "uploaded messages for readers. The backlog of one topic takes at most a quarter.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """`storage`: where and how messages are stored."""

    mode: StorageMode = setting(
        StorageMode.WAL_CLOUD,
        says="Where messages are stored: `wal_cloud`, files and then a bucket; `bucket`, a bucket "
        "without local files; `local_only`, files alone; `memory`, nothing is kept.",
    )
    ack: AckLevel = setting(
        AckLevel.SYNCED, says="Default ack level of topics; with mode `bucket` always `tiered`."
    )
    codec: Codec = setting(
        Codec.BINCODE2,
        says="Encoding of messages in new topics: `bincode2` (Danube 0.12 and later) or "
        "`bincode1`.",
    )
    max_message_size: int = setting(
        MESSAGE_SIZE_BYTES_DEFAULT,
        low=1,
        high=MESSAGE_SIZE_BYTES_MAX,
        says="Maximum size of a payload, in bytes.",
    )
    wal: WalConfig = field(default_factory=WalConfig)
    bucket: BucketConfig = field(default_factory=BucketConfig)
    uploader: UploaderConfig = field(default_factory=UploaderConfig)
    cloud: CloudConfig = field(default_factory=CloudConfig)
    cloud_reader: CloudReaderConfig = field(default_factory=CloudReaderConfig)
    metadata: MetadataConfig = field(default_factory=MetadataConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)
