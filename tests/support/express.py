"""Topics that share express objects, without threads: a test decides when an object is written."""

from ister.bucket.names import EXPRESS_PREFIX
from ister.topic.express import Express
from tests.support.waiting import eventually


class Shared:
    """A log without threads of its own, with topics that share express objects."""

    def __init__(self, site, disk="a", *, topics=2, storage=None, **wal):
        self.site = site
        self.log = site.open(disk, storage=storage, **wal)
        self.express = Express(self.log.stores)
        self.topics = [self.open(f"/default/t{number}") for number in range(topics)]

    def open(self, name, **arguments):
        topic = self.log.topic(name, create=True, ack="tiered", **arguments)
        topic.bucket.uploads.begin_term()
        self.express.add(topic.bucket.uploads)
        return topic

    def append(self, number, *payloads):
        topic = self.topics[number]
        for payload in payloads:
            offset = topic.append(payload)
        topic.wait(offset, level="synced")
        # The thread that has synced it says so to waiting callers first.
        eventually(lambda: topic.bucket.uploads in self.express._waiting)
        return offset

    def formats(self, number):
        catalog = self.topics[number].bucket.owned.catalog
        return [(d.start, d.end, d.format) for d, _ in catalog.descriptors()]

    def read(self, number):
        topic = self.topics[number]
        end = topic.watermarks.tiered
        return [m.payload for m in topic.read(start="earliest", end=end)]

    def objects(self):
        """The keys of all express objects."""
        return [info.key for info in self.site.objects.list(EXPRESS_PREFIX)]

    def fill(self, *sizes, number=0, first=0):
        """Runs of so many messages each, with consecutive payloads."""
        for size in sizes:
            self.append(number, *(b"message %d" % (first + at) for at in range(size)))
            assert not self.express.write_next()
            first += size
