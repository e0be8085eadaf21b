"""Settings: one tree, from a mapping, a YAML file or a directory, frozen and checked.

    broker:                       # what `ister serve` does; the log itself needs none of it
      host: 127.0.0.1
      ports: {grpc: 6650, flight: 6651, http: 9040}
      advertised: {broker_url: null, connect_url: null, flight_url: null}
      auto_create_topics: true
      bootstrap_namespaces: [default]
      allow_insecure: false       # listen beyond this machine without auth
      drain_seconds: 8
      consumer_grace_seconds: 3600
      tls: {cert_file: null, key_file: null, ca_file: null, client_auth: none}
      auth:
        mode: none                # none | token
        jwt: {algorithm: null, secret: null, public_key_file: null, issuer: null, audience: null}
        api_keys_file: null
        mtls_principal: false
        super_admins: []
        audit_file: null
      policies:                   # 0 is no limit
        max_producers_per_topic: 0
        max_subscriptions_per_topic: 0
        max_consumers_per_topic: 0
        max_consumers_per_subscription: 0
        max_publish_rate: 0       # messages a second; more wait
        max_subscription_dispatch_rate: 0
        max_message_size: 0       # storage.max_message_size holds in any case
      limits:
        max_streams_per_connection: 1024
        max_connections: 2048
        max_requests_in_flight: 1024
        max_topics: 100000
        max_grpc_message_bytes: 4194304
    dispatch:
      max_unacked_messages: 1000
      progress_flush_interval_seconds: 5
      progress_min_offset_delta: 1000
    storage:
      mode: wal_cloud             # wal_cloud | local_only | memory
      ack: synced                 # memory | written | synced | tiered: of topics that name none
      codec: bincode2             # bincode2 | bincode1: of topics made from now on
      max_message_size: 10485760
      wal:
        dir: ./ister-data/wal
        cache_capacity: 1024
        cache_max_bytes: 16777216
        fsync_interval_ms: 5000
        fsync_max_batch_bytes: 10485760
        rotate_max_bytes: 536870912
        rotate_max_seconds: 3600
        stream_chunk_size: 4194304
        buffer_max_bytes: 67108864
        buffer_full: block        # block | refuse
        writer_threads: 4
        max_open_files: 256
        retention:                # local files; only what is in the bucket ever goes
          check_interval_minutes: 5
          time_minutes: 1440
          size_mb: 10240
          active_subscription_grace_seconds: 300
          verify: content         # content | size: how the bucket's copy is checked before
      uploader:
        engine: auto              # auto | embedded | spark | none
        interval_seconds: 10
        max_batch_bytes: 8388608
        max_object_bytes: 134217728
        max_object_seconds: 300
        finalize: direct          # direct | copy
        stream_chunk_size: 8388608
        concurrent_parts: 4
        index_every_messages: 1000
        threads: 4
        max_lag_bytes: 8589934592
      cloud:
        backend: fs               # fs (alias local) | s3 | gcs | azblob | memory
        root: ./ister-data/objects
        options: {}               # region, endpoint, access_key, secret_key, …
        call_timeout_seconds: 60
        retention: {time_minutes: null, size_mb: null}
        orphan_grace_minutes: 1440
      cloud_reader:
        fetch_chunk_size: 4194304
        enable_ranged_reads: true
        read_ahead: true
        on_damage: error          # error | skip
      metadata:
        backend: sqlite           # sqlite | etcd | memory
        path: ./ister-data/metadata.db
        endpoints: []             # of etcd, host:port
        username: null
        password: null
        root_prefix: /danube
        lease_ttl_seconds: 15

`${NAME}` in a value is replaced by the environment variable of that name (`${NAME:-text}` has a
default), and `ISTER_STORAGE__WAL__DIR` overrides `storage.wal.dir`. A key that does not exist is
refused, with the nearest one that does. Settings are data: clocks, file systems and the like are
passed beside them, not in them.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Final, TypeAlias

import yaml

from ister.errors import ConfigError
from ister.limits import (
    GIB,
    KIB,
    MESSAGE_SIZE_BYTES_DEFAULT,
    MESSAGE_SIZE_BYTES_MAX,
    MIB,
)
from ister.model import AckLevel, Codec

__all__ = [
    "AdvertisedConfig",
    "AuthConfig",
    "AuthMode",
    "BrokerConfig",
    "BrokerLimitsConfig",
    "BrokerPoliciesConfig",
    "BrokerPortsConfig",
    "BufferFull",
    "ClientAuth",
    "CloudBackend",
    "CloudConfig",
    "CloudReaderConfig",
    "CloudRetentionConfig",
    "CompactConfig",
    "Config",
    "DispatchConfig",
    "Engine",
    "ExportConfig",
    "Finalize",
    "JwtConfig",
    "Keep",
    "MetadataBackend",
    "MetadataConfig",
    "ObjectFormat",
    "OnDamage",
    "PipelineConfig",
    "ScrubConfig",
    "StorageConfig",
    "StorageMode",
    "TableFormat",
    "TlsConfig",
    "UploaderConfig",
    "Verify",
    "WalConfig",
    "WalRetentionConfig",
    "load_config",
]

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ENVIRONMENT_PREFIX: Final = "ISTER_"
_YAML_SUFFIXES: Final = (".yml", ".yaml")
_WHOLE_NUMBER: Final = re.compile(r"[+-]?[0-9]{1,18}")


class _FromEnvironment(str):
    """A text that came from the environment: what it means is up to the setting it is for."""

    __slots__ = ()


class StorageMode(StrEnum):
    """Where messages go."""

    WAL_CLOUD = "wal_cloud"
    """Local files first, then a bucket; metadata in a store of its own."""
    LOCAL_ONLY = "local_only"
    """Local files, and nothing ever leaves them."""
    MEMORY = "memory"
    """Nothing is kept."""


class Engine(StrEnum):
    """Who uploads."""

    AUTO = "auto"
    """Whoever holds the pipeline lease; threads of this process when nobody does."""
    EMBEDDED = "embedded"
    SPARK = "spark"
    NONE = "none"


class Finalize(StrEnum):
    """How an object gets its final name."""

    DIRECT = "direct"
    """It is written under it."""
    COPY = "copy"
    """It is written under a pending one and copied: for stores that show objects under way."""


class CloudBackend(StrEnum):
    """Which kind of object store."""

    FS = "fs"
    LOCAL = "local"
    S3 = "s3"
    GCS = "gcs"
    AZBLOB = "azblob"
    MEMORY = "memory"


class MetadataBackend(StrEnum):
    """Which kind of metadata store."""

    SQLITE = "sqlite"
    ETCD = "etcd"
    MEMORY = "memory"


class OnDamage(StrEnum):
    """What reading history does where an object is damaged."""

    ERROR = "error"
    SKIP = "skip"


class Verify(StrEnum):
    """How the bucket's copy is checked before the local one goes."""

    CONTENT = "content"
    """Every byte is read and its checksum compared."""
    SIZE = "size"


class BufferFull(StrEnum):
    """What an append does when the buffer is full."""

    BLOCK = "block"
    REFUSE = "refuse"


def _setting(default: Any, *, low: int | None = None, high: int | None = None) -> Any:
    return field(default=default, metadata={"low": low, "high": high})


def _optional(*, low: int | None = None, high: int | None = None) -> Any:
    """A whole number, or null for "no limit"."""
    return field(default=None, metadata={"low": low, "high": high, "is_number": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class WalRetentionConfig:
    """`storage.wal.retention`: when local files go. Only what the bucket has ever does."""

    check_interval_minutes: int = _setting(5, low=1, high=100_000)
    """How often files are looked at."""
    time_minutes: int | None = field(
        default=1440, metadata={"low": 0, "high": None, "is_number": True}
    )
    """A rotated file that was last written to so long ago goes; null keeps it."""
    size_mb: int | None = field(default=10240, metadata={"low": 0, "high": None, "is_number": True})
    """The oldest rotated files of a topic go while all of them take more; null keeps them."""
    active_subscription_grace_seconds: int = _setting(300, low=0)
    """A subscription that moved within this time keeps the files that it has yet to read."""
    verify: Verify = _setting(Verify.CONTENT)
    """How the bucket's copy is checked before the local one goes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """`storage.wal`."""

    dir: str | None = _setting(None)
    """The directory of all topics' logs. Without one, nothing is kept on disk."""
    cache_capacity: int = _setting(1024, low=1, high=1 << 24)
    """Messages kept in memory per topic for readers near the tail."""
    cache_max_bytes: int = _setting(16 * MIB, low=KIB)
    """The same in bytes, whichever is reached first."""
    fsync_interval_ms: int = _setting(5000, low=1, high=3_600_000)
    """How long written bytes may stay unsynced when nobody waits for `synced`."""
    fsync_max_batch_bytes: int = _setting(10 * MIB, low=1)
    """How many written bytes may stay unsynced when nobody waits for `synced`."""
    rotate_max_bytes: int = _setting(512 * MIB, low=4 * KIB)
    """A file of this size is followed by a new one."""
    rotate_max_seconds: int = _setting(3600, low=1)
    """A file of this age is followed by a new one at the next append."""
    stream_chunk_size: int = _setting(4 * MIB, low=64 * KIB, high=64 * MIB)
    """How much a reader reads from a file at once, and so its memory."""
    buffer_max_bytes: int = _setting(64 * MIB, low=64 * KIB)
    """Appended and not yet written bytes per topic."""
    buffer_full: BufferFull = _setting(BufferFull.BLOCK)
    """Whether an append waits for room in the buffer or is refused."""
    writer_threads: int = _setting(4, low=1, high=64)
    """Threads that write and sync for all topics together."""
    max_open_files: int = _setting(256, low=1)
    """Writer handles open at once; the longest idle ones are closed beyond that."""
    retention: WalRetentionConfig = field(default_factory=WalRetentionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderConfig:
    """`storage.uploader`: how synced messages become objects."""

    engine: Engine = _setting(Engine.AUTO)
    """Who uploads; `none` leaves it to calls of `Topic.upload`."""
    interval_seconds: int = _setting(10, low=1, high=86_400)
    """What is synced waits at most so long for its upload to begin."""
    max_batch_bytes: int = _setting(8 * MIB, low=1)
    """So many bytes are uploaded before their time."""
    max_object_bytes: int = _setting(128 * MIB, low=4 * KIB)
    """An object is cut before it becomes larger; a larger message has one of its own."""
    max_object_seconds: int = _setting(300, low=1)
    """An object is cut before a message published so much later than its first."""
    finalize: Finalize = _setting(Finalize.DIRECT)
    """How an object gets its final name."""
    stream_chunk_size: int = _setting(8 * MIB, low=64 * KIB, high=512 * MIB)
    """The size of a part of an upload; S3 wants at least 5 MiB."""
    concurrent_parts: int = _setting(4, low=1, high=64)
    """Parts of one object in flight at once."""
    index_every_messages: int = _setting(1000, low=1)
    """The distance of entries in an object's index; widens so that there are at most 512."""
    threads: int = _setting(4, low=1, high=64)
    """Topics uploaded at once, and so the memory that uploads take."""
    max_lag_bytes: int = _setting(8 * GIB, low=1)
    """Synced bytes of a topic that are not in the bucket; beyond that its producers are slowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRetentionConfig:
    """`storage.cloud.retention`: when objects go. By default they stay."""

    time_minutes: int | None = _optional(low=1)
    """An object whose last message is so old goes; null keeps it."""
    size_mb: int | None = _optional(low=1)
    """The oldest objects of a topic go while all of them take more; null keeps them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """`storage.cloud`: where objects live."""

    backend: CloudBackend = _setting(CloudBackend.FS)
    root: str | None = _setting(None)
    """A directory for `fs` (`objects` beside `wal.dir` unless set), `s3://bucket/prefix`, …"""
    options: Mapping[str, str] = field(default_factory=dict, repr=False)
    """What the backend needs, credentials among it; never shown."""
    call_timeout_seconds: int = _setting(60, low=1, high=3600)
    """The deadline of a call to the store."""
    retention: CloudRetentionConfig = field(default_factory=CloudRetentionConfig)
    orphan_grace_minutes: int = _setting(1440, low=0)
    """Objects that belong to no topic any more, or never did, are removed after so long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudReaderConfig:
    """`storage.cloud_reader`: how history is read."""

    fetch_chunk_size: int = _setting(4 * MIB, low=64 * KIB, high=64 * MIB)
    """How much of an object is read at once, and so a reader's memory."""
    enable_ranged_reads: bool = _setting(True)
    """Read parts of objects; off, whole ones, for stores that cannot."""
    read_ahead: bool = _setting(True)
    """Fetch the next chunk while this one is used."""
    on_damage: OnDamage = _setting(OnDamage.ERROR)
    """Whether a damaged message is an error or is left out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataConfig:
    """`storage.metadata`: who owns a topic, and which objects it consists of."""

    backend: MetadataBackend = _setting(MetadataBackend.SQLITE)
    path: str | None = _setting(None)
    """SQLite's file; `metadata.db` beside `wal.dir` unless set."""
    endpoints: tuple[str, ...] = ()
    """etcd's, as host:port."""
    username: str | None = _setting(None)
    password: str | None = field(
        default=None, repr=False, metadata={"low": None, "high": None, "is_secret": True}
    )
    root_prefix: str = _setting("/danube")
    """What every key begins with."""
    lease_ttl_seconds: int = _setting(15, low=2, high=3600)
    """How long after its end a process still counts as the owner of its topics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """`storage`."""

    mode: StorageMode = _setting(StorageMode.WAL_CLOUD)
    ack: AckLevel = _setting(AckLevel.SYNCED)
    codec: Codec = _setting(Codec.BINCODE2)
    max_message_size: int = _setting(MESSAGE_SIZE_BYTES_DEFAULT, low=1, high=MESSAGE_SIZE_BYTES_MAX)
    """The largest payload that an append takes."""
    wal: WalConfig = field(default_factory=WalConfig)
    uploader: UploaderConfig = field(default_factory=UploaderConfig)
    cloud: CloudConfig = field(default_factory=CloudConfig)
    cloud_reader: CloudReaderConfig = field(default_factory=CloudReaderConfig)
    metadata: MetadataConfig = field(default_factory=MetadataConfig)


# -- the broker -----------------------------------------------------------------------------


class ClientAuth(StrEnum):
    """Whether clients show a certificate of their own."""

    NONE = "none"
    REQUIRED = "required"


class AuthMode(StrEnum):
    """Whether callers have to say who they are."""

    NONE = "none"
    TOKEN = "token"  # noqa: S105 - a word, not one


def _secret() -> Any:
    return field(default=None, repr=False, metadata={"low": None, "high": None, "is_secret": True})


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPortsConfig:
    """`broker.ports`; 0 takes any free one."""

    grpc: int = _setting(6650, low=0, high=65_535)
    """Danube's protocol."""
    flight: int = _setting(6651, low=0, high=65_535)
    """Arrow Flight: bulk publishing, ranges, tails."""
    http: int = _setting(9040, low=0, high=65_535)
    """Health and metrics."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvertisedConfig:
    """`broker.advertised`: the addresses that clients are told; where it listens unless set."""

    broker_url: str | None = _setting(None)
    """The broker's own address, with http:// or https://."""
    connect_url: str | None = _setting(None)
    """Where clients connect to, if a proxy is in between."""
    flight_url: str | None = _setting(None)
    """Where Arrow Flight is, as grpc://host:port or grpc+tls://host:port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """`broker.tls`: with a certificate all three ports speak TLS alone."""

    cert_file: str | None = _setting(None)
    """The broker's certificate chain, PEM."""
    key_file: str | None = _setting(None)
    """Its private key, PEM."""
    ca_file: str | None = _setting(None)
    """Who signs the certificates of clients, PEM."""
    client_auth: ClientAuth = _setting(ClientAuth.NONE)
    """Whether clients show a certificate of their own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """`broker.auth.jwt`: tokens that somebody else signs."""

    algorithm: str | None = _setting(None)
    """The only one that is taken: HS256, RS256, ES256, EdDSA, …"""
    secret: str | None = _secret()
    """The key of HS256, HS384 and HS512."""
    public_key_file: str | None = _setting(None)
    """The key of all others, PEM."""
    issuer: str | None = _setting(None)
    """What `iss` has to be."""
    audience: str | None = _setting(None)
    """What `aud` has to name."""
    leeway_seconds: int = _setting(30, low=0, high=60)
    """How far clocks may be apart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """`broker.auth`: who may call."""

    mode: AuthMode = _setting(AuthMode.NONE)
    jwt: JwtConfig = field(default_factory=JwtConfig)
    api_keys_file: str | None = _setting(None)
    """A line per key: its name and its SHA-256; read again when it changes."""
    mtls_principal: bool = _setting(False)
    """Whether a client's certificate says who it is."""
    super_admins: tuple[str, ...] = ()
    """Who may do everything."""
    audit_file: str | None = _setting(None)
    """Where refusals and changes are noted, a JSON object a line; the logger "ister.audit" unless
    set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPoliciesConfig:
    """`broker.policies`: bounds of a topic, unless it or its namespace has its own; 0 is none."""

    max_producers_per_topic: int = _setting(0, low=0)
    max_subscriptions_per_topic: int = _setting(0, low=0)
    max_consumers_per_topic: int = _setting(0, low=0)
    max_consumers_per_subscription: int = _setting(0, low=0)
    max_publish_rate: int = _setting(0, low=0)
    """Messages a second into a topic; what is more waits."""
    max_subscription_dispatch_rate: int = _setting(0, low=0)
    """Messages a second out of a subscription; what is more waits."""
    max_message_size: int = _setting(0, low=0, high=MESSAGE_SIZE_BYTES_MAX)
    """Bytes of a payload, where that is less than `storage.max_message_size`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLimitsConfig:
    """`broker.limits`: what one broker takes on."""

    max_streams_per_connection: int = _setting(1024, low=1, high=100_000)
    """Calls under way on one connection; more of them wait in the client."""
    max_connections: int = _setting(2048, low=1)
    """Consumers with an open stream; more of them are refused."""
    max_requests_in_flight: int = _setting(1024, low=1)
    """Calls under way in all; more of them are refused."""
    max_topics: int = _setting(100_000, low=1)
    """Topics that clients make by using them; more of them are refused."""
    max_grpc_message_bytes: int = _setting(4 * MIB, low=64 * KIB, high=MESSAGE_SIZE_BYTES_MAX)
    """A message sent by gRPC; Danube's clients cannot receive larger ones than 4 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """`broker`: what `ister serve` does."""

    host: str = _setting("127.0.0.1")
    """The address to listen on."""
    ports: BrokerPortsConfig = field(default_factory=BrokerPortsConfig)
    advertised: AdvertisedConfig = field(default_factory=AdvertisedConfig)
    auto_create_topics: bool = _setting(True)
    """Whether a topic is made when a producer first names it."""
    bootstrap_namespaces: tuple[str, ...] = ("default",)
    """Namespaces that exist from the start, beside `default` and `system`."""
    allow_insecure: bool = _setting(False)
    """Whether to listen beyond this machine although callers need not say who they are."""
    drain_seconds: int = _setting(8, low=1, high=3600)
    """How long calls under way may take once the broker is told to end."""
    consumer_grace_seconds: int = _setting(3600, low=1, high=31 * 86_400)
    """How long after its stream ended a consumer's key filters still hold messages for it."""
    tls: TlsConfig = field(default_factory=TlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    policies: BrokerPoliciesConfig = field(default_factory=BrokerPoliciesConfig)
    limits: BrokerLimitsConfig = field(default_factory=BrokerLimitsConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """`dispatch`: how subscriptions deliver, unless one says otherwise."""

    max_unacked_messages: int = _setting(1000, low=1, high=100_000)
    """Messages that a consumer may have and not have acknowledged."""
    progress_flush_interval_seconds: int = _setting(5, low=1, high=3600)
    """A cursor that moved is written after so long at the latest."""
    progress_min_offset_delta: int = _setting(1000, low=1)
    """A cursor that moved so far is written at once."""


class ObjectFormat(StrEnum):
    """What merged objects are."""

    DNB1 = "dnb1"
    """Frames, as uploads make them: Danube's own tools read them."""
    PARQUET = "parquet"
    """Tables that DuckDB, pandas, Polars and Spark read in place."""


class Keep(StrEnum):
    """Which messages a merged object keeps."""

    ALL = "all"
    LATEST_PER_KEY = "latest-per-key"
    """Of each routing key the newest message; those without a key all stay."""


class TableFormat(StrEnum):
    """What topics are exported to."""

    PARQUET = "parquet"
    ICEBERG = "iceberg"
    DELTA = "delta"


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactConfig:
    """`pipeline.compact`: when and how small objects are merged."""

    every_minutes: int | None = field(
        default=60, metadata={"low": 1, "high": None, "is_number": True}
    )
    """How often; null never."""
    topics: tuple[str, ...] = ("*",)
    """Names and patterns."""
    format: ObjectFormat = _setting(ObjectFormat.DNB1)
    """What they become."""
    keep: Keep = _setting(Keep.ALL)
    """Which messages stay; `latest-per-key` needs `format: parquet`."""
    target_mb: int = _setting(128, low=1, high=2048)
    """About how large merged objects become; objects of half that size are left alone."""
    min_objects: int = _setting(4, low=2, high=100)
    """Fewer neighbours than this are not worth it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """`pipeline.export`: topics as tables. Nothing is exported unless `to` is set."""

    every_minutes: int = _setting(15, low=1)
    """How often."""
    topics: tuple[str, ...] = ("*",)
    """Names and patterns."""
    format: TableFormat = _setting(TableFormat.PARQUET)
    to: str | None = _setting(None)
    """A directory or URL (Parquet, Delta), a table's name (Iceberg); `{namespace}` and `{topic}`
    stand for those of each topic."""
    schema: str | None = _setting(None)
    """A file with a JSON Schema: its properties become columns. Without one, the envelope's."""
    catalog: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Iceberg: properties of its catalog (`type`, `uri`, `warehouse`, …)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    """`pipeline.scrub`: when everything is checked."""

    every_minutes: int | None = field(
        default=1440, metadata={"low": 1, "high": None, "is_number": True}
    )
    """How often; null never."""
    topics: tuple[str, ...] = ("*",)
    """Names and patterns."""
    repair: bool = _setting(False)
    """Whether what can be healed is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """`pipeline`: what `ister pipeline run` does, and how often."""

    master: str = _setting("local[*]")
    """Where Spark runs."""
    conf: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Settings of Spark."""
    broker: str | None = _setting(None)
    """A broker's Flight address, for messages that are not on the pipeline's machine."""
    compact: CompactConfig = field(default_factory=CompactConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    scrub: ScrubConfig = field(default_factory=ScrubConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole tree."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)


def load_config(source: ConfigSource, environment: Mapping[str, str] | None = None) -> Config:
    """Settings from wherever they come.

    Args:
        source: A mapping of the tree; the path of a `.yml` file; a directory for data (logs go to
            `wal` inside of it, objects to `objects`, metadata to `metadata.db`); or None, which
            keeps everything in memory.
        environment: Where `${NAME}` and `ISTER_…` are looked up; the process's by default.

    Raises:
        ConfigError: A key is unknown, a value is of the wrong kind or out of bounds, or two of
            them contradict each other. Names the key.
    """
    environment = os.environ if environment is None else environment
    if source is None:
        tree: dict[str, Any] = {"storage": {"mode": "memory"}}
    elif isinstance(source, Mapping):
        tree = _copy(source)
    else:
        path = _path_of(source)
        if path.endswith(_YAML_SUFFIXES):
            tree = _read_yaml(path)
        else:
            tree = {"storage": {"wal": {"dir": os.path.join(path, "wal")}}}
    _apply_environment(tree, environment)
    tree = _expand(tree, environment, "")
    config: Config = _build(Config, tree, "")
    return _check_together(config, tree)


def _path_of(source: object) -> str:
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(path, str):
        raise ConfigError(
            f"cannot open {source!r}",
            hint="a directory, the path of an ister.yml, a mapping, or nothing",
        )
    return path


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _read_yaml(path: str) -> dict[str, Any]:
    try:
        with open(path, encoding="utf-8") as file:
            tree = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}", path=path) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"the config file is not valid YAML: {error}", path=path) from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError("the config file does not hold a tree of keys", path=path)
    return tree


def _apply_environment(tree: dict[str, Any], environment: Mapping[str, str]) -> None:
    for name, value in sorted(environment.items()):
        if not name.startswith(_ENVIRONMENT_PREFIX) or "__" not in name:
            continue
        *parents, last = name.removeprefix(_ENVIRONMENT_PREFIX).lower().split("__")
        node = tree
        for parent in parents:
            child = node.get(parent)
            if child is None:
                child = node[parent] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"{name} goes below {parent!r}, which is a single value")
            node = child
        node[last] = _FromEnvironment(value)


def _expand(value: Any, environment: Mapping[str, str], key: str) -> Any:
    if isinstance(value, dict):
        return {
            k: _expand(v, environment, f"{key}.{k}" if key else str(k)) for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_expand(item, environment, key) for item in value]
    if not isinstance(value, str):
        return value

    def look_up(match: re.Match[str]) -> str:
        name, default = match.groups()
        found = environment.get(name, default)
        if found is None:
            raise ConfigError(f"{key}: the environment has no variable {name}")
        return found

    if _REFERENCE.search(value) is None:
        return value
    return _FromEnvironment(_REFERENCE.sub(look_up, value))


def _build(kind: Any, tree: Any, prefix: str) -> Any:
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{prefix or 'the config'} has to be a tree of keys, not {tree!r}")
    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        item = known.get(str(key))
        if item is None:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
            raise ConfigError(f"unknown key {path!r}", hint=hint)
        default = _default_of(item)
        if is_dataclass(default):
            values[item.name] = _build(type(default), {} if value is None else value, path)
        else:
            values[item.name] = _convert(value, default, item.metadata, path)
    return kind(**values)


def _default_of(item: Any) -> Any:
    factory = item.default_factory
    return item.default if factory is MISSING else factory()


def _convert(value: Any, default: Any, bounds: Mapping[str, int | None], path: str) -> Any:
    if isinstance(default, StrEnum):
        kind = type(default)
        try:
            return kind(value)
        except ValueError as error:
            choices = ", ".join(kind)
            raise ConfigError(f"{path} is {value!r}", hint=f"one of: {choices}") from error
    if isinstance(default, bool):
        return _as_bool(value, path)
    if isinstance(default, tuple):
        return _as_texts(value, path)
    if isinstance(default, Mapping):
        return _as_options(value, path)
    if value is None and bounds.get("is_number"):
        return None
    if isinstance(default, int) or bounds.get("is_number"):
        if isinstance(value, _FromEnvironment) and _WHOLE_NUMBER.fullmatch(value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{path} has to be a whole number, not {value!r}")
        low, high = bounds["low"], bounds["high"]
        if (low is not None and value < low) or (high is not None and value > high):
            wanted = f"at least {low}" if high is None else f"between {low} and {high}"
            raise ConfigError(f"{path} is {value}", hint=f"it has to be {wanted}")
        return value
    if value is None and default is None:
        return None
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if not isinstance(value, str) or not value or "\0" in value:
        shown = type(value).__name__ if bounds.get("is_secret") else repr(value)
        raise ConfigError(f"{path} has to be a non-empty text, not {shown}")
    return str(value)


def _as_bool(value: Any, path: str) -> bool:
    if isinstance(value, _FromEnvironment) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise ConfigError(f"{path} has to be true or false, not {value!r}")
    return value


def _as_texts(value: Any, path: str) -> tuple[str, ...]:
    if value is None:
        return ()
    items = value.split(",") if isinstance(value, str) else value
    is_list = isinstance(items, list | tuple)
    if not is_list or not all(isinstance(item, str) and item.strip() for item in items):
        raise ConfigError(f"{path} has to be a list of texts, not {value!r}")
    return tuple(str(item).strip() for item in items)


def _as_options(value: Any, path: str) -> dict[str, str]:
    """Options of a backend: what they are called and mean is the backend's business."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} has to be a tree of keys")
    options: dict[str, str] = {}
    for key, item in value.items():
        if isinstance(item, Mapping | list | tuple):
            raise ConfigError(f"{path}.{key} has to be a single value")
        if item is not None:
            options[str(key)] = str(item).lower() if isinstance(item, bool) else str(item)
    return options


def _check_together(config: Config, tree: Mapping[str, Any]) -> Config:
    storage = config.storage
    named = tree.get("storage") or {}
    is_in_memory = storage.mode is StorageMode.MEMORY or (
        storage.mode is StorageMode.LOCAL_ONLY and storage.wal.dir is None
    )
    if is_in_memory and named.get("ack") is not None and storage.ack is not AckLevel.MEMORY:
        raise ConfigError(
            f"storage.ack is {storage.ack.value!r}, and this log keeps everything in memory",
            hint="set storage.wal.dir, or use ack 'memory'",
        )
    if storage.mode is StorageMode.MEMORY and storage.wal.dir is not None:
        raise ConfigError(
            "storage.mode is 'memory' and storage.wal.dir is set", hint="take one of them out"
        )
    if storage.mode is StorageMode.WAL_CLOUD:
        return _check_tiers(config)
    if storage.ack is AckLevel.TIERED:
        raise ConfigError(
            f"storage.ack is 'tiered', and storage.mode {storage.mode.value!r} has no object store",
            hint="use 'synced', which survives power loss, or mode 'wal_cloud'",
        )
    for section in ("uploader", "cloud", "cloud_reader", "metadata"):
        if named.get(section):
            raise ConfigError(
                f"storage.{section} is set, and storage.mode {storage.mode.value!r} has no bucket",
                hint="take it out, or use mode 'wal_cloud'",
            )
    return config


def _check_tiers(config: Config) -> Config:
    """Fills in places that follow from `wal.dir`, and refuses what cannot work together."""
    storage = config.storage
    if storage.wal.dir is None:
        raise ConfigError(
            "storage.wal.dir is not set, and mode 'wal_cloud' keeps messages there first",
            hint="set it, or use mode 'memory'",
        )
    home = os.path.dirname(os.path.abspath(storage.wal.dir))
    cloud, metadata = storage.cloud, storage.metadata
    if cloud.root is None:
        if cloud.backend not in (CloudBackend.FS, CloudBackend.LOCAL, CloudBackend.MEMORY):
            raise ConfigError(
                f"storage.cloud.root is not set, and backend {cloud.backend.value!r} needs one",
                hint="for example s3://bucket/prefix",
            )
        cloud = replace(cloud, root=os.path.join(home, "objects"))
    if metadata.backend is MetadataBackend.SQLITE and metadata.path is None:
        metadata = replace(metadata, path=os.path.join(home, "metadata.db"))
    if metadata.backend is MetadataBackend.ETCD and not metadata.endpoints:
        raise ConfigError(
            "storage.metadata.endpoints is empty, and backend 'etcd' needs at least one",
            hint="for example ['127.0.0.1:2379']",
        )
    if not metadata.root_prefix.startswith("/") or metadata.root_prefix.endswith("/"):
        raise ConfigError(
            f"storage.metadata.root_prefix is {metadata.root_prefix!r}",
            hint="it begins with '/' and does not end with one",
        )
    return replace(config, storage=replace(storage, cloud=cloud, metadata=metadata))
