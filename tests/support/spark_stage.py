"""A data directory that jobs work on without Spark, and what its bucket and its metadata have."""

import json
from contextlib import contextmanager

import ister
from ister.base.clock import SystemClock
from ister.base.model import TopicName
from ister.bucket.names import TopicKeys, object_key, objects_prefix
from ister.spark.jobs.compact_job import compact
from ister.spark.jobs.gc_job import collect_topics, gc
from ister.spark.jobs.job import open_job
from tests.integration.spark_topics import SparkPlace, fill, rows_in, rows_of
from tests.support.clock import ManualClock
from tests.support.grace import without_least_grace
from tests.support.spark_here import SparkHere

A = "/default/a"
SPARK = SparkHere()


def upload(topic, uploads, *, each=40):
    """So many objects of so many messages each."""
    for _ in range(uploads):
        fill(topic, each, first=topic.next_offset)
        topic.upload()


class Stage:
    """See the module header; topics are open only while a test opens them.

    Args:
        root: An empty directory.
        storage: Settings below `storage`, by section.
    """

    def __init__(self, root, **storage):
        cloud = {"orphan_grace_minutes": 0, **storage.pop("cloud", {})}
        self.place = SparkPlace(root, cloud=cloud, **storage)
        self.clock = ManualClock(now_ms=SystemClock().now_ns() // 1_000_000)

    def fill(self, name=A, uploads=4, *, each=40):
        """More objects of a topic; its rows."""
        with self.place.open() as log:
            topic = log.topic(name, create=True)
            upload(topic, uploads, each=each)
            return rows_of(topic)

    def merge(self, name=A):
        """Four objects that one has replaced: garbage."""
        self.fill(name)
        with without_least_grace():
            assert self.compact(topics=name, grace_minutes=0).ok
        assert len(self.stored(name)) == 5

    # -- jobs ---------------------------------------------------------------------------------

    def compact(self, **settings):
        """Small objects are worth it."""
        settings = {"target_mb": 1, "min_objects": 2, "grace_minutes": 60} | settings
        return compact(SPARK, self.place.config, **settings)

    def gc(self, **more):
        return gc(SPARK, self.place.config, **more)

    def gc_at(self, *, dry_run=False, **more):
        """The same by this stage's own clock."""
        about = {"exclusive": lambda keys: keys.gc, "clock": self.clock}
        with open_job("gc", SPARK, self.place.config, dry_run=dry_run, **about) as job:
            collect_topics(job, job.topics(["*"]), **more)
        return job.report

    @contextmanager
    def metadata(self):
        """The metadata store, to be changed."""
        with open_job("test", SPARK, self.place.config) as job:
            yield job.store

    # -- what there is ------------------------------------------------------------------------

    def rows(self, name=A):
        """What the bucket has of a topic."""
        with ister.open_bucket(self.place.config) as history:
            return rows_in(history.topic(name).read_arrow().read_all())

    def descriptors(self, name=A):
        with ister.open_bucket(self.place.config) as history:
            return [d for d, _ in history.topic(name).catalog.descriptors()]

    def ids(self, name=A):
        return [described.object_id for described in self.descriptors(name)]

    def path(self, object_id, name=A):
        return self.place.root / "objects" / object_key(TopicName.parse(name), object_id)

    def stored(self, name=A):
        """The names of the files of a topic's objects, sorted."""
        folder = self.place.root / "objects" / objects_prefix(TopicName.parse(name))
        return sorted(path.name for path in folder.iterdir()) if folder.exists() else []

    def named(self, name=A):
        """The objects that descriptors name, sorted; each has to be there.

        Read as JSON, without the code of any job.
        """
        prefix = TopicKeys("/danube", TopicName.parse(name)).objects
        with ister.open_bucket(self.place.config) as history:
            found = [json.loads(item.value) for item in history.metadata.range(prefix)]
        described = [one for one in found if "object_id" in one]
        for one in described:
            size = self.path(one["object_id"], name).stat().st_size
            assert size == one["size"], one["object_id"]
        return sorted(one["object_id"] for one in described)

    def everything(self):
        """All of the bucket and of the metadata, but for the pipeline's keys."""
        files = sorted(self.place.root.glob("objects/**/*"))
        with ister.open_bucket(self.place.config) as history:
            keys = [
                (item.key, item.value)
                for item in history.metadata.range("/danube/")
                if not item.key.startswith("/danube/pipeline/")
            ]
        return [(str(f), f.read_bytes()) for f in files if f.is_file()], keys
