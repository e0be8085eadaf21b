from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DeadLetter(_message.Message):
    topic: str
    message: bytes
    def __init__(self, topic: _Optional[str] = ..., message: _Optional[bytes] = ...) -> None: ...

class DeadLettersRequest(_message.Message):
    topic: str
    offsets: _containers.RepeatedScalarFieldContainer[int]
    reason: str
    source_topic: str
    source_subscription: str
    start: int
    end: int
    limit: int
    to: str
    def __init__(self, topic: _Optional[str] = ..., offsets: _Optional[_Iterable[int]] = ..., reason: _Optional[str] = ..., source_topic: _Optional[str] = ..., source_subscription: _Optional[str] = ..., start: _Optional[int] = ..., end: _Optional[int] = ..., limit: _Optional[int] = ..., to: _Optional[str] = ...) -> None: ...

class OwnTopicsRequest(_message.Message):
    topics: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topics: _Optional[_Iterable[str]] = ...) -> None: ...

class MoveTopicRequest(_message.Message):
    topic: str
    to: str
    def __init__(self, topic: _Optional[str] = ..., to: _Optional[str] = ...) -> None: ...

class TakeOverRequest(_message.Message):
    topic: str
    confirm: bool
    def __init__(self, topic: _Optional[str] = ..., confirm: _Optional[bool] = ...) -> None: ...

class TakeOverResponse(_message.Message):
    topic: str
    node: str
    offset: int
    done: bool
    def __init__(self, topic: _Optional[str] = ..., node: _Optional[str] = ..., offset: _Optional[int] = ..., done: _Optional[bool] = ...) -> None: ...

class BrokerName(_message.Message):
    broker: str
    def __init__(self, broker: _Optional[str] = ...) -> None: ...

class DrainBrokerRequest(_message.Message):
    broker: str
    timeout_seconds: int
    def __init__(self, broker: _Optional[str] = ..., timeout_seconds: _Optional[int] = ...) -> None: ...

class RebalanceRequest(_message.Message):
    dry_run: bool
    max_moves: int
    def __init__(self, dry_run: _Optional[bool] = ..., max_moves: _Optional[int] = ...) -> None: ...

class ConsumeRequest(_message.Message):
    open: OpenConsumer
    acks: Acks
    nack: Nack
    received: int
    def __init__(self, open: _Optional[_Union[OpenConsumer, _Mapping[str, object]]] = ..., acks: _Optional[_Union[Acks, _Mapping[str, object]]] = ..., nack: _Optional[_Union[Nack, _Mapping[str, object]]] = ..., received: _Optional[int] = ...) -> None: ...

class OpenConsumer(_message.Message):
    topic: str
    subscription: str
    consumer: str
    kind: str
    key_filters: _containers.RepeatedScalarFieldContainer[str]
    start: str
    reports_received: bool
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., consumer: _Optional[str] = ..., kind: _Optional[str] = ..., key_filters: _Optional[_Iterable[str]] = ..., start: _Optional[str] = ..., reports_received: _Optional[bool] = ...) -> None: ...

class Acks(_message.Message):
    offsets: _containers.RepeatedScalarFieldContainer[int]
    tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, offsets: _Optional[_Iterable[int]] = ..., tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class Nack(_message.Message):
    offset: int
    delay_ms: int
    reason: str
    def __init__(self, offset: _Optional[int] = ..., delay_ms: _Optional[int] = ..., reason: _Optional[str] = ...) -> None: ...

class ConsumeResponse(_message.Message):
    opened: Opened
    deliveries: Deliveries
    acked: Acks
    refused: Acks
    def __init__(self, opened: _Optional[_Union[Opened, _Mapping[str, object]]] = ..., deliveries: _Optional[_Union[Deliveries, _Mapping[str, object]]] = ..., acked: _Optional[_Union[Acks, _Mapping[str, object]]] = ..., refused: _Optional[_Union[Acks, _Mapping[str, object]]] = ...) -> None: ...

class Opened(_message.Message):
    consumer_id: int
    cursor: int
    incarnation: str
    kind: str
    def __init__(self, consumer_id: _Optional[int] = ..., cursor: _Optional[int] = ..., incarnation: _Optional[str] = ..., kind: _Optional[str] = ...) -> None: ...

class Deliveries(_message.Message):
    messages: _containers.RepeatedCompositeFieldContainer[Delivered]
    def __init__(self, messages: _Optional[_Iterable[_Union[Delivered, _Mapping[str, object]]]] = ...) -> None: ...

class Delivered(_message.Message):
    class AttributesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    offset: int
    payload: bytes
    publish_time: int
    producer_name: str
    attributes: _containers.ScalarMap[str, str]
    routing_key: str
    schema_id: int
    schema_version: int
    attempt: int
    token: int
    def __init__(self, offset: _Optional[int] = ..., payload: _Optional[bytes] = ..., publish_time: _Optional[int] = ..., producer_name: _Optional[str] = ..., attributes: _Optional[_Mapping[str, str]] = ..., routing_key: _Optional[str] = ..., schema_id: _Optional[int] = ..., schema_version: _Optional[int] = ..., attempt: _Optional[int] = ..., token: _Optional[int] = ...) -> None: ...

class InfoRequest(_message.Message):
    def __init__(self) -> None: ...

class InfoResponse(_message.Message):
    version: str
    broker_url: str
    flight_url: str
    node: str
    def __init__(self, version: _Optional[str] = ..., broker_url: _Optional[str] = ..., flight_url: _Optional[str] = ..., node: _Optional[str] = ...) -> None: ...

class TopicName(_message.Message):
    topic: str
    def __init__(self, topic: _Optional[str] = ...) -> None: ...

class CreateTopicRequest(_message.Message):
    topic: str
    ack: str
    codec: str
    partitions: int
    non_reliable: bool
    grow: bool
    def __init__(self, topic: _Optional[str] = ..., ack: _Optional[str] = ..., codec: _Optional[str] = ..., partitions: _Optional[int] = ..., non_reliable: _Optional[bool] = ..., grow: _Optional[bool] = ...) -> None: ...

class TopicDescription(_message.Message):
    topic: str
    reliable: bool
    ack: str
    codec: str
    incarnation: str
    earliest: int
    trimmed: int
    tiered: int
    synced: int
    written: int
    next: int
    partitions: _containers.RepeatedScalarFieldContainer[str]
    producers: int
    subscriptions: _containers.RepeatedCompositeFieldContainer[SubscriptionDescription]
    policies: str
    def __init__(self, topic: _Optional[str] = ..., reliable: _Optional[bool] = ..., ack: _Optional[str] = ..., codec: _Optional[str] = ..., incarnation: _Optional[str] = ..., earliest: _Optional[int] = ..., trimmed: _Optional[int] = ..., tiered: _Optional[int] = ..., synced: _Optional[int] = ..., written: _Optional[int] = ..., next: _Optional[int] = ..., partitions: _Optional[_Iterable[str]] = ..., producers: _Optional[int] = ..., subscriptions: _Optional[_Iterable[_Union[SubscriptionDescription, _Mapping[str, object]]]] = ..., policies: _Optional[str] = ...) -> None: ...

class SetPoliciesRequest(_message.Message):
    name: str
    policies: str
    def __init__(self, name: _Optional[str] = ..., policies: _Optional[str] = ...) -> None: ...

class PoliciesResponse(_message.Message):
    policies: str
    def __init__(self, policies: _Optional[str] = ...) -> None: ...

class ProducerName(_message.Message):
    topic: str
    producer: str
    def __init__(self, topic: _Optional[str] = ..., producer: _Optional[str] = ...) -> None: ...

class ReleasedProducer(_message.Message):
    principal: str
    def __init__(self, principal: _Optional[str] = ...) -> None: ...

class SubscriptionName(_message.Message):
    topic: str
    subscription: str
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ...) -> None: ...

class SubscriptionDescription(_message.Message):
    topic: str
    subscription: str
    kind: str
    cursor: int
    lag: int
    in_flight: int
    waiting: int
    blocked: int
    consumers: _containers.RepeatedScalarFieldContainer[str]
    active: str
    max_unacked_messages: int
    restricted: bool
    principals: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., kind: _Optional[str] = ..., cursor: _Optional[int] = ..., lag: _Optional[int] = ..., in_flight: _Optional[int] = ..., waiting: _Optional[int] = ..., blocked: _Optional[int] = ..., consumers: _Optional[_Iterable[str]] = ..., active: _Optional[str] = ..., max_unacked_messages: _Optional[int] = ..., restricted: _Optional[bool] = ..., principals: _Optional[_Iterable[str]] = ...) -> None: ...

class RestrictSubscriptionRequest(_message.Message):
    topic: str
    subscription: str
    principals: _containers.RepeatedScalarFieldContainer[str]
    unrestricted: bool
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., principals: _Optional[_Iterable[str]] = ..., unrestricted: _Optional[bool] = ...) -> None: ...

class SeekRequest(_message.Message):
    topic: str
    subscription: str
    offset: int
    publish_time_ms: int
    earliest: bool
    latest: bool
    def __init__(self, topic: _Optional[str] = ..., subscription: _Optional[str] = ..., offset: _Optional[int] = ..., publish_time_ms: _Optional[int] = ..., earliest: _Optional[bool] = ..., latest: _Optional[bool] = ...) -> None: ...

class ListTopicsRequest(_message.Message):
    namespace: str
    with_partitions: bool
    after: str
    limit: int
    def __init__(self, namespace: _Optional[str] = ..., with_partitions: _Optional[bool] = ..., after: _Optional[str] = ..., limit: _Optional[int] = ...) -> None: ...

class Document(_message.Message):
    json: str
    def __init__(self, json: _Optional[str] = ...) -> None: ...
