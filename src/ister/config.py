"""Settings: one tree, from a mapping, a YAML file or a directory, frozen and checked.

Owns: every setting with its default, its bounds and the sentence that says what it is about; how
settings are read and checked. Does not own: how they are shown (`ister.config_reference`), nor
what they lead to. `ister config example` prints the whole tree.

    storage:
      ack: synced
      wal: {dir: ./ister-data/wal}
      cloud:
        backend: s3
        root: s3://bucket/prefix
        options: {region: eu-central-1, secret_key: "${SECRET}"}

`${NAME}` in a value is replaced by the environment variable of that name (`${NAME:-text}` has a
default), and `ISTER_STORAGE__WAL__DIR` overrides `storage.wal.dir`. A key that does not exist is
refused, with the nearest one that does. Settings are data: clocks, file systems and the like are
passed beside them, not in them.

The type of a setting decides what an unquoted value means: `no` is false for a boolean and the text
`no` for a name (`ister.yaml_tree`). `~` and `~user` at the start of a path are home directories.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import StrEnum
from typing import Any, Final, Protocol, TypeAlias

from ister.errors import ConfigError
from ister.limits import (
    GIB,
    KIB,
    MESSAGE_SIZE_BYTES_DEFAULT,
    MESSAGE_SIZE_BYTES_MAX,
    MIB,
)
from ister.model import AckLevel, Codec
from ister.yaml_tree import TEXT_BYTES_MAX, Plain, YamlTree, parse_yaml

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
    "Examined",
    "ExportConfig",
    "Finalize",
    "JwtConfig",
    "Keep",
    "MetadataBackend",
    "MetadataConfig",
    "ObjectFormat",
    "OnDamage",
    "Origin",
    "PipelineConfig",
    "Problem",
    "ScrubConfig",
    "StorageConfig",
    "StorageMode",
    "TableFormat",
    "TlsConfig",
    "UploaderConfig",
    "Verify",
    "WalConfig",
    "WalRetentionConfig",
    "examine_config",
    "expand_home",
    "find_line",
    "load_config",
]

ConfigSource: TypeAlias = "str | os.PathLike[str] | Mapping[str, Any] | None"

_REFERENCE: Final = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-([^}]*))?\}")
_ENVIRONMENT_PREFIX: Final = "ISTER_"
_YAML_SUFFIXES: Final = (".yml", ".yaml")
_WHOLE_NUMBER: Final = re.compile(
    r"[+-]?(0|[1-9][0-9]{0,17}|[1-9][0-9]{0,2}(_[0-9]{3}){1,5}|0x[0-9A-Fa-f]{1,15})"
)
_ODD_NUMBER: Final = re.compile(r"[+-]?[0-9][0-9_:]*")
"""Octal (`0100`) and base 60 (`1:30`): YAML parsers do not agree about these numbers."""
_BOOLEANS: Final = {
    "true": True,
    "yes": True,
    "on": True,
    "false": False,
    "no": False,
    "off": False,
}


class _FromEnvironment(Plain):
    """A value from an environment variable."""

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


def _setting(
    default: Any,
    *,
    says: str,
    low: int | None = None,
    high: int | None = None,
    is_number: bool = False,
    is_secret: bool = False,
    is_path: bool = False,
) -> Any:
    """One setting.

    Args:
        default: What it is unless said otherwise; its kind is that of the setting.
        says: What it is about, for `ister config` and the reference.
        low: A number's least value.
        high: A number's largest value.
        is_number: It is a number or null, which a default of null does not tell.
        is_secret: It is never shown, nor is anything of it.
        is_path: Whether it is a path, in which `~` is expanded.
    """
    return field(
        **({"default_factory": dict} if default == {} else {"default": default}),
        repr=not is_secret,
        metadata={
            "says": says,
            "low": low,
            "high": high,
            "is_number": is_number,
            "is_secret": is_secret,
            "is_path": is_path,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WalRetentionConfig:
    """`storage.wal.retention`: when local files are removed.

    With a bucket, only files that were uploaded are removed. With `local_only`, a file is the only
    copy: only limits that are set explicitly apply.
    """

    check_interval_minutes: int = _setting(
        5, low=1, high=100_000, says="How often local files and objects are looked at."
    )
    time_minutes: int | None = _setting(
        1440,
        low=0,
        is_number=True,
        says="Remove rotated files this long after their last write; null keeps them. With "
        "`local_only` the default is null, and a limit deletes the messages.",
    )
    size_mb: int | None = _setting(
        10240,
        low=0,
        is_number=True,
        says="The oldest rotated files of a topic are removed while its files take more than this; "
        "null keeps them. With `local_only` the default is null.",
    )
    active_subscription_grace_seconds: int = _setting(
        300,
        low=0,
        says="A subscription is active if a consumer is connected, or if it moved within this "
        "time. Files that an active subscription has not read are kept.",
    )
    verify: Verify = _setting(
        Verify.CONTENT,
        says="How the bucket's copy is checked before the local one goes: `content`, every byte, "
        "or `size`.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class WalConfig:
    """`storage.wal`: messages in local files, where they are first."""

    dir: str | None = _setting(
        None,
        is_path=True,
        says="The directory of all topics' logs; `wal_cloud` needs one, and without one nothing "
        "is kept on disk.",
    )
    cache_capacity: int = _setting(
        1024,
        low=1,
        high=1 << 24,
        says="Messages kept in memory per topic for readers near the tail.",
    )
    cache_max_bytes: int = _setting(
        16 * MIB, low=KIB, says="The same in bytes, whichever is reached first."
    )
    fsync_interval_ms: int = _setting(
        5000,
        low=1,
        high=3_600_000,
        says="How long written bytes may stay unsynced when nobody waits for `synced`.",
    )
    fsync_max_batch_bytes: int = _setting(
        10 * MIB,
        low=1,
        says="How many written bytes may stay unsynced when nobody waits for `synced`.",
    )
    rotate_max_bytes: int = _setting(
        512 * MIB,
        low=4 * KIB,
        says="A file of this size is followed by a new one; one write (8 MiB) may go over it.",
    )
    rotate_max_seconds: int = _setting(
        3600, low=1, says="A file of this age is followed by a new one at the next append."
    )
    stream_chunk_size: int = _setting(
        4 * MIB,
        low=64 * KIB,
        high=64 * MIB,
        says="How much a reader reads from a file at once, and so its memory.",
    )
    buffer_max_bytes: int = _setting(
        64 * MIB, low=64 * KIB, says="Appended and not yet written bytes per topic."
    )
    buffer_full: BufferFull = _setting(
        BufferFull.BLOCK,
        says="Whether an append waits for room in the buffer, or is refused with `CapacityError`.",
    )
    writer_threads: int = _setting(
        4, low=1, high=64, says="Threads that write and sync for all topics together."
    )
    max_open_files: int = _setting(
        256,
        low=1,
        says="Writer handles open at once; beyond that the longest idle are synced and closed.",
    )
    retention: WalRetentionConfig = field(default_factory=WalRetentionConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class UploaderConfig:
    """`storage.uploader`: how synced messages become objects."""

    engine: Engine = _setting(
        Engine.AUTO,
        says="Who uploads: `auto`, this process unless a pipeline holds the lease; `embedded`, "
        "this process in any case; `spark`, a pipeline in any case; `none`, calls of "
        "`Topic.upload`.",
    )
    interval_seconds: int = _setting(
        10, low=1, high=86_400, says="What is synced waits at most so long for its upload to begin."
    )
    max_batch_bytes: int = _setting(
        8 * MIB, low=1, says="So many bytes are uploaded before their time."
    )
    max_object_bytes: int = _setting(
        128 * MIB,
        low=4 * KIB,
        says="An object is cut before it becomes larger; a larger message has one of its own.",
    )
    max_object_seconds: int = _setting(
        300,
        low=1,
        says="The longest time between the arrival of an object's first and last message.",
    )
    finalize: Finalize = _setting(
        Finalize.DIRECT,
        says="How an object gets its final name: `direct`, or `copy` from a pending one, for "
        "stores that show objects under way.",
    )
    stream_chunk_size: int = _setting(
        8 * MIB,
        low=64 * KIB,
        high=512 * MIB,
        says="The size of a part of an upload; S3 wants at least 5 MiB.",
    )
    concurrent_parts: int = _setting(
        4, low=1, high=64, says="Parts of one object in flight at once."
    )
    index_every_messages: int = _setting(
        1000,
        low=1,
        says="The distance of entries in an object's index, or 1 MiB; widens so that there are "
        "at most 512.",
    )
    threads: int = _setting(
        4, low=1, high=64, says="Topics uploaded at once, and so the memory that uploads take."
    )
    max_bytes_per_second: int | None = _setting(
        None,
        low=64 * KIB,
        is_number=True,
        says="Upload rate of this process, all topics together, in bytes per second; null is no "
        "limit. The tasks of a pipeline's `tier` job share it.",
    )
    max_lag_bytes: int = _setting(
        8 * GIB,
        low=1,
        says="Synced bytes of a topic that are not in the bucket; beyond that producers wait, or "
        "are refused as `buffer_full` says.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudRetentionConfig:
    """`storage.cloud.retention`: when objects go. By default they stay."""

    time_minutes: int | None = _setting(
        None,
        low=1,
        is_number=True,
        says="Delete objects this long after their last message arrived; null keeps them.",
    )
    size_mb: int | None = _setting(
        None,
        low=1,
        is_number=True,
        says="The oldest objects of a topic go while all of them take more; null keeps them.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudConfig:
    """`storage.cloud`: where objects live."""

    backend: CloudBackend = _setting(
        CloudBackend.FS, says="Which kind of object store; `local` is another word for `fs`."
    )
    root: str | None = _setting(
        None,
        is_path=True,
        says="A directory for `fs` (`objects` beside `wal.dir` unless set), "
        "`s3://bucket/prefix`, `gs://…`, `azblob://…`",
    )
    options: Mapping[str, str] = _setting(
        {},
        is_secret=True,
        says="What the store needs: `region`, `endpoint`, `access_key`, `secret_key`, …; never "
        "shown.",
    )
    call_timeout_seconds: int = _setting(
        60, low=1, high=3600, says="The deadline of a call to the store."
    )
    retention: CloudRetentionConfig = field(default_factory=CloudRetentionConfig)
    orphan_grace_minutes: int = _setting(
        1440,
        low=0,
        says="Objects that belong to no topic any more, or never did, are removed after so long.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudReaderConfig:
    """`storage.cloud_reader`: how history is read."""

    fetch_chunk_size: int = _setting(
        4 * MIB,
        low=64 * KIB,
        high=64 * MIB,
        says="How much of an object is read at once, and so a reader's memory.",
    )
    enable_ranged_reads: bool = _setting(
        True, says="Whether parts of objects are read; off, whole ones, for stores that cannot."
    )
    read_ahead: bool = _setting(
        True, says="Whether the next chunk is fetched while this one is used."
    )
    on_damage: OnDamage = _setting(
        OnDamage.ERROR,
        says="Whether a damaged message of an object is an error, or is left out and logged.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdTlsConfig:
    """`storage.metadata.tls`: TLS connections to etcd. Changed files are read again."""

    ca_file: str | None = _setting(
        None,
        is_path=True,
        says="CA certificates that sign those of etcd's members, PEM; unset, the CA certificates "
        "that come with gRPC.",
    )
    cert_file: str | None = _setting(
        None, is_path=True, says="Client certificate chain, PEM, for etcd with mutual TLS."
    )
    key_file: str | None = _setting(
        None, is_path=True, says="Private key of the client certificate, PEM."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MetadataConfig:
    """`storage.metadata`: who owns a topic, and which objects it consists of."""

    backend: MetadataBackend = _setting(
        MetadataBackend.SQLITE,
        says="Which kind of metadata store; `etcd` needs the extra `ister[etcd]`.",
    )
    path: str | None = _setting(
        None, is_path=True, says="SQLite's file; `metadata.db` beside `wal.dir` unless set."
    )
    endpoints: tuple[str, ...] = _setting(
        (),
        says="Addresses of etcd's members, as host:port. TLS is used if they begin with "
        "`https://`, or if `tls` is set.",
    )
    username: str | None = _setting(None, says="Who this is to etcd.")
    password: str | None = _setting(None, is_secret=True, says="Its password; never shown.")
    tls: EtcdTlsConfig = field(default_factory=EtcdTlsConfig)
    root_prefix: str = _setting("/danube", says="What every key begins with.")
    lease_ttl_seconds: int = _setting(
        15,
        low=2,
        high=3600,
        says="How long after its end a process still counts as the owner of its topics.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskConfig:
    """`storage.disk`: space kept free on the disks of the log, its SQLite file and its bucket."""

    min_free: int | None = _setting(
        None,
        low=0,
        is_number=True,
        says="Free space, in bytes, below which appends fail with `CapacityError` and uploaded "
        "local files are removed. Appends resume when a quarter more is free. null is 256 MiB, or "
        "5 % of a smaller disk; 0 turns it off.",
    )
    reserve: int | None = _setting(
        None,
        low=0,
        is_number=True,
        says="Size, in bytes, of the file `.reserve` beside the topics. It is truncated when the "
        "disk is full, because freeing space needs some for metadata and checkpoints. null is 1 % "
        "of the disk, 1 MiB to 16 MiB, and none on disks below 16 MiB; 0 turns it off.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageConfig:
    """`storage`: where messages go, and how."""

    mode: StorageMode = _setting(
        StorageMode.WAL_CLOUD,
        says="Where messages go: `wal_cloud`, files and then a bucket; `local_only`, files "
        "alone; `memory`, nothing is kept.",
    )
    ack: AckLevel = _setting(
        AckLevel.SYNCED, says="When an append counts, for topics that do not say it themselves."
    )
    codec: Codec = _setting(
        Codec.BINCODE2,
        says="How messages of topics made from now on are encoded: `bincode2` (Danube 0.12 and "
        "later) or `bincode1`.",
    )
    max_message_size: int = _setting(
        MESSAGE_SIZE_BYTES_DEFAULT,
        low=1,
        high=MESSAGE_SIZE_BYTES_MAX,
        says="The largest payload that an append takes, in bytes.",
    )
    wal: WalConfig = field(default_factory=WalConfig)
    uploader: UploaderConfig = field(default_factory=UploaderConfig)
    cloud: CloudConfig = field(default_factory=CloudConfig)
    cloud_reader: CloudReaderConfig = field(default_factory=CloudReaderConfig)
    metadata: MetadataConfig = field(default_factory=MetadataConfig)
    disk: DiskConfig = field(default_factory=DiskConfig)


# -- the broker -----------------------------------------------------------------------------


class ClientAuth(StrEnum):
    """Whether clients show a certificate of their own."""

    NONE = "none"
    REQUIRED = "required"


class AuthMode(StrEnum):
    """Whether callers have to say who they are."""

    NONE = "none"
    TOKEN = "token"  # noqa: S105 - a word, not one


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPortsConfig:
    """`broker.ports`: where it listens; 0 takes any free one."""

    grpc: int = _setting(
        6650, low=0, high=65_535, says="Danube's protocol, for clients that publish and subscribe."
    )
    flight: int = _setting(
        6651, low=0, high=65_535, says="Arrow Flight: bulk publishing, ranges, tails."
    )
    http: int = _setting(9040, low=0, high=65_535, says="The dashboard, health and metrics.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvertisedConfig:
    """`broker.advertised`: the addresses that clients are told; where it listens unless set."""

    broker_url: str | None = _setting(
        None, says="The broker's own address, with http:// or https://."
    )
    connect_url: str | None = _setting(
        None, says="Where clients connect to, if a proxy is in between."
    )
    flight_url: str | None = _setting(
        None, says="Where Arrow Flight is, as grpc://host:port or grpc+tls://host:port."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """`broker.tls`: with a certificate all three ports speak TLS alone."""

    cert_file: str | None = _setting(
        None, is_path=True, says="The broker's certificate chain, PEM."
    )
    key_file: str | None = _setting(None, is_path=True, says="Its private key, PEM.")
    ca_file: str | None = _setting(
        None, is_path=True, says="Who signs the certificates of clients, PEM."
    )
    client_auth: ClientAuth = _setting(
        ClientAuth.NONE, says="Whether clients have to show a certificate of their own."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """`broker.auth.jwt`: tokens that somebody else signs."""

    algorithm: str | None = _setting(
        None, says="The only one that is taken: HS256, RS256, ES256, EdDSA, …"
    )
    secret: str | None = _setting(
        None, is_secret=True, says="The key of HS256, HS384 and HS512; never shown."
    )
    public_key_file: str | None = _setting(
        None, is_path=True, says="The key of all other algorithms, PEM."
    )
    issuer: str | None = _setting(None, says="What `iss` has to be.")
    audience: str | None = _setting(None, says="What `aud` has to name.")
    leeway_seconds: int = _setting(30, low=0, high=60, says="How far clocks may be apart.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """`broker.auth`: who may call."""

    mode: AuthMode = _setting(
        AuthMode.NONE,
        says="With `token` callers have to say who they are: by a token, a key or a certificate.",
    )
    jwt: JwtConfig = field(default_factory=JwtConfig)
    api_keys_file: str | None = _setting(
        None,
        is_path=True,
        says="A file with a line per key: its name and its SHA-256; read again when it changes.",
    )
    mtls_principal: bool = _setting(False, says="Whether a client's certificate says who it is.")
    super_admins: tuple[str, ...] = _setting((), says="Who may do everything.")
    audit_file: str | None = _setting(
        None,
        is_path=True,
        says="Where refusals and changes are noted, a JSON object a line; the logger "
        "`ister.audit` unless set.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPoliciesConfig:
    """`broker.policies`: bounds of a topic, unless it or its namespace has its own; 0 is none."""

    max_producers_per_topic: int = _setting(
        0, low=0, says="Producers of a topic that were heard of within a minute; 0 is no limit."
    )
    max_subscriptions_per_topic: int = _setting(
        0, low=0, says="Subscriptions of a topic; 0 is no limit."
    )
    max_consumers_per_topic: int = _setting(
        0, low=0, says="Connected consumers of a topic; 0 is no limit."
    )
    max_consumers_per_subscription: int = _setting(
        0, low=0, says="Connected consumers of a subscription; 0 is no limit."
    )
    max_publish_rate: int = _setting(
        0, low=0, says="Messages a second into a topic; what is more waits; 0 is no limit."
    )
    max_subscription_dispatch_rate: int = _setting(
        0, low=0, says="Messages a second out of a subscription; what is more waits; 0 is no limit."
    )
    max_message_size: int = _setting(
        0,
        low=0,
        high=MESSAGE_SIZE_BYTES_MAX,
        says="Bytes of a payload, where that is less than `storage.max_message_size`; 0 is no "
        "limit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLimitsConfig:
    """`broker.limits`: what one broker takes on."""

    max_streams_per_connection: int = _setting(
        1024,
        low=1,
        high=100_000,
        says="Calls under way on one connection; more of them wait in the client.",
    )
    max_connections: int = _setting(
        2048, low=1, says="Consumers with an open stream; more of them are refused."
    )
    max_subscriptions_per_principal: int = _setting(
        10_000,
        low=1,
        says="Subscriptions that one principal may have created, on the topics of this broker. "
        "With auth off, all callers count as one principal.",
    )
    max_consumers_per_principal: int = _setting(
        1024,
        low=1,
        says="Consumers of one principal with an open stream. With auth off only "
        "`max_connections` applies.",
    )
    max_streams_per_principal: int = _setting(
        1024,
        low=1,
        says="Streams of one principal over gRPC, including those of its consumers and of Flight. "
        "Does not apply with auth off.",
    )
    max_requests_in_flight: int = _setting(
        1024,
        low=1,
        says="Calls under way in all; more are refused. Each may hold a message, so this bounds "
        "memory together with `storage.max_message_size`.",
    )
    max_topics: int = _setting(
        100_000, low=1, says="Topics that clients make by using them; more of them are refused."
    )
    max_grpc_message_bytes: int = _setting(
        4 * MIB,
        low=64 * KIB,
        high=MESSAGE_SIZE_BYTES_MAX,
        says="The largest message sent by gRPC; Danube's clients cannot receive larger ones than "
        "4 MiB.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """`broker`: what `ister serve` does; the log itself needs none of it."""

    host: str = _setting("127.0.0.1", says="The address to listen on.")
    ports: BrokerPortsConfig = field(default_factory=BrokerPortsConfig)
    advertised: AdvertisedConfig = field(default_factory=AdvertisedConfig)
    auto_create_topics: bool = _setting(
        True, says="Whether a topic is made when a producer first names it."
    )
    bootstrap_namespaces: tuple[str, ...] = _setting(
        ("default",), says="Namespaces that exist from the start, beside `default` and `system`."
    )
    allow_insecure: bool = _setting(
        False,
        says="Whether to listen beyond this machine although callers need not say who they are.",
    )
    drain_seconds: int = _setting(
        8,
        low=1,
        high=3600,
        says="How long calls under way may take once the broker is told to end.",
    )
    consumer_grace_seconds: int = _setting(
        3600,
        low=1,
        high=31 * 86_400,
        says="How long after its stream ended a consumer's key filters still hold messages for it.",
    )
    tls: TlsConfig = field(default_factory=TlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    policies: BrokerPoliciesConfig = field(default_factory=BrokerPoliciesConfig)
    limits: BrokerLimitsConfig = field(default_factory=BrokerLimitsConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """`dispatch`: how subscriptions deliver, unless one says otherwise."""

    max_unacked_messages: int = _setting(
        1000,
        low=1,
        high=100_000,
        says="Messages that a consumer may have and not have acknowledged.",
    )
    progress_flush_interval_seconds: int = _setting(
        5, low=1, high=3600, says="A cursor that moved is written after so long at the latest."
    )
    progress_min_offset_delta: int = _setting(
        1000, low=1, says="A cursor that moved so far is written at once."
    )
    memory_budget_mb: int | None = _setting(
        None,
        low=16,
        is_number=True,
        says="Memory of all subscriptions together for messages on their way to consumers, in MiB. "
        "When it is used up, subscriptions whose consumers take nothing release their messages "
        "first, and read them again later. null is an eighth of the memory of the machine or of "
        "the control group, at least 64.",
    )


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

    every_minutes: int | None = _setting(
        60, low=1, is_number=True, says="How often small objects are merged; null never."
    )
    topics: tuple[str, ...] = _setting(("*",), says="Of which topics: names and patterns.")
    format: ObjectFormat = _setting(
        ObjectFormat.DNB1,
        says="What they become: `dnb1`, frames as uploads make them, or `parquet`, tables.",
    )
    keep: Keep = _setting(
        Keep.ALL,
        says="Which messages stay: `all`, or `latest-per-key`, which needs `format: parquet`.",
    )
    target_mb: int = _setting(
        128,
        low=1,
        high=2048,
        says="About how large merged objects become; objects of half that size are left alone.",
    )
    min_objects: int = _setting(
        4, low=2, high=100, says="Fewer neighbours than this are not worth it."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """`pipeline.export`: topics as tables. Nothing is exported unless `to` is set."""

    every_minutes: int = _setting(15, low=1, says="How often topics are exported, if `to` is set.")
    topics: tuple[str, ...] = _setting(("*",), says="Which topics: names and patterns.")
    format: TableFormat = _setting(TableFormat.PARQUET, says="What they are exported to.")
    to: str | None = _setting(
        None,
        is_path=True,
        says="A directory or URL (Parquet, Delta) or a table's name (Iceberg); `{namespace}` and "
        "`{topic}` stand for those of each topic.",
    )
    schema: str | None = _setting(
        None,
        is_path=True,
        says="A file with a JSON Schema, whose properties become columns; without one, the "
        "envelope's.",
    )
    catalog: Mapping[str, str] = _setting(
        {},
        is_secret=True,
        says="Properties of Iceberg's catalog (`type`, `uri`, `warehouse`, …); never shown.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ScrubConfig:
    """`pipeline.scrub`: when everything is checked."""

    every_minutes: int | None = _setting(
        1440, low=1, is_number=True, says="How often everything is checked; null never."
    )
    topics: tuple[str, ...] = _setting(("*",), says="Of which topics: names and patterns.")
    repair: bool = _setting(False, says="Whether what can be healed is.")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineConfig:
    """`pipeline`: what `ister pipeline run` does, and how often."""

    master: str = _setting("local[*]", says="Where Spark runs.")
    conf: Mapping[str, str] = _setting({}, is_secret=True, says="Settings of Spark; never shown.")
    broker: str | None = _setting(
        None, says="A broker's Flight address, for messages that are not on the pipeline's machine."
    )
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


class Origin(StrEnum):
    """Where a setting's value comes from."""

    DEFAULT = "default"
    FILE = "file"
    """The config file, or the mapping."""
    DIRECTORY = "directory"
    """The data directory that was named in place of a file."""
    ENVIRONMENT = "environment"
    """An `ISTER_…` variable; `${NAME}` in a file counts as the file's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Something that settings cannot be used with."""

    key: str | None
    """The setting concerned; None if it is the whole file."""
    message: str
    hint: str | None
    near: str | None = None
    """The key that was perhaps meant, where `key` does not exist."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """What `examine_config` found."""

    config: Config | None
    """The settings; None if there are problems."""
    problems: tuple[Problem, ...]
    origins: Mapping[str, Origin]
    """Of every setting that was named somewhere; all others have their defaults."""
    lines: Mapping[str, int | None] = field(default_factory=dict)
    """The line of each key in the config file; None where the environment overrides it."""


def load_config(source: ConfigSource, environment: Mapping[str, str] | None = None) -> Config:
    """Settings from wherever they come.

    Args:
        source: A mapping of the tree; the path of a `.yml` file; a directory for data (logs go to
            `wal` inside of it, objects to `objects`, metadata to `metadata.db`); or None, which
            keeps everything in memory.
        environment: Where `${NAME}` and `ISTER_…` are looked up; the process's by default.

    Raises:
        ConfigError: A key is unknown or given twice, a value is of the wrong kind or out of
            bounds, or two of them contradict each other. Names the key, and the line in a file.
    """
    environment = os.environ if environment is None else environment
    read = _read_tree(source)
    tree, lines = read.tree, _lines(read, environment)

    def refuse(key: str | None, error: ConfigError, near: str | None = None) -> None:
        if (line := find_line(key, lines)) is not None and error.path is None:
            error.path = f"{_path_of(source)}:{line}"
        raise error

    for key, problem in read.problems:
        refuse(key, problem)
    _apply_environment(tree, environment, refuse)
    tree = _expand(tree, environment, "", refuse)
    config: Config = _build(Config, tree, "", refuse)
    for keys, error in _contradictions(config, tree):
        refuse(keys[0], error)
    return _fill_in(config, tree)


def examine_config(source: ConfigSource, environment: Mapping[str, str] | None = None) -> Examined:
    """Everything that is wrong with settings, where `load_config` stops at the first.

    Args:
        source: As for `load_config`.
        environment: As for `load_config`.
    """
    environment = os.environ if environment is None else environment
    problems: list[Problem] = []

    def note(key: str | None, error: ConfigError, near: str | None = None) -> None:
        message = error.message if error.path is None else f"{error.message} ({error.path})"
        problems.append(Problem(key=key, message=message, hint=error.hint, near=near))

    try:
        read = _read_tree(source)
    except ConfigError as error:
        note(None, error)
        return Examined(config=None, problems=tuple(problems), origins={})
    tree = read.tree
    for key, problem in read.problems:
        note(key, problem)
    _apply_environment(tree, environment, note)
    is_directory = not isinstance(source, Mapping | None) and not _is_yaml(_path_of(source))
    origins = dict(_origins(tree, "", Origin.DIRECTORY if is_directory else Origin.FILE))
    tree = _expand(tree, environment, "", note)
    config: Config = _build(Config, tree, "", note)
    # A value that cannot be used has left its default behind: what follows from that is no news.
    doubtful = {problem.key for problem in problems} | {problem.near for problem in problems}
    for keys, contradiction in _contradictions(config, tree):
        if not doubtful & set(keys):
            note(keys[0], contradiction)
    return Examined(
        config=None if problems else _fill_in(config, tree),
        problems=tuple(problems),
        origins=origins,
        lines=_lines(read, environment),
    )


def find_line(key: str | None, lines: Mapping[str, int | None]) -> int | None:
    """The line of a key in a config file; for a missing key, the line of its section."""
    while key:
        if key in lines:
            return lines[key]
        key = key.rpartition(".")[0]
    return None


def expand_home(path: str) -> str:
    """Replaces `~` or `~user` at the start of a path by the home directory.

    Raises:
        ConfigError: There is no such user, or the home directory is unknown.
    """
    if not path.startswith("~"):
        return path
    expanded = os.path.expanduser(path)
    if expanded == path:
        user = path.partition("/")[0]
        raise ConfigError(
            f"cannot expand {path!r}: the home directory {user!r} is unknown",
            hint=f"use an absolute path, or ./{user} for a directory of that name",
        )
    return expanded


class _Note(Protocol):
    """What becomes of an error: it is raised, or noted beside others."""

    def __call__(self, key: str | None, error: ConfigError, near: str | None = None) -> None: ...


_BACKENDS_WITH_A_PLACE: Final = (CloudBackend.FS, CloudBackend.LOCAL, CloudBackend.MEMORY)
"""Those whose objects are beside `wal.dir` unless told otherwise."""


def _read_tree(source: ConfigSource) -> YamlTree:
    if source is None:
        return YamlTree({"storage": {"mode": "memory"}})
    if isinstance(source, Mapping):
        return YamlTree(_copy(source))
    path = _path_of(source)
    if _is_yaml(path):
        return _read_yaml(path)
    return YamlTree({"storage": {"wal": {"dir": os.path.join(path, "wal")}}})


def _lines(read: YamlTree, environment: Mapping[str, str]) -> dict[str, int | None]:
    """The line of each key; None for those that the environment overrides."""
    return {**read.lines, **dict.fromkeys(".".join(keys) for _, keys in _overrides(environment))}


def _origins(tree: Mapping[str, Any], prefix: str, named: Origin) -> Iterator[tuple[str, Origin]]:
    """Of every value in a tree that the environment was applied to."""
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield path, named
            yield from _origins(value, f"{path}.", named)
        elif value is not None or not _is_null_by_default(path):
            is_override = isinstance(value, _FromEnvironment)
            yield path, Origin.ENVIRONMENT if is_override else named


def _is_null_by_default(path: str) -> bool:
    value: Any = Config()
    for name in path.split("."):
        value = getattr(value, name, None)
    return value is None


def _is_yaml(path: str) -> bool:
    return path.endswith(_YAML_SUFFIXES)


def _path_of(source: object) -> str:
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else source
    if not isinstance(path, str):
        raise ConfigError(
            f"cannot open {source!r}",
            hint="a directory, the path of an ister.yml, a mapping, or nothing",
        )
    return expand_home(path)


def _copy(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


def _read_yaml(path: str) -> YamlTree:
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(TEXT_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"the config file cannot be read: {error.strerror}", path=path) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the config file is not valid UTF-8: {error}", path=path) from error
    if len(text) > TEXT_BYTES_MAX:
        raise ConfigError(f"the config file is larger than {TEXT_BYTES_MAX} bytes", path=path)
    try:
        read = parse_yaml(text)
    except ConfigError as error:
        raise ConfigError(f"the config file is {error.message}", path=path) from error
    if read.tree is None:
        read.tree = {}
    if not isinstance(read.tree, dict):
        raise ConfigError("the config file does not hold a tree of keys", path=path)
    return read


def _overrides(environment: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Environment variables that override settings, each with the path of its key."""
    for name in sorted(environment):
        if name.startswith(_ENVIRONMENT_PREFIX) and "__" in name:
            yield name, name.removeprefix(_ENVIRONMENT_PREFIX).lower().split("__")


def _apply_environment(tree: dict[str, Any], environment: Mapping[str, str], note: _Note) -> None:
    for name, (*parents, last) in _overrides(environment):
        node = tree
        for parent in parents:
            child = node.get(parent)
            if child is None:
                child = node[parent] = {}
            if not isinstance(child, dict):
                text = f"{name} goes below {parent!r}, which is a single value"
                note(".".join((*parents, last)), ConfigError(text))
                break
            node = child
        else:
            node[last] = _FromEnvironment(environment[name])


def _expand(value: Any, environment: Mapping[str, str], key: str, note: _Note) -> Any:
    if isinstance(value, dict):
        return {
            k: _expand(v, environment, f"{key}.{k}" if key else str(k), note)
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_expand(item, environment, key, note) for item in value]
    if not isinstance(value, str) or _REFERENCE.search(value) is None:
        return value

    def look_up(match: re.Match[str]) -> str:
        name, default = match.groups()
        found: str | None = environment.get(name, default)
        if found is None:
            note(key, ConfigError(f"{key}: the environment has no variable {name}"))
            return match[0]
        return found

    return _FromEnvironment(_REFERENCE.sub(look_up, value))


def _build(kind: Any, tree: Any, prefix: str, note: _Note) -> Any:
    if not isinstance(tree, Mapping):
        text = f"{prefix or 'the config'} has to be a tree of keys, not {tree!r}"
        note(prefix or None, ConfigError(text))
        return kind()
    known = {item.name: item for item in fields(kind)}
    values: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        item = known.get(str(key))
        if item is None:
            nearest = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"known: {', '.join(known)}"
            near = f"{prefix}.{nearest[0]}" if nearest and prefix else "".join(nearest) or None
            note(path, ConfigError(f"unknown key {path!r}", hint=hint), near)
            continue
        default = _default_of(item)
        if is_dataclass(default):
            values[item.name] = _build(type(default), {} if value is None else value, path, note)
            continue
        try:
            values[item.name] = _convert(value, default, item.metadata, path)
        except ConfigError as error:
            note(path, error)
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
        if isinstance(value, Plain) and _WHOLE_NUMBER.fullmatch(value):
            value = int(value, base=0)
        if isinstance(value, bool) or not isinstance(value, int):
            is_odd = isinstance(value, Plain) and _ODD_NUMBER.fullmatch(value)
            raise ConfigError(
                f"{path} has to be a whole number, not {value!r}",
                hint="use a decimal number without leading zeros or colons" if is_odd else None,
            )
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
    _refuse_boolean(value, path)
    return expand_home(str(value)) if bounds.get("is_path") else str(value)


def _is_unquoted(value: Any) -> bool:
    """Whether a value is from a file and has no quotes there."""
    return isinstance(value, Plain) and not isinstance(value, _FromEnvironment)


def _refuse_boolean(value: Any, path: str) -> None:
    """Refuses an unquoted `true` or `false` for a text: the setting is not a boolean."""
    if _is_unquoted(value) and value.lower() in ("true", "false"):
        raise ConfigError(
            f"{path} has to be a text, not {value}", hint=f'write "{value}" if you mean the text'
        )


def _as_bool(value: Any, path: str) -> bool:
    words = _BOOLEANS if _is_unquoted(value) else ("true", "false")
    if isinstance(value, Plain) and value.lower() in words:
        return _BOOLEANS[value.lower()]
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
    for item in items:
        _refuse_boolean(item, path)
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
            options[str(key)] = _as_option(item, f"{path}.{key}")
    return options


def _as_option(value: Any, path: str) -> str:
    text = str(value)
    if isinstance(value, bool):
        return text.lower()
    if not _is_unquoted(value):
        return text
    lower = text.lower()
    if lower in ("true", "false"):
        return lower
    if lower in _BOOLEANS:
        raise ConfigError(
            f"{path} is {text} without quotes, which is a boolean to some YAML parsers and a "
            "text to others",
            hint=f'write {str(_BOOLEANS[lower]).lower()}, or "{text}" in quotes',
        )
    return text


def _contradictions(
    config: Config, tree: Mapping[str, Any]
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    """What does not go together, with the keys concerned."""
    storage = config.storage
    named = tree.get("storage")
    named = named if isinstance(named, Mapping) else {}
    is_in_memory = storage.mode is StorageMode.MEMORY or (
        storage.mode is StorageMode.LOCAL_ONLY and storage.wal.dir is None
    )
    keys: tuple[str, ...] = ("storage.ack", "storage.mode", "storage.wal.dir")
    if is_in_memory and named.get("ack") is not None and storage.ack is not AckLevel.MEMORY:
        yield (
            keys,
            ConfigError(
                f"storage.ack is {storage.ack.value!r}, and this log keeps everything in memory",
                hint="set storage.wal.dir, or use ack 'memory'",
            ),
        )
    if storage.mode is StorageMode.MEMORY and storage.wal.dir is not None:
        yield (
            ("storage.wal.dir", "storage.mode"),
            ConfigError(
                "storage.mode is 'memory' and storage.wal.dir is set", hint="take one of them out"
            ),
        )
    if storage.mode is StorageMode.WAL_CLOUD:
        yield from _contradictions_of_tiers(storage)
        return
    if storage.ack is AckLevel.TIERED and not is_in_memory:
        yield (
            ("storage.ack", "storage.mode"),
            ConfigError(
                f"storage.ack is 'tiered', and storage.mode {storage.mode.value!r} "
                "has no object store",
                hint="use 'synced', which survives power loss, or mode 'wal_cloud'",
            ),
        )
    for section in ("uploader", "cloud", "cloud_reader", "metadata"):
        if named.get(section):
            yield (
                (f"storage.{section}", "storage.mode"),
                ConfigError(
                    f"storage.{section} is set, and storage.mode {storage.mode.value!r} "
                    "has no bucket",
                    hint="take it out, or use mode 'wal_cloud'",
                ),
            )


def _contradictions_of_tiers(
    storage: StorageConfig,
) -> Iterator[tuple[tuple[str, ...], ConfigError]]:
    cloud, metadata = storage.cloud, storage.metadata
    if storage.wal.dir is None:
        yield (
            ("storage.wal.dir", "storage.wal", "storage.mode"),
            ConfigError(
                "storage.wal.dir is not set, and mode 'wal_cloud' keeps messages there first",
                hint="set it, or use mode 'memory'",
            ),
        )
    if cloud.root is None and cloud.backend not in _BACKENDS_WITH_A_PLACE:
        yield (
            ("storage.cloud.root", "storage.cloud.backend"),
            ConfigError(
                f"storage.cloud.root is not set, and backend {cloud.backend.value!r} needs one",
                hint="for example s3://bucket/prefix",
            ),
        )
    if metadata.backend is MetadataBackend.ETCD and not metadata.endpoints:
        yield (
            ("storage.metadata.endpoints", "storage.metadata.backend"),
            ConfigError(
                "storage.metadata.endpoints is empty, and backend 'etcd' needs at least one",
                hint="for example ['127.0.0.1:2379']",
            ),
        )
    if not metadata.root_prefix.startswith("/") or metadata.root_prefix.endswith("/"):
        yield (
            ("storage.metadata.root_prefix",),
            ConfigError(
                f"storage.metadata.root_prefix is {metadata.root_prefix!r}",
                hint="it begins with '/' and does not end with one",
            ),
        )


def _fill_in(config: Config, tree: Mapping[str, Any]) -> Config:
    """Defaults that depend on other settings."""
    if config.storage.mode is StorageMode.WAL_CLOUD:
        return _fill_in_places(config)
    return _keep_only_copies(config, tree)


def _keep_only_copies(config: Config, tree: Mapping[str, Any]) -> Config:
    """Without a bucket, local files are removed by limits that somebody has set."""
    named = tree
    for key in ("storage", "wal", "retention"):
        named = named.get(key) or {}
    storage = config.storage
    retention = storage.wal.retention
    if "time_minutes" not in named:
        retention = replace(retention, time_minutes=None)
    if "size_mb" not in named:
        retention = replace(retention, size_mb=None)
    wal = replace(storage.wal, retention=retention)
    return replace(config, storage=replace(storage, wal=wal))


def _fill_in_places(config: Config) -> Config:
    """Places that follow from `wal.dir`."""
    storage = config.storage
    if storage.wal.dir is None:
        return config
    home = os.path.dirname(os.path.abspath(storage.wal.dir))
    cloud, metadata = storage.cloud, storage.metadata
    if cloud.root is None:
        cloud = replace(cloud, root=os.path.join(home, "objects"))
    if metadata.backend is MetadataBackend.SQLITE and metadata.path is None:
        metadata = replace(metadata, path=os.path.join(home, "metadata.db"))
    return replace(config, storage=replace(storage, cloud=cloud, metadata=metadata))
