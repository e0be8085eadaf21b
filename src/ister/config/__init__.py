"""Settings: one tree, from a mapping, a YAML file or a directory, frozen and checked.

    storage:
      ack: synced
      wal: {dir: ./ister-data/wal}
      cloud:
        backend: s3
        root: s3://bucket/prefix
        options: {region: eu-central-1, secret_key: "${SECRET}"}

    storage, broker, pipeline   every setting with its default, bounds and sentence
    tree                        the whole of them: `Config`
    loading                     `load_config`: files, environment, unknown keys
    aliases                     keys of Danube's design documents, and their settings
    yaml_tree                   YAML as a tree of strings, without guessing types
    values                      conversion of values, and the words of errors
    checks                      contradictions, and defaults that depend on other settings
    reference                   settings as a list, and `ister config example`

Settings are data: clocks, file systems and the like are passed beside them, not in them.
"""

from ister.config.broker import (
    AdvertisedConfig,
    AuthConfig,
    AuthMode,
    BrokerConfig,
    BrokerGrpcConfig,
    BrokerLimitsConfig,
    BrokerPoliciesConfig,
    BrokerPortsConfig,
    ClientAuth,
    ClusterConfig,
    DispatchConfig,
    FailoverConfig,
    GrpcEngine,
    JwtConfig,
    RebalanceConfig,
    Strategy,
    TlsConfig,
)
from ister.config.loading import (
    ConfigSource,
    Examined,
    Origin,
    Problem,
    examine_config,
    find_line,
    load_config,
)
from ister.config.pipeline import (
    CompactConfig,
    ExportConfig,
    GcConfig,
    Keep,
    ObjectFormat,
    PipelineConfig,
    ScrubConfig,
    TableFormat,
)
from ister.config.storage import (
    BucketConfig,
    BufferFull,
    CloudBackend,
    CloudConfig,
    CloudReaderConfig,
    CloudRetentionConfig,
    DiskConfig,
    Engine,
    EtcdTlsConfig,
    Finalize,
    MetadataBackend,
    MetadataConfig,
    OnDamage,
    StorageConfig,
    StorageMode,
    UploaderConfig,
    Verify,
    WalConfig,
    WalRetentionConfig,
)
from ister.config.tree import Config
from ister.config.values import expand_home

__all__ = [
    "AdvertisedConfig",
    "AuthConfig",
    "AuthMode",
    "BrokerConfig",
    "BrokerGrpcConfig",
    "BrokerLimitsConfig",
    "BrokerPoliciesConfig",
    "BrokerPortsConfig",
    "BucketConfig",
    "BufferFull",
    "ClientAuth",
    "CloudBackend",
    "CloudConfig",
    "CloudReaderConfig",
    "CloudRetentionConfig",
    "ClusterConfig",
    "CompactConfig",
    "Config",
    "ConfigSource",
    "DiskConfig",
    "DispatchConfig",
    "Engine",
    "EtcdTlsConfig",
    "Examined",
    "ExportConfig",
    "FailoverConfig",
    "Finalize",
    "GcConfig",
    "GrpcEngine",
    "JwtConfig",
    "Keep",
    "MetadataBackend",
    "MetadataConfig",
    "ObjectFormat",
    "OnDamage",
    "Origin",
    "PipelineConfig",
    "Problem",
    "RebalanceConfig",
    "ScrubConfig",
    "StorageConfig",
    "StorageMode",
    "Strategy",
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
