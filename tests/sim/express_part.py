"""Express objects in a `TierWorld`: topics that share objects, and the rules for these objects.

In such a world the nodes write two or three topics, of which at least one shares express objects.
Objects are gathered, put and committed one after the other or two at a time; any process that has
garbage to look for collects, also in the middle of its own writing. Owners re-sort their runs into
objects of the topic; a pipeline merges runs, and collects as well.

What is checked beside the promises of each topic, at the moment at which it happens (`Sharing`):

- a run is committed only under the lease that its process had when the object was put, and while
  the object is there;
- an object is removed only if no descriptor names it, no replaced run is kept for readers, its
  grace period is over, and its process has ended, or is the one that removes it and not about to
  commit it;
- every committed run is in its object's footer, with its topic and its offsets;
- from the bucket alone, everything that is tiered can be recovered, and no run of a topic of the
  same name that was deleted;
- when the faults are over, everything is tiered, objects that nobody needs go, and re-sorting
  leaves no run and no express object.

Nothing here uses the code under test, except to decode records; footers are read by hand.
"""

from __future__ import annotations

import json
import random
import struct
import zlib
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import ister.bucket.express
from ister.base.clock_guard import STEP_SECONDS
from ister.base.metrics import Metrics
from ister.base.model import Codec, TopicName
from ister.bucket.express import find_runs
from ister.bucket.express_collection import collect_express
from ister.bucket.names import EXPRESS_PREFIX, TopicKeys, manifest_key, object_key
from ister.bucket.trust import Trust
from ister.errors import (
    ClosedError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    IsterError,
    UnavailableError,
)
from ister.format.descriptor import FORMAT_EXPRESS, ObjectDescriptor
from ister.format.frame import scan_frames
from ister.format.records import decode_retired, decode_topic
from ister.metadata.base import Operation, Put
from ister.objectstore.slices import with_slices
from ister.rescue.rebuild import find_topics, rebuild_topic
from ister.topic.express import Express, ExpressBatch
from ister.topic.message import MessageBatch
from ister.topic.topic import Topic
from tests.sim.world import BrokenPromiseError
from tests.support.memory_metadata import MemoryMetadata
from tests.support.memory_store import MemoryObjectStore

if TYPE_CHECKING:
    from tests.sim.tier_world import Node, Process, TierWorld, View

_TRAILER: Final = struct.Struct("<QQII8s")
_NODES: Final = "/danube/cluster/nodes/"
GATHERED_MAX: Final = 2


class Rounds:
    """Has a log's topics share objects, as the background does, and one after the other."""

    def __init__(self, express: Express) -> None:
        self.express = express
        self.on_their_way: deque[tuple[ExpressBatch, IsterError | None]] = deque()
        self.under_way: set[str] = set()
        """Keys of objects that are gathered and not yet committed, or given up."""

    def add(self, topic: Topic) -> None:
        """A topic was opened."""
        if topic.bucket is not None:
            self.express.add(topic.bucket.uploads)

    def remove(self, topic: Topic) -> None:
        """It was closed."""
        if topic.bucket is not None:
            self.express.remove(topic.bucket.uploads)

    def stop(self) -> None:
        """The log is closed; so are its topics."""
        self.express.stop()
        while self.on_their_way:
            self.commit()

    def begin(self) -> bool:
        """Gathers an object and puts it; whether there was anything."""
        batch = self.express.gather()
        if batch is None:
            return False
        self.under_way.add(batch.made.key)
        self.on_their_way.append((batch, self.express.put(batch)))
        return True

    def commit(self) -> None:
        """Commits the object that was put first."""
        batch, error = self.on_their_way.popleft()
        self.express.commit(batch, error)
        self.under_way.discard(batch.made.key)


def read_run(store: MemoryObjectStore, key: str) -> tuple[bytes, bytes] | None:
    """The whole object that a key names a part of, and that part; None if there is none."""
    name, _, place = key.partition("@")
    entry = store._objects.get(name)
    if entry is None:
        return None
    if not place:
        return entry.data, entry.data
    position, length = map(int, place.split("+"))
    return entry.data, entry.data[position : position + length]


def check_footer(data: bytes, topic: TopicName, described: ObjectDescriptor) -> None:
    """Makes sure that an express object's footer has a run.

    Raises:
        BrokenPromiseError: It has not.
    """
    position, length, crc, _, magic = _TRAILER.unpack(data[-_TRAILER.size :])
    footer = data[position : position + length]
    if magic != b"ISTERDNX" or zlib.crc32(footer) != crc:
        raise BrokenPromiseError(f"{described.object_id}: not a footer: {footer[:80]!r}")
    last = described.end - 1
    wanted = (str(topic), described.start, last, described.epoch, described.incarnation)
    for run in json.loads(footer)["runs"]:
        found = tuple(
            run[field] for field in ("topic", "start_offset", "end_offset", "epoch", "incarnation")
        )
        place = f"{run['object_id']}@{run['position']}+{run['length']}"
        if place == described.object_id:
            if found != wanted:
                raise BrokenPromiseError(f"{described.object_id}: the footer says {found}")
            return
    raise BrokenPromiseError(f"{described.object_id} is not in its object's footer")


class Sharing:
    """See the module header."""

    def __init__(self, world: TierWorld, rng: random.Random, *, judges: bool = True) -> None:
        self._world = world
        self.rng = rng
        self._judges = judges
        """Off where stores go back, to which other rules apply."""
        self.topics_per_transaction = rng.choice((1, 2, 40))
        self.max_bytes = rng.choice((1, 2000, 65536))
        self.puts: dict[str, int | None] = {}
        """By key: the revision of its process's key when it was put."""
        self.incarnations: dict[bytes, str] = {}
        """By payload: the topic that it was sent to."""
        self.lost_manifests: set[TopicName] = set()
        """Of topics whose manifest a deletion of their predecessor has removed."""
        self.removed = 0
        self.recovered = 0
        self.resorted = 0
        real = world.meta._apply

        def apply(operations: Sequence[Operation]) -> None:
            self._check_commits(operations)
            real(operations)

        if judges:
            world.meta._apply = apply

    # -- processes --------------------------------------------------------------------------

    def open(self, process: Process) -> None:
        """A process begins, without threads of its own."""
        express = Express(process.log.stores)
        express._settings = replace(express._settings, max_bytes=self.max_bytes)
        process.rounds = process.log._background = Rounds(express)

    def use_transactions(self, count: int | None = None) -> None:
        """How many topics are committed at once; None for what the code has."""
        ister.bucket.express.TOPICS_PER_TRANSACTION = count or 40

    def write(self, process: Process) -> None:
        """Objects of what waits: one, as many as it takes, or half of one."""
        rounds, chance = process.rounds, self.rng.random()
        if chance < 0.3 and len(rounds.on_their_way) < GATHERED_MAX:
            rounds.begin()
        elif chance < 0.5 and rounds.on_their_way:
            rounds.commit()
        else:
            self.drain(process, rounds_max=self.rng.randrange(1, 4))

    def drain(self, process: Process, *, rounds_max: int = 100) -> None:
        """Has what waits committed, with what is on its way."""
        rounds = process.rounds
        for _ in range(rounds_max):
            is_new = rounds.begin()
            while rounds.on_their_way:
                rounds.commit()
            if not is_new:
                return

    def collect(self, process: Process) -> None:
        """Garbage goes; what goes is checked when it does."""
        process.rounds.express.collect()

    def resort(self, topic: Topic, *, groups_max: int) -> None:
        """Some of a topic's runs become objects of its own."""
        while groups_max and topic.bucket.uploads.resort() is not None:
            self.resorted += 1
            groups_max -= 1

    def beside(self, process: Process) -> None:
        """What another thread of a process does while it writes an object."""
        if process.rounds is None or self.rng.random() < 0.5:
            return
        if self.rng.random() < 0.5:
            process.rounds.express.collect()
            return
        opened = [state.topic for state in process.states.values() if state.topic is not None]
        if opened:
            try:
                self.rng.choice(opened).upload()
            except InvalidRequestError:
                self._world.trace("beside: waits until the term has begun")
            except (ClosedError, ConflictError, FencedError, UnavailableError) as error:
                self._world.trace(f"beside: {error!r}")

    def collect_outside(self) -> None:
        """What a pipeline does for topics that nobody has open."""
        world = self._world
        if Trust(world.store, world.meta, "/danube", world.clock).check():
            return
        collect_express(
            with_slices(world.store),
            world.meta,
            "/danube",
            grace_seconds=world.config.storage.cloud.orphan_grace_minutes * 60,
            clock=world.clock,
            metrics=Metrics(),
        )

    # -- rules ------------------------------------------------------------------------------

    def _running(self) -> dict[str, int]:
        """The processes that have a lease, with the revisions of their keys."""
        return {
            json.loads(entry.value)["instance"]: entry.revision
            for key, entry in self._world.meta._entries.items()
            if key.startswith(_NODES) and key.endswith("/process")
        }

    def note_put(self, key: str) -> None:
        """An object was put."""
        if not self._judges:
            return
        self.lost_manifests -= {v.name for v in self._world.views if key == manifest_key(v.name)}
        if key.startswith(EXPRESS_PREFIX):
            with self._world._quietly():
                self._world.meta.get(_NODES)  # leases that are over end here
            self.puts[key] = self._running().get(key.split("/")[3])

    def _check_commits(self, operations: Sequence[Operation]) -> None:
        for operation in operations:
            if not isinstance(operation, Put) or not _is_descriptor(operation.key):
                continue
            name = json.loads(operation.value)["object_id"]
            if not name.endswith(".dnbx"):
                continue
            key = EXPRESS_PREFIX + name
            if key not in self._world.store._objects:
                raise BrokenPromiseError(f"{key} is committed and does not exist")
            is_adopted = self._world.at.text in self._world.adopting
            if not is_adopted and self.puts[key] != self._running().get(name.split("/")[1]):
                raise BrokenPromiseError(f"{key} is committed under another lease than it was put")

    def note_delete(self, key: str) -> None:
        """An object was removed."""
        if not self._judges:
            return
        deleting = []
        for view in self._world.views:
            found = self._world.meta._entries.get(view.seen.keys.record)
            record = None if found is None else decode_topic(found.value, key="")
            is_open = record is not None and record.is_open
            if key == manifest_key(view.name) and is_open:
                self.lost_manifests.add(view.name)
            if record is not None and not is_open:
                deleting.append(view.seen.keys.objects)
        if not key.startswith(EXPRESS_PREFIX) or key not in self.puts:
            return
        world, name = self._world, key.removeprefix(EXPRESS_PREFIX)
        self.removed += 1
        with world._quietly():
            world.meta.get(_NODES)
        for at, entry in world.meta._entries.items():
            # A topic that is being deleted is not read again; its descriptors go last.
            if not _is_descriptor(at) or at.startswith(tuple(deleting)):
                continue
            if json.loads(entry.value)["object_id"] == name:
                raise BrokenPromiseError(f"{key} was removed, and {at} names it")
        # Smaller steps of the clock than these are corrections.
        if name in self._kept_for_readers(STEP_SECONDS + 1):
            raise BrokenPromiseError(f"{key} was removed, and readers may need it")
        grace_minutes = world.config.storage.cloud.orphan_grace_minutes
        world._check_age(key, world.made.get(key), grace_minutes * 60)
        writer = name.split("/")[1]
        remover = world._running[-1] if world._running else None
        rounds = remover.rounds if remover is not None else None
        if rounds is not None and rounds.express._stores.membership.instance == writer:
            if key in rounds.under_way:
                raise BrokenPromiseError(f"{key} was removed while it is committed")
        elif self.puts[key] is not None and self._running().get(writer) == self.puts[key]:
            # One that has lost its lease since, and is back, cannot commit the object.
            raise BrokenPromiseError(f"{key} was removed, and its process runs")

    def _kept_for_readers(self, margin_seconds: float) -> set[str]:
        """The objects of runs that were replaced and have to stay for so much longer."""
        world = self._world
        now = (world.clock.now_ns() // 1_000_000 - world.wrong_ms) / 1000
        found = [
            decode_retired(entry.value, key=key)
            for key, entry in world.meta._entries.items()
            if "/retired/" in key
        ]
        return {
            run.partition("@")[0]
            for retired in found
            for run in retired.objects
            if retired.until > now + margin_seconds
        }

    # -- what the bucket alone has ----------------------------------------------------------

    def check_recoverable(self, view: View) -> None:
        """Whether the metadata of a topic could be rebuilt now."""
        world, seen, topic = self._world, view.seen, view.name
        if seen.rotten or not seen.is_open:
            return
        self.recovered += 1
        store = with_slices(world.store)
        found = find_topics(store)
        owed = {o: p for o, p in seen.promises.tiered.items() if o >= seen.promises.expired}
        if topic not in found and topic in self.lost_manifests:
            return  # until its owner looks for it
        if owed and topic not in found:
            raise BrokenPromiseError(f"{topic} cannot be found without metadata")
        report = rebuild_topic(
            store,
            MemoryMetadata(world.clock),
            TopicKeys("/danube", topic),
            found.get(topic, []),
            runs=find_runs(store, on_damage=_refuse_damage).runs_of(topic),
            clock=world.clock,
            dry_run=True,
        )
        held: dict[int, bytes] = {}
        for described in report.objects:
            held.update(self._messages(topic, described))
        for offset, payload in owed.items():
            if held.get(offset) != payload:
                raise BrokenPromiseError(
                    f"without metadata {offset} would be {held.get(offset, b'gone')[:20]!r}, "
                    f"and was {payload[:20]!r}"
                )
        for described in report.objects:
            if described.format == FORMAT_EXPRESS:
                self._check_own(seen.record.incarnation, self._messages(topic, described))

    def _check_own(self, incarnation: str, messages: dict[int, bytes]) -> None:
        for offset, payload in messages.items():
            if self.incarnations.get(payload) != incarnation:
                raise BrokenPromiseError(f"{offset}, {payload[:20]!r}, would come back")

    def _messages(self, topic: TopicName, described: ObjectDescriptor) -> dict[int, bytes]:
        found = read_run(self._world.store, object_key(topic, described.object_id))
        data = b"" if found is None else found[1]
        scan = scan_frames(data, expected_offset=described.start)
        if not scan.starts:
            return {}  # half-written, and not committed
        ends = [*scan.starts[1:], scan.end]
        codec = described.codec or Codec.BINCODE2
        return {
            message.offset: message.payload
            for message in MessageBatch(data, scan.starts, ends, described.start, codec)
        }

    def check_end(self, processes: Sequence[Process]) -> None:
        """Nothing stays that nobody needs."""
        world = self._world
        for process in processes:
            with world._running_as(process):
                found = process.rounds.express.collect()
            if found is None or found.errors:
                raise BrokenPromiseError(f"express objects are not collected: {found}")
        # A clock that was wrong may have dated them years ahead.
        needed = self._kept_for_readers(0) | {
            described.object_id.partition("@")[0]
            for view in world.views
            for described in view.seen.described.values()
        }
        there = [key.removeprefix(EXPRESS_PREFIX) for key in world.store.keys()]  # noqa: SIM118
        garbage = [name for name in there if name.endswith(".dnbx") and name not in needed]
        if garbage:
            raise BrokenPromiseError(f"express objects that nobody needs: {garbage}")

    def check_resort(self, homes: Sequence[Node]) -> None:
        """After a while there are no runs any more, and no express objects."""
        world = self._world
        world._advance(world.config.storage.uploader.express.resort_seconds + 1)
        for view, home in zip(world.views, homes, strict=True):
            with world._viewing(view):
                self.resort(home.process.topic, groups_max=1000)
                world.look()
                runs = [d for d in view.seen.described.values() if d.format == FORMAT_EXPRESS]
                if runs:
                    raise BrokenPromiseError(f"not re-sorted: {runs}")
        world._pass_grace()
        self.check_end([node.process for node in world.nodes if node.process is not None])


def _is_descriptor(key: str) -> bool:
    return "/objects/" in key and key[-1].isdigit()


def _refuse_damage(error: IsterError) -> None:
    raise BrokenPromiseError(f"a footer is damaged: {error}")
