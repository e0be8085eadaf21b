"""Topics, brokers and the pipeline as JSON: what HTTP, gRPC, the client and `--json` return.

Types only: the values are plain dictionaries. Brokers fill them from `ister.topic.describe`. Fields
are added, never renamed; a client may meet a broker that does not send all of them.
"""

from __future__ import annotations

from typing import NotRequired, Required, TypedDict

from ister.base.model import JsonObject


class BrokerJson(TypedDict):
    """A broker that is up."""

    node: str
    broker_url: str
    connect_url: str
    flight_url: str
    http_url: NotRequired[str]
    topics: int
    is_this: bool
    """Whether it is the broker that was asked."""
    is_leader: NotRequired[bool]
    state: NotRequired[str]
    """`starting`, `active`, or `draining`: it takes no topics."""
    zone: NotRequired[str]
    version: NotRequired[str]
    load: NotRequired[dict[str, float]]
    """Topics, messages and bytes per second, the share of a core, bytes to be uploaded."""


MoveJson = TypedDict(
    "MoveJson",
    {"topic": str, "from": str, "to": str, "reason": NotRequired[str], "since": NotRequired[int]},
)
"""A topic that moves from one broker to another, both named by their nodes."""


class WaitingJson(TypedDict):
    """A topic whose newest messages are on the disk of a broker that is down."""

    topic: str
    node: str
    offset: int
    """The first offset that a take-over would give up."""
    since: int | None


class BrokerLoadJson(TypedDict):
    """A broker's load, as one number."""

    node: str
    load: float
    topics: int


class BalanceJson(TypedDict):
    """How evenly the load is spread over the brokers that take topics."""

    strategy: str
    variation: float
    """The coefficient of variation: 0 if all have the same load."""
    threshold: float
    """Above this, a rebalance moves topics."""
    mean: float
    deviation: float
    brokers: list[BrokerLoadJson]


class RebalanceJson(TypedDict):
    """The moves that even out the load, requested or only planned."""

    dry_run: bool
    moves: list[MoveJson]


class ClusterJson(TypedDict):
    """Brokers, leader, balance, moves under way, and topics that wait for a disk."""

    brokers: list[BrokerJson]
    leader: str | None
    balance: BalanceJson
    moves: list[MoveJson]
    waiting: list[WaitingJson]
    waiting_total: int
    rights: NotRequired[dict[str, bool]]


class DrainJson(TypedDict):
    """What became of the topics of a broker that was drained."""

    node: str
    total: int
    moved: int
    failed: list[str]
    pending: int


class TakeOverJson(TypedDict):
    """What a take-over gives up: messages from `offset` on that only the disk of `node` has."""

    topic: str
    node: str
    offset: int
    done: bool


class FileJson(TypedDict):
    """A local file of a topic."""

    name: str
    first_offset: int | None
    next_offset: int | None
    bytes: int
    is_active: bool


class ObjectJson(TypedDict, total=False):
    """An object of a topic: its descriptor, or neighbouring objects as one."""

    object_id: Required[str | None]
    start_offset: Required[int]
    end_offset: Required[int]
    """Inclusive, as in a descriptor."""
    size: Required[int | None]
    messages: int | None
    merged_objects: int | None
    """How many objects this entry stands for; only if it is not a descriptor."""
    etag: str | None
    created_at: int
    completed: bool
    format: str
    codec: str
    epoch: int
    incarnation: str
    publish_time_min: int | None
    publish_time_max: int | None
    checksum: str | None


class SubscriptionJson(TypedDict):
    """A subscription of a topic."""

    topic: NotRequired[str]
    name: str
    type: str | None
    cursor: int | None
    lag: int | None
    in_flight: int | None
    waiting: int | None
    blocked: int | None
    blocked_reason: str | None
    consumers: list[str]
    consumers_total: NotRequired[int]
    active: str | None
    max_unacked_messages: int | None
    failure_policy: JsonObject | None
    principals: NotRequired[list[str] | None]


class TopicJson(TypedDict, total=False):
    """A topic; of a partitioned one, only the name and the partitions."""

    topic: Required[str]
    parent: str | None
    partitions: list[str]
    topics: list[TopicJson]
    """The partitions, where a command or the HTTP API describes them too."""
    is_here: bool
    is_reliable: bool
    mode: str | None
    ack: str | None
    codec: str | None
    incarnation: str | None
    epoch: int | None
    state: str | None
    created_at: int | None
    owner: dict[str, str | None] | None
    sealed: JsonObject | None
    earliest: int
    watermarks: dict[str, int]
    path: str | None
    is_local_current: bool | None
    files: list[FileJson]
    objects: list[ObjectJson]
    files_total: int
    files_bytes: int
    objects_total: int
    objects_bytes: int
    is_counted: bool
    cache: dict[str, int] | None
    producers: int | None
    policies: dict[str, int]
    own_policies: dict[str, int]
    """Those that are set for the topic itself; only in the HTTP API."""
    dead_letters_of: list[dict[str, str]]
    """Subscriptions whose dead letters go here; only in the HTTP API."""
    recent: dict[str, list[float]]
    """Messages in/s of partitions in the last minutes; only in the HTTP API."""
    schema: dict[str, str | int | None] | None
    rates: dict[str, float] | None
    upload_lag: dict[str, int]
    subscriptions: list[SubscriptionJson]
    subscriptions_total: int
    damage: list[JsonObject]
    errors: list[JsonObject]
    history: JsonObject
    rights: dict[str, bool]


class PipelineLeaseJson(TypedDict, total=False):
    """Who holds the pipeline's lease."""

    holder: Required[str]
    since: Required[int]
    job: str
    host: str
    process: int


class _PipelineUploads(TypedDict, total=False):
    is_on: bool
    topics: int
    lag_messages: int | None
    tiered_messages_total: int
    tiered_bytes_total: int
    failing_topics: list[str]
    failing_topics_total: int
    last_error: str | None


class _PipelineJob(TypedDict, total=False):
    is_running: bool
    next_at: int | None
    last_error: str | None


class PipelineRequestJson(TypedDict, total=False):
    """A job that somebody asked for."""

    requested_at: int
    by: str
    topics: list[str] | None
    state: str
    started_at: int
    ended_at: int | None
    error: str | None


class PipelineStatusJson(TypedDict, total=False):
    """What a running pipeline says about itself."""

    holder: str
    host: str
    updated_at: int
    cycles: int
    tier: _PipelineUploads
    jobs: dict[str, _PipelineJob]
    requests: dict[str, PipelineRequestJson]
    memory: dict[str, int | None]


class PipelineReportJson(TypedDict, total=False):
    """What a job did last."""

    started_at: int
    seconds: float
    errors: list[JsonObject]


class PipelineJson(TypedDict):
    """Whether a pipeline runs, what it says, and what each job did last."""

    ok: bool
    job: str
    is_running: bool
    engine: str
    lease: PipelineLeaseJson | None
    status: PipelineStatusJson | None
    reports: dict[str, PipelineReportJson]
    requests: dict[str, PipelineRequestJson]
    topics: list[JsonObject]
    errors: list[JsonObject]
    words: NotRequired[str]
    """The same in a sentence."""


class LetterGroupJson(TypedDict):
    """Pending dead letters of one subscription."""

    source_topic: str | None
    """None for messages that are not dead letters."""
    source_subscription: str | None
    count: int
    first_offset: int
    oldest: int | None
    """Publish time of the oldest message, in milliseconds since the Unix epoch."""
    newest: int | None
    unverified: int
    """Those that no broker of the cluster has written; their origin may be forged."""
    reasons: dict[str, int]
    """The most frequent reasons, and how often each occurs."""


class DeadLetterCountJson(TypedDict):
    """The pending dead letters of a dead-letter topic."""

    topic: str
    pending: int
    selected: int
    groups: list[LetterGroupJson]
    end: int
    """The offset behind the last letter that was counted."""
    is_partial: bool
    """Whether there may be more letters behind it."""


class LetterStoryJson(TypedDict):
    """The origin of a dead letter, and the reason."""

    topic: str
    subscription: str
    offset: int | None
    attempt: int | None
    reason: str
    hops: int
    dropped_attributes: int
    is_verified: bool
    """Whether a broker of the cluster has written it; else its origin may be forged."""


class DeadLetterJson(TypedDict):
    """A pending dead letter; its attributes are those that it had before it failed."""

    offset: int
    publish_time: int | None
    producer_name: str | None
    attributes: dict[str, str]
    routing_key: str | None
    size: int
    payload_base64: str
    is_cut: bool
    text: str | None
    decoded: NotRequired[object]
    dead_letter: LetterStoryJson | None


class ResolvedJson(TypedDict):
    """Dead letters that were requeued or dropped, and those that stay pending."""

    topic: str
    done: int
    failed: list[JsonObject]
    """Each with `offset`, `code`, `error` and `hint`."""
    next: NotRequired[int | None]
