"""`broker` and `dispatch`: what `ister serve` does, and how subscriptions deliver."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from ister.base.limits import KIB, MESSAGE_SIZE_BYTES_MAX, MIB
from ister.config.settings import setting


class ClientAuth(StrEnum):
    """Whether clients must present a certificate."""

    NONE = "none"
    REQUIRED = "required"


class AuthMode(StrEnum):
    """Whether callers must authenticate."""

    NONE = "none"
    TOKEN = "token"  # noqa: S105 - a word, not one


class GrpcEngine(StrEnum):
    """What serves the gRPC port."""

    GRPCIO = "grpcio"
    NATIVE = "native"
    AUTO = "auto"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPortsConfig:
    """`broker.ports`: ports to listen on; 0 takes any free port."""

    grpc: int = setting(
        6650, low=0, high=65_535, says="Danube's protocol, for clients that publish and subscribe."
    )
    flight: int = setting(
        6651, low=0, high=65_535, says="Arrow Flight: bulk publishing, ranges, tails."
    )
    http: int = setting(9040, low=0, high=65_535, says="The dashboard, health and metrics.")


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerGrpcConfig:
    """`broker.grpc`: how the gRPC port is served."""

    engine: GrpcEngine = setting(
        GrpcEngine.GRPCIO,
        says="What serves the gRPC port: `grpcio`, or `native` (pygrpc-native), which takes a "
        "fraction of the CPU time for a call but has no TLS and is for trusted networks only. "
        "`auto` is `native` if it can be used, TLS is off and the broker listens on a loopback "
        "address; otherwise `grpcio`.",
    )


class Strategy(StrEnum):
    """How the leader chooses a broker for a topic."""

    FAIR = "fair"
    BALANCED = "balanced"


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceConfig:
    """`broker.cluster.rebalance`: moving topics from busy brokers to others."""

    enabled: bool = setting(False, says="Whether the leader moves topics by itself.")
    threshold_percent: int = setting(
        30,
        low=1,
        high=1000,
        says="Topics move when the load of the brokers varies by more than this: its standard "
        "deviation, as a percentage of the mean.",
    )
    interval_seconds: int = setting(
        60, low=1, high=86_400, says="How often the leader compares the brokers."
    )
    cooldown_seconds: int = setting(
        600, low=0, high=86_400, says="A topic that has moved stays for at least this long."
    )
    max_moves: int = setting(5, low=1, high=1000, says="The most topics that move at a time.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FailoverConfig:
    """`broker.cluster.failover`: topics whose newest messages are on the disk of a dead broker."""

    give_up_tail_after_seconds: int | None = setting(
        None,
        low=1,
        high=31 * 86_400,
        says="After such a topic has been read-only for this long, it is taken over, and the "
        "messages that were not uploaded are lost. null waits for the broker.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterConfig:
    """`broker.cluster`: several brokers that share a metadata store and a bucket."""

    zone: str | None = setting(
        None, says="Location of this broker, such as an availability zone; only displayed."
    )
    strategy: Strategy = setting(
        Strategy.FAIR,
        says="How a broker is chosen for a topic: `fair` takes the one with the fewest topics, "
        "`balanced` the one with the least load.",
    )
    rebalance: RebalanceConfig = field(default_factory=RebalanceConfig)
    failover: FailoverConfig = field(default_factory=FailoverConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvertisedConfig:
    """`broker.advertised`: the addresses that clients use; by default where it listens."""

    broker_url: str | None = setting(
        None, says="The broker's own address, with http:// or https://."
    )
    connect_url: str | None = setting(
        None, says="Address that clients connect to, if there is a proxy."
    )
    flight_url: str | None = setting(
        None, says="Address of Arrow Flight, as grpc://host:port or grpc+tls://host:port."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """`broker.tls`: with a certificate, all three ports accept only TLS."""

    cert_file: str | None = setting(None, is_path=True, says="The broker's certificate chain, PEM.")
    key_file: str | None = setting(None, is_path=True, says="Its private key, PEM.")
    ca_file: str | None = setting(
        None,
        is_path=True,
        says="CA certificates, PEM, that sign client certificates, and by which brokers of a "
        "cluster verify each other. null: brokers verify each other by the system CA store.",
    )
    client_auth: ClientAuth = setting(
        ClientAuth.NONE, says="Whether clients must present a certificate."
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class JwtConfig:
    """`broker.auth.jwt`: tokens signed by an identity provider."""

    algorithm: str | None = setting(
        None, says="The only accepted algorithm: HS256, RS256, ES256, EdDSA, …"
    )
    secret: str | None = setting(
        None, is_secret=True, says="Key of HS256, HS384 and HS512; redacted."
    )
    public_key_file: str | None = setting(
        None, is_path=True, says="Public key of all other algorithms, PEM."
    )
    issuer: str | None = setting(None, says="Required value of `iss`.")
    audience: str | None = setting(
        None,
        says="Required value of `aud`. null: tokens must have no `aud`, as those of Danube's "
        "tools; the broker warns at its start.",
    )
    leeway_seconds: int = setting(30, low=0, high=60, says="Allowed difference between clocks.")


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthConfig:
    """`broker.auth`: authentication of callers."""

    mode: AuthMode = setting(
        AuthMode.NONE,
        says="With `token`, callers must authenticate with a token, a key or a certificate.",
    )
    jwt: JwtConfig = field(default_factory=JwtConfig)
    api_keys_file: str | None = setting(
        None,
        is_path=True,
        says="File with one API key per line, its name and SHA-256; reloaded when it changes.",
    )
    mtls_principal: bool = setting(False, says="Whether a client's certificate authenticates it.")
    super_admins: tuple[str, ...] = setting((), says="Principals with all permissions.")
    audit_file: str | None = setting(
        None,
        is_path=True,
        says="Audit log of refusals and changes, one JSON object per line; the logger "
        "`ister.audit` unless set.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerPoliciesConfig:
    """`broker.policies`: default limits of topics; 0 is no limit."""

    max_producers_per_topic: int = setting(
        0, low=0, says="Producers of a topic seen within a minute; 0 is no limit."
    )
    max_subscriptions_per_topic: int = setting(
        0, low=0, says="Subscriptions of a topic; 0 is no limit."
    )
    max_consumers_per_topic: int = setting(
        0, low=0, says="Connected consumers of a topic; 0 is no limit."
    )
    max_consumers_per_subscription: int = setting(
        0, low=0, says="Connected consumers of a subscription; 0 is no limit."
    )
    max_publish_rate: int = setting(
        0, low=0, says="Messages per second into a topic; more are delayed; 0 is no limit."
    )
    max_subscription_dispatch_rate: int = setting(
        0, low=0, says="Messages per second out of a subscription; more are delayed; 0 is no limit."
    )
    max_message_size: int = setting(
        0,
        low=0,
        high=MESSAGE_SIZE_BYTES_MAX,
        says="Maximum size of a payload, if below `storage.max_message_size`; 0 is no limit.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerLimitsConfig:
    """`broker.limits`: limits of one broker."""

    max_streams_per_connection: int = setting(
        1024,
        low=1,
        high=100_000,
        says="Concurrent calls on one connection; more wait in the client.",
    )
    max_connections: int = setting(
        2048, low=1, says="Consumers with an open stream; more are refused."
    )
    max_subscriptions_per_principal: int = setting(
        10_000,
        low=1,
        says="Subscriptions that one principal may have created, on the topics of this broker. "
        "With auth off, all callers count as one principal.",
    )
    max_consumers_per_principal: int = setting(
        1024,
        low=1,
        says="Consumers of one principal with an open stream. With auth off only `max_connections` "
        "applies.",
    )
    max_streams_per_principal: int = setting(
        2048,
        low=1,
        says="Streams of one principal over gRPC, including those of its consumers and of Flight. "
        "Does not apply with auth off.",
    )
    max_flight_streams: int = setting(
        1024,
        low=1,
        says="Arrow Flight streams: reads, and producers of `ister.client` that are not idle; each "
        "may use a thread. Beyond that, the broker ends streams of idle producers, which open "
        "others when they send again. More are refused.",
    )
    max_flight_streams_per_principal: int = setting(
        256, low=1, says="Arrow Flight streams of one principal. Does not apply with auth off."
    )
    max_requests_in_flight: int = setting(
        1024,
        low=1,
        says="Concurrent calls in all; more are refused. Each may hold a message, so this bounds "
        "memory together with `storage.max_message_size`.",
    )
    max_topics: int = setting(
        100_000, low=1, says="Topics that clients create by using them; more are refused."
    )
    max_grpc_message_bytes: int = setting(
        4 * MIB,
        low=64 * KIB,
        high=MESSAGE_SIZE_BYTES_MAX,
        says="Maximum size of a gRPC message; Danube's clients cannot receive more than 4 MiB.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerConfig:
    """`broker`: settings of `ister serve`, not used by the log itself."""

    host: str = setting("127.0.0.1", says="Address to listen on.")
    ports: BrokerPortsConfig = field(default_factory=BrokerPortsConfig)
    grpc: BrokerGrpcConfig = field(default_factory=BrokerGrpcConfig)
    advertised: AdvertisedConfig = field(default_factory=AdvertisedConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    auto_create_topics: bool = setting(True, says="Whether a producer creates a missing topic.")
    bootstrap_namespaces: tuple[str, ...] = setting(
        ("default",), says="Namespaces that exist from the start, beside `default` and `system`."
    )
    allow_insecure: bool = setting(
        False, says="Whether to listen beyond this machine without authentication."
    )
    drain_seconds: int = setting(
        8, low=1, high=3600, says="How long calls in progress may take at shutdown."
    )
    consumer_grace_seconds: int = setting(
        3600,
        low=1,
        high=31 * 86_400,
        says="How long a disconnected consumer's key filters still reserve messages for it.",
    )
    tls: TlsConfig = field(default_factory=TlsConfig)
    auth: AuthConfig = field(default_factory=AuthConfig)
    policies: BrokerPoliciesConfig = field(default_factory=BrokerPoliciesConfig)
    limits: BrokerLimitsConfig = field(default_factory=BrokerLimitsConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """`dispatch`: delivery to consumers."""

    max_unacked_messages: int = setting(
        1000, low=1, high=100_000, says="Unacknowledged messages that a consumer may hold."
    )
    progress_flush_interval_seconds: int = setting(
        5, low=1, high=3600, says="Longest time until a moved cursor is written."
    )
    progress_min_offset_delta: int = setting(
        1000, low=1, says="A cursor that moved by this many messages is written at once."
    )
    memory_budget_mb: int | None = setting(
        None,
        low=16,
        says="Memory of all subscriptions together for messages on their way to consumers, in MiB. "
        "When it is used up, subscriptions whose consumers are idle drop their messages first and "
        "read them again later; what is written to a stream counts until its client has read it, "
        "and a write that does not fit waits. null is an eighth of the memory of the machine or of "
        "the control group, at least 64.",
    )
