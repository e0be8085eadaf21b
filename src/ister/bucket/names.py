"""Names in the bucket and in the metadata store, both directions.

    storage/topics/<ns>/<topic>/
        objects/data-<start>-<end>.dnb1             of a topic's first owner
        objects/data-<start>-<end>-<epoch>.dnb1     of every later one
        objects/data-<start>-pending-<epoch>[-c<tag>].dnb1  being written, named by a copy
        objects/data-<start>-<end>[-<epoch>]-c<tag>.dnb1|.parquet       merged of several others
        segments/data-<start>-<number>.dnb1         any object of frames, with the layout `segments`
        terms/<epoch, 20 digits>-<claim>            an owner's term (`ister.bucket.terms`)
        topic.json                                  what `ister recover` needs to know
    storage/bucket.json                             the bucket's id (`ister.bucket.identity`)
    storage/express/<node>/<process>/<sequence>.dnbx    runs of many topics
    staging/<ns>/<topic>/<writer>/<batch>/          rows on their way to the topic
    staging/shared.files/<writer>/<batch>/          rows on their way to several topics

`end` in a name is inclusive, as Danube's is, and converted here. The epoch in the name is what
keeps an owner that was fenced, and writes on without knowing, away from its successor's objects.

An express object is named after the random id of the process that writes it and a sequence number,
so that no name is used twice. A run has the express object's name and its place in it:
`<name>@<position>+<length>`.

The tag of a merged object is random: two runs that merge the same objects never write to the same
name, and what one of them leaves out the other may keep.

The number of a segment has 31 digits: 1, then ten each for the epoch, the count of messages less
one, and the tag plus one (0 without a tag). So it has all that the other names have, and looks to
Danube like its own, which it does not parse.

An object id is the part of the key behind `objects/`, or `segments/` and what follows.

Danube's own names do not say where an object ends: `data-<start>-<unix seconds>.dnb1`, in
`objects/` (0.6.2 to 0.8) or in `segments/` (since 0.9). `parse_object_id` gives None for them, as
for any foreign name, and `parse_danube_id` takes them apart; `ister.rescue.danube` looks
inside.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, NamedTuple

from ister.base.model import Layout, TopicName
from ister.errors import TopicNameError, check
from ister.format.descriptor import FORMAT_FRAMES, FORMAT_PARQUET, is_express_name, parse_run_id

TOPICS_PREFIX: Final = "storage/topics/"
EXPRESS_PREFIX: Final = "storage/express/"
STAGING_PREFIX: Final = "staging/"
# No namespace has a dot in its name.
SHARED_STAGING_PREFIX: Final = f"{STAGING_PREFIX}shared.files/"
_NUMBER: Final = r"(0|[1-9][0-9]{0,19})"
_TAG: Final = re.compile(r"[0-9a-f]{8}")
_OBJECT_ID: Final = re.compile(
    rf"data-{_NUMBER}-{_NUMBER}(?:-([2-9]|[1-9][0-9]+))?(?:-c({_TAG.pattern}))?\.(dnb1|parquet)"
)
_PENDING_ID: Final = re.compile(
    rf"data-{_NUMBER}-pending(?:-{_NUMBER})?(?:-c{_TAG.pattern})?\.dnb1"
)
_TERM: Final = re.compile(r"([0-9]{20})-([0-9a-f-]*)")
_FIRST_EPOCH: Final = 1
_SEGMENTS: Final = "segments/"
_SEGMENT_DIGITS: Final = 10
_SEGMENT_ID: Final = re.compile(
    rf"{_SEGMENTS}data-{_NUMBER}-1([0-9]{{10}})([0-9]{{10}})([0-9]{{10}})\.dnb1"
)
_DANUBE_ID: Final = re.compile(rf"(?:{_SEGMENTS})?data-{_NUMBER}-{_NUMBER}\.dnb1")
# Unix seconds that a name may have: from 2001 to 2286.
_SECONDS: Final = range(10**9, 10**10)
# No object has as many messages as there are seconds between small offsets and our time.
_OBJECT_MESSAGES_MAX: Final = 1 << 26


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectName:
    """The parts of an object's name; `end` is exclusive."""

    start: int
    end: int
    epoch: int
    format: str = FORMAT_FRAMES
    tag: str | None = None
    """Of an object that was merged of others: eight hexadecimal digits."""
    written_at: int | None = None
    """Of one that Danube wrote: the number in its name, usually Unix seconds."""


class DanubeName(NamedTuple):
    """The parts of a name that Danube gave; neither proves anything about the object."""

    start: int
    number: int
    """Unix seconds; in the names of Danube 0.5, the last offset."""


def format_object_id(
    start: int,
    end: int,
    epoch: int,
    *,
    format: str = FORMAT_FRAMES,
    tag: str | None = None,
    layout: Layout = Layout.OBJECTS,
) -> str:
    """The name of the object with the offsets `start` up to, not including, `end`.

    `tag`: eight hexadecimal digits, for an object that was merged of others.
    `layout`: where it goes; Parquet is always in `objects/`.
    """
    check(format in (FORMAT_FRAMES, FORMAT_PARQUET), f"an object of the format {format!r}")
    check(tag is None or _TAG.fullmatch(tag) is not None, f"not an object's tag: {tag!r}")
    if layout is Layout.SEGMENTS and format == FORMAT_FRAMES:
        parts = (epoch, end - start - 1, 0 if tag is None else int(tag, 16) + 1)
        check(all(0 <= part < 10**_SEGMENT_DIGITS for part in parts), f"no segment: {parts}")
        number = "".join(f"{part:0{_SEGMENT_DIGITS}d}" for part in parts)
        return f"{_SEGMENTS}data-{start}-1{number}.dnb1"
    suffix = "" if epoch == _FIRST_EPOCH else f"-{epoch}"
    if tag is not None:
        suffix += f"-c{tag}"
    return f"data-{start}-{end - 1}{suffix}.{format}"


def format_pending_id(start: int, epoch: int, *, tag: str | None = None) -> str:
    """The name under which an object is written that gets its final one by a copy.

    `tag`: eight hexadecimal digits, if several writers may write this object.
    """
    check(tag is None or _TAG.fullmatch(tag) is not None, f"not an object's tag: {tag!r}")
    suffix = "" if tag is None else f"-c{tag}"
    return f"data-{start}-pending-{epoch}{suffix}.dnb1"


def parse_object_id(object_id: str) -> ObjectName | None:
    """Takes an object's id apart; None for pending and foreign ones."""
    match = _OBJECT_ID.fullmatch(object_id)
    if match is None:
        return _parse_segment_id(object_id)
    start, last, epoch, tag, kind = match.groups()
    if int(last) < int(start):
        return None
    is_plain = epoch is None and tag is None and kind == FORMAT_FRAMES
    if is_plain and int(last) in _SECONDS and int(last) - int(start) >= _OBJECT_MESSAGES_MAX:
        return None  # Danube 0.6.2 to 0.8: seconds, not an offset
    return ObjectName(
        start=int(start),
        end=int(last) + 1,
        epoch=int(epoch) if epoch else _FIRST_EPOCH,
        format=kind,
        tag=tag,
    )


def _parse_segment_id(object_id: str) -> ObjectName | None:
    match = _SEGMENT_ID.fullmatch(object_id)
    if match is None:
        return None
    start, epoch, rest, tag = map(int, match.groups())
    if tag > 1 << 32:
        return None
    return ObjectName(
        start=start, end=start + rest + 1, epoch=epoch, tag=f"{tag - 1:08x}" if tag else None
    )


def parse_danube_id(object_id: str) -> DanubeName | None:
    """Takes an id apart that Danube may have given; None for ids that only Ister gives.

    Names of Danube 0.5 are those of a topic's first owner here; they are among them.
    """
    match = _DANUBE_ID.fullmatch(object_id)
    return None if match is None else DanubeName(int(match[1]), int(match[2]))


def parse_epoch(object_id: str) -> int:
    """The epoch of the owner that wrote an object, pending or not; 0 for foreign ones."""
    name = parse_object_id(object_id)
    return name.epoch if name is not None else parse_pending_epoch(object_id) or 0


def parse_pending_epoch(object_id: str) -> int | None:
    """The epoch of the owner that wrote a pending object; None if it is not one."""
    match = _PENDING_ID.fullmatch(object_id)
    if match is None:
        return None
    epoch = match.group(2)
    return int(epoch) if epoch else _FIRST_EPOCH


def parse_pending_start(object_id: str) -> int | None:
    """The first offset of a pending object; None if it is not one."""
    match = _PENDING_ID.fullmatch(object_id)
    return None if match is None else int(match.group(1))


def topic_prefix(topic: TopicName) -> str:
    """The prefix of the keys of everything that a topic has in the bucket, express runs aside."""
    return f"{TOPICS_PREFIX}{topic.namespace}/{topic.topic}/"


def objects_prefix(topic: TopicName) -> str:
    """The prefix of the keys of a topic's objects, those in `segments/` aside."""
    return f"{topic_prefix(topic)}objects/"


def segments_prefix(topic: TopicName) -> str:
    """The prefix of the keys of a topic's segments."""
    return topic_prefix(topic) + _SEGMENTS


def object_key(topic: TopicName, object_id: str) -> str:
    """The key of an object in the store; of a run, that of the slice (`objectstore.slices`)."""
    if parse_run_id(object_id) is not None:
        return EXPRESS_PREFIX + object_id
    if object_id.startswith(_SEGMENTS):
        return topic_prefix(topic) + object_id
    return objects_prefix(topic) + object_id


def whole_object_key(topic: TopicName, object_id: str) -> str:
    """Like `object_key`; of a run, the key of the whole object that it is in."""
    return object_key(topic, object_id).partition("@")[0]


def object_id_of(topic: TopicName, key: str) -> str:
    """The id of the object with this key; of a foreign file, its path below the topic's prefix."""
    if key.startswith(EXPRESS_PREFIX):
        return key.removeprefix(EXPRESS_PREFIX)
    prefix = objects_prefix(topic)
    return key.removeprefix(prefix if key.startswith(prefix) else topic_prefix(topic))


def segment_name(object_id: str) -> str | None:
    """The name by which Danube finds an object in `segments/`; None for other objects."""
    return object_id.removeprefix(_SEGMENTS) if object_id.startswith(_SEGMENTS) else None


def express_name(node: str, process: str, sequence: int) -> str:
    """The name of an express object."""
    name = f"{node}/{process}/{sequence:020d}.dnbx"
    check(is_express_name(name), f"not the name of an express object: {name!r}")
    return name


def express_key(name: str) -> str:
    """The key of an express object in the store."""
    return EXPRESS_PREFIX + name


def manifest_key(topic: TopicName) -> str:
    """The key of the small object that describes the topic."""
    return f"{topic_prefix(topic)}topic.json"


def terms_prefix(topic: TopicName) -> str:
    """The prefix of the keys of a topic's terms."""
    return f"{topic_prefix(topic)}terms/"


def term_key(topic: TopicName, epoch: int, claim: str) -> str:
    """The key of the small object that records an owner's term."""
    return f"{terms_prefix(topic)}{epoch:020d}-{claim}"


def parse_term_key(topic: TopicName, key: str) -> tuple[int, str] | None:
    """The epoch and the claim of a term by its key; None for other keys."""
    match = _TERM.fullmatch(key.removeprefix(terms_prefix(topic)))
    return None if match is None else (int(match[1]), match[2])


def staging_prefix(topic: TopicName, writer: str | None = None, batch: int | None = None) -> str:
    """The prefix of the keys of staged rows: of a topic, of one writer, or of one batch."""
    prefix = f"{STAGING_PREFIX}{topic.namespace}/{topic.topic}/"
    if writer is not None:
        prefix += f"{writer}/"
        if batch is not None:
            prefix += f"{batch}/"
    return prefix


def shared_staging_prefix(writer: str, batch: int | None = None) -> str:
    """The prefix of the keys of staged files that topics share: of a writer, or of one batch."""
    prefix = f"{SHARED_STAGING_PREFIX}{writer}/"
    return prefix if batch is None else f"{prefix}{batch}/"


def parse_writer_of_key(key: str) -> str | None:
    """The writer of a staged file that topics share; None for other keys."""
    if not key.startswith(SHARED_STAGING_PREFIX):
        return None
    return key.removeprefix(SHARED_STAGING_PREFIX).split("/")[0]


def parse_topic_of_key(key: str) -> TopicName | None:
    """The topic that an object key belongs to; None for other keys."""
    parts = key.removeprefix(TOPICS_PREFIX).split("/")
    if not key.startswith(TOPICS_PREFIX) or len(parts) < 3:
        return None
    try:
        return TopicName.parse(f"/{parts[0]}/{parts[1]}")
    except TopicNameError:
        return None


class TopicKeys:
    """The metadata keys of one topic."""

    def __init__(self, root_prefix: str, topic: TopicName) -> None:
        path = f"{topic.namespace}/{topic.topic}"
        self.root_prefix = root_prefix
        self.topic = topic
        self.record = f"{root_prefix}/topics/{path}"
        self.owner = f"{root_prefix}/cluster/owners/{path}"
        self.reader = f"{root_prefix}/cluster/readers/{path}"
        self.storage = f"{root_prefix}/storage/topics/{path}/"
        self.objects = f"{self.storage}objects/"
        self.current = f"{self.objects}cur"
        self.session = f"{self.storage}upload/session"
        self.sealed = f"{self.storage}state"
        self.subscriptions = f"{root_prefix}/subscriptions/{path}/"

    def descriptor(self, start: int) -> str:
        """The key of the descriptor of the object that starts at `start`."""
        return f"{self.objects}{start:020d}"

    @property
    def objects_end(self) -> str:
        """After every descriptor, and before `cur`."""
        return f"{self.objects}:"

    def retired(self, object_id: str) -> str:
        """The key that lists the objects that an object has replaced."""
        return f"{self.storage}retired/{object_id}"

    def writer(self, name: str) -> str:
        """The key under which a writer of batches is remembered."""
        return f"{self.storage}writers/{name}"

    def progress(self, subscription: str) -> str:
        """The key of a subscription's cursor."""
        return f"{self.subscriptions}{subscription}/progress"
