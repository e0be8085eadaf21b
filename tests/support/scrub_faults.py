"""A topic of many small objects, and faults planted in its bucket and in its metadata."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from ister.base.clock import SystemClock
from ister.base.metrics import Metrics
from ister.base.model import TopicName
from ister.bucket.catalog import Catalog
from ister.bucket.names import TopicKeys, format_object_id, object_key
from ister.config import load_config
from ister.format.descriptor import ObjectDescriptor, decode_descriptor, encode_descriptor
from ister.metadata.base import MetadataStore
from ister.spark.jobs.job_report import JobReport
from ister.topic.history import BucketLog
from ister.topic.stores import open_metadata
from tests.integration.spark_topics import SparkPlace, fill

TOPIC = "/default/orders"


def make_topic(root: Path, objects: int, each: int) -> Path:
    """A topic of so many objects of so many messages, closed, with its local files; `root`."""
    with SparkPlace(root).open() as log:
        topic = log.topic(TOPIC, create=True)
        for number in range(objects):
            fill(topic, each, first=number * each)
            topic.upload()
    return root


def named(report: JobReport, *fields: str) -> list[tuple]:
    """What was found, in short: (kind, …)."""
    (topic,) = report.as_json()["topics"]
    found = topic["findings"]
    return sorted(((one["kind"], *(one[name] for name in fields)) for one in found), key=repr)


class Patient:
    """A topic in a data directory that nobody has open.

    Args:
        config: The directory's config file.
        bucket: Where objects lie.
        topic: Its name.
    """

    def __init__(self, config: str, bucket: Path, topic: str = TOPIC) -> None:
        self._config = load_config(config)
        self._bucket = bucket
        self.name = TopicName.parse(topic)
        self.keys = TopicKeys(self._config.storage.metadata.root_prefix, self.name)

    # -- what there is ----------------------------------------------------------------------

    @contextmanager
    def metadata(self) -> Iterator[MetadataStore]:
        """The metadata store, to be changed."""
        store = open_metadata(self._config.storage.metadata, SystemClock())
        try:
            yield store
        finally:
            store.close()

    def descriptors(self) -> list[ObjectDescriptor]:
        """The topic's, as they are."""
        with self.metadata() as store:
            catalog = Catalog(store, self.keys, clock=SystemClock(), metrics=Metrics())
            return [described for described, _ in catalog.descriptors()]

    def path(self, object_id: str) -> Path:
        """The file that an object is."""
        return self._bucket / object_key(self.name, object_id)

    def rows(self) -> list[dict]:
        """Everything that is in the bucket, read without the local files."""
        with BucketLog(self._config) as history:
            return history.topic(str(self.name)).read_arrow().read_all().to_pylist()

    # -- faults -----------------------------------------------------------------------------

    def flip_bit(self, described: ObjectDescriptor, position: int) -> None:
        """One bit of an object is another one."""
        path = self.path(described.object_id)
        data = bytearray(path.read_bytes())
        data[position] ^= 1
        path.write_bytes(data)

    def truncate(self, described: ObjectDescriptor, size: int) -> None:
        """An object lost its end."""
        path = self.path(described.object_id)
        path.write_bytes(path.read_bytes()[:size])

    def lose(self, described: ObjectDescriptor) -> None:
        """An object is gone."""
        self.path(described.object_id).unlink()

    def put(self, described: ObjectDescriptor, *, key: str | None = None) -> None:
        """A descriptor is there that should not be, or another one than should."""
        with self.metadata() as store:
            store.put(key or self.keys.descriptor(described.start), encode_descriptor(described))

    def put_bytes(self, start: int, data: bytes) -> None:
        """Something is there that is no descriptor."""
        with self.metadata() as store:
            store.put(self.keys.descriptor(start), data)

    def forget(self, described: ObjectDescriptor) -> None:
        """A descriptor is gone."""
        with self.metadata() as store:
            store.delete(self.keys.descriptor(described.start))

    def point(self, start: int) -> None:
        """The pointer to the newest object is another one."""
        with self.metadata() as store:
            store.put(self.keys.current, json.dumps({"start": f"{start:020d}"}).encode())

    # -- help -------------------------------------------------------------------------------

    def copy(self, described: ObjectDescriptor, tag: str = "0123abcd") -> str:
        """A good copy of an object, which nobody names; its name."""
        object_id = format_object_id(described.start, described.end, described.epoch, tag=tag)
        self.path(object_id).write_bytes(self.path(described.object_id).read_bytes())
        return object_id

    def overlap(self, described: ObjectDescriptor, by: int) -> ObjectDescriptor:
        """A descriptor that begins so much later than another one and ends with it."""
        start = described.start + by
        return replace(
            described,
            object_id=format_object_id(start, described.end, described.epoch),
            start=start,
            messages=described.end - start,
            offset_index=(),
            publish_time_index=(),
        )

    def stored(self, start: int) -> ObjectDescriptor:
        """The descriptor under a key."""
        with self.metadata() as store:
            found = store.get(self.keys.descriptor(start))
            assert found is not None
            return decode_descriptor(found.value, key=found.key)
