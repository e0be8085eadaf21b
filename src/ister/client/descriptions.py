"""What calls for operators return: topics, subscriptions, roles, schemas; and a filter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ister.base.notebook import render_table


@dataclass(frozen=True, slots=True, kw_only=True)
class SubscriptionDescription:
    """Position and state of a subscription, and what blocks it."""

    topic: str
    subscription: str
    kind: str
    cursor: int
    """The first offset that is not acknowledged."""
    lag: int
    """Messages from the cursor to the end."""
    in_flight: int
    waiting: int
    """Messages that are pending redelivery."""
    blocked: int | None
    """The offset that stops the subscription; None if it is not stopped."""
    consumers: tuple[str, ...]
    active: str | None
    """The consumer that gets the messages of an exclusive or failover subscription."""
    max_unacked_messages: int
    principals: tuple[str, ...] | None = None
    """Principals that may use it; None for all that may consume the topic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicDescription:
    """Watermarks of a topic (see `ister.Watermarks`), its producers and subscriptions."""

    topic: str
    partitions: tuple[str, ...]
    """Of a partitioned topic; describe each of them for the other fields."""
    is_reliable: bool
    ack: str
    codec: str
    incarnation: str
    earliest: int
    trimmed: int
    tiered: int
    synced: int
    written: int
    next: int
    producers: int
    subscriptions: tuple[SubscriptionDescription, ...]
    policies: Mapping[str, int] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        headers = ("ack", "earliest", "trimmed", "tiered", "synced", "written", "next", "producers")
        shown = render_table(
            f"Topic {self.topic}", headers, [[getattr(self, name) for name in headers]]
        )
        columns = ("subscription", "kind", "cursor", "lag", "in_flight", "waiting", "blocked")
        rows = [[getattr(one, name) for name in columns] for one in self.subscriptions]
        return shown + render_table("Subscriptions", columns, rows) if rows else shown


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleDescription:
    """A named set of permissions."""

    name: str
    permissions: tuple[str, ...]
    """Such as `produce`, `manage_topic`."""
    is_system: bool
    """Whether it always exists and cannot be changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingDescription:
    """Roles of a principal: in the cluster, in a namespace, or on a topic."""

    id: str
    principal: str
    """`user:NAME` or `service:NAME`."""
    roles: tuple[str, ...]
    scope: str
    """`cluster`, `namespace` or `topic`."""
    resource: str
    """The namespace or topic; "" for the cluster."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubjectDescription:
    """A subject of the registry: schemas of one kind of message, version by version."""

    subject: str
    schema_type: str
    latest_version: int
    compatibility: str
    """How a new version must be compatible: `none`, `backward`, `forward` or `full`."""
    schema_id: int
    tags: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchemaVersion:
    """A version of a subject, without its definition."""

    version: int
    schema_id: int
    created_at: int
    """Unix seconds."""
    created_by: str
    description: str
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Schema(SchemaVersion):
    """A version of a subject, with its definition."""

    subject: str
    schema_type: str
    definition: bytes
    tags: tuple[str, ...]
    compatibility: str


@dataclass(frozen=True, slots=True, kw_only=True)
class RegisteredSchema:
    """The version that a definition has in its subject."""

    subject: str
    version: int
    schema_id: int
    is_new: bool
    """Whether it was added; an existing definition keeps its version."""
    fingerprint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class LetterFilter:
    """Selects dead letters; all conditions have to match."""

    offsets: Sequence[tuple[int, int]] = ()
    """Ranges, each from its first offset up to, not including, its second; all if empty."""
    reason: str = ""
    """Text in the reason, case-insensitive."""
    source_topic: str = ""
    """The topic in which it failed."""
    source_subscription: str = ""
    end: int = 0
    """Only letters before this offset; 0 for all."""
