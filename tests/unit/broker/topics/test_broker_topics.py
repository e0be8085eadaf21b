"""All topics of a broker: names, partitions, namespaces, bounds, moves, deletion."""

import asyncio

import msgspec
import pytest

from ister.base.clock import SystemClock
from ister.base.model import TopicName, TopicState
from ister.broker.topics.topics import ElsewhereError
from ister.bucket.names import term_key
from ister.errors import (
    AlreadyExistsError,
    CapacityError,
    ConflictError,
    FencedError,
    InvalidRequestError,
    NotFoundError,
    StoresDifferError,
    TopicNameError,
    UnavailableError,
)
from ister.subscription.policy import SubscriptionKind
from tests.support.broker import a_record, eventually, some_topics, take
from tests.support.cases import each
from tests.support.cluster import a_member
from tests.support.dispatch import ack
from tests.support.memory_metadata import MemoryMetadata

NAME = "/default/t"
EXCLUSIVE = SubscriptionKind.EXCLUSIVE


def keys_of(topics, text):
    """Everything in the metadata store that has a text in its key."""
    return [item.key for item in topics.records._metadata.range("/") if text in item.key]


async def make(topics, *names, is_reliable=True):
    return [await topics.get_or_create(name, is_reliable=is_reliable) for name in names]


# -- names ------------------------------------------------------------------------------------


@each("mode", ["memory", "local_only", "wal_cloud"])
async def test_names_are_compared_whole(tmp_path, mode):
    async with some_topics(tmp_path, mode=mode) as topics:
        await make(topics, "/default/t", "/default/t2", "/default/t-2")
        assert (await topics.get("/default/t")).name == "/default/t"
        assert topics.find_open("/default/t2").name == "/default/t2"
        for name in ("/default/t1", "/default/", "/default", "default/t", "/Default/t"):
            assert topics.find_open(name) is None
        with pytest.raises(NotFoundError):
            await topics.get("/default/t1")
        assert await topics.names.partitions("/default/t") == ["/default/t"]
        assert await topics.names.partitions("/default/t1") == []
        await topics.delete("/default/t")
        assert await topics.names.all() == {"/default/t2", "/default/t-2"}


@each("name", ["", "t", "/t", "//", "/default/", "/a/b/c", "/default/a.b", "/d/ü"])
async def test_what_is_no_name_is_refused_everywhere(tmp_path, name):
    async with some_topics(tmp_path, mode="memory") as topics:
        for call in (
            topics.get(name),
            topics.get_or_create(name, is_reliable=True),
            topics.names.partitions(name),
            topics.locate(name),
            topics.delete(name),
            topics.unload(name),
        ):
            with pytest.raises(TopicNameError):
                await call
        assert await topics.names.all() == set()


async def test_names_that_there_are_not_leave_nothing_behind(tmp_path):
    async with some_topics(tmp_path, mode="local_only") as topics:
        for number in range(50):
            with pytest.raises(NotFoundError):
                await topics.get(f"/default/none{number}")
        assert len(topics._locks) == 0
        assert len(topics.log._opening) == 0


# -- making -----------------------------------------------------------------------------------


async def test_a_topic_is_made_once_however_many_ask_at_once(tmp_path):
    async with some_topics(tmp_path) as topics:
        made = await asyncio.gather(
            *(topics.get_or_create(NAME, is_reliable=True) for _ in range(20))
        )
        assert len(set(map(id, made))) == 1
        assert len(topics.served) == 1
        got = await asyncio.gather(*(topics.get(NAME) for _ in range(20)))
        assert {id(one) for one in got} == {id(made[0])}


@each("is_reliable", [True, False])
async def test_how_a_topic_is_served_stays_as_it_was_made(tmp_path, is_reliable):
    async with some_topics(tmp_path) as topics:
        await make(topics, NAME, is_reliable=is_reliable)
        again = await topics.get_or_create(NAME, is_reliable=not is_reliable)
        assert again.is_reliable == is_reliable
    async with some_topics(tmp_path) as topics:
        assert (await topics.get(NAME)).is_reliable == is_reliable
        assert await topics.names.all() == {NAME}


async def test_topics_are_not_made_by_using_them_if_that_is_switched_off(tmp_path):
    settings = {"broker": {"auto_create_topics": False}}
    async with some_topics(tmp_path, settings, mode="memory") as topics:
        with pytest.raises(NotFoundError):
            await topics.get_or_create(NAME, is_reliable=True)
        made = await topics.get_or_create(NAME, is_reliable=True, is_implied=False)
        assert await topics.get_or_create(NAME, is_reliable=True) is made


async def test_there_are_at_most_so_many_topics_made_by_using_them(tmp_path):
    settings = {"broker": {"limits": {"max_topics": 2}}}
    async with some_topics(tmp_path, settings, mode="memory") as topics:
        await make(topics, "/default/a")
        await make(topics, "/default/b", is_reliable=False)
        for is_reliable in (True, False):
            with pytest.raises(CapacityError, match="max_topics"):
                await topics.get_or_create("/default/c", is_reliable=is_reliable)
        # Those that are there are served; an operator may make more.
        await make(topics, "/default/a", "/default/b")
        await topics.get_or_create("/default/c", is_reliable=True, is_implied=False)


async def test_a_namespace_has_to_be_there(tmp_path):
    async with some_topics(tmp_path, mode="memory") as topics:
        with pytest.raises(NotFoundError, match="namespace 'other' does not exist"):
            await topics.get_or_create("/other/t", is_reliable=True)
        await make(topics, "/system/t")
        await topics.names.create_namespace("other")
        await make(topics, "/other/t")


# -- partitions -------------------------------------------------------------------------------


async def test_partitions_are_in_the_order_of_their_numbers(tmp_path):
    async with some_topics(tmp_path, mode="memory") as topics:
        made = await topics.create_partitioned(NAME, 12, is_reliable=True)
        assert made == [f"{NAME}-part-{n}" for n in range(12)]
        assert await topics.names.partitions(NAME) == made
        assert await topics.names.partitions(f"{NAME}-part-3") == [f"{NAME}-part-3"]
        # Names that only look like it.
        await make(topics, f"{NAME}-part-x", f"{NAME}-part-01", f"{NAME}2-part-0")
        assert await topics.names.partitions(NAME) == made
        # More of them by growing alone: keys move to other partitions.
        for other in (11, 14):
            with pytest.raises(AlreadyExistsError, match=f"12 partitions, not {other}"):
                await topics.create_partitioned(NAME, other, is_reliable=True)
        assert await topics.names.partitions(NAME) == made
        more = await topics.create_partitioned(NAME, 14, is_reliable=True, is_growing=True)
        assert await topics.names.partitions(NAME) == more
        assert more[:12] == made
        with pytest.raises(NotFoundError):
            await topics.create_partitioned(f"{NAME}3", 2, is_reliable=True, is_growing=True)


async def test_partitions_whose_creation_was_cut_short_are_completed_by_the_same_call(
    tmp_path, monkeypatch
):
    """Goal: a call that is repeated after a failure is not refused for what it has left."""

    async with some_topics(tmp_path, mode="memory") as topics:
        make_one = topics.get_or_create

        async def failing(name, **how):
            if name.endswith("-part-1"):
                raise UnavailableError("no answer")
            return await make_one(name, **how)

        monkeypatch.setattr(topics, "get_or_create", failing)
        with pytest.raises(UnavailableError):
            await topics.create_partitioned(NAME, 4, is_reliable=True)
        monkeypatch.undo()
        made = await topics.create_partitioned(NAME, 4, is_reliable=True)
        assert await topics.names.partitions(NAME) == made
        assert len(made) == 4


@each("count", [0, -1, 1025])
async def test_a_number_of_partitions_has_bounds(tmp_path, count):
    async with some_topics(tmp_path, mode="memory") as topics:
        with pytest.raises(InvalidRequestError):
            await topics.create_partitioned(NAME, count, is_reliable=True)
        assert await topics.names.all() == set()


async def test_a_plain_topic_and_a_partitioned_one_exclude_each_other(tmp_path):
    async with some_topics(tmp_path, mode="memory") as topics:
        await topics.create_partitioned("/default/p", 2, is_reliable=True)
        with pytest.raises(AlreadyExistsError, match="2 partitions"):
            await topics.get_or_create("/default/p", is_reliable=True)
        await make(topics, "/default/q")
        with pytest.raises(AlreadyExistsError, match="without partitions"):
            await topics.get_or_create("/default/q-part-0", is_reliable=True)
        with pytest.raises(AlreadyExistsError):
            await topics.create_partitioned("/default/q", 2, is_reliable=True)
        # Exactly those.
        await make(topics, "/default/q2-part-0", "/default/pp")


async def test_deleting_a_partitioned_topic_deletes_all_of_it_and_nothing_else(tmp_path):
    async with some_topics(tmp_path, mode="memory") as topics:
        await topics.create_partitioned(NAME, 3, is_reliable=True)
        await make(topics, f"{NAME}2-part-0")
        await topics.delete(NAME)
        assert await topics.names.all() == {f"{NAME}2-part-0"}
        await make(topics, NAME)


# -- namespaces -------------------------------------------------------------------------------


async def test_namespaces(tmp_path):
    settings = {"broker": {"bootstrap_namespaces": ["boot"]}}
    async with some_topics(tmp_path, settings) as topics:
        assert await topics.names.namespaces() == ["boot", "default", "system"]
        await topics.names.create_namespace("own")
        for name in ("own", "default", "boot"):
            with pytest.raises(AlreadyExistsError):
                await topics.names.create_namespace(name)
        with pytest.raises(TopicNameError):
            await topics.names.create_namespace("no/name")
        await make(topics, "/own/b", "/own/a")
        await make(topics, "/boot/x", is_reliable=False)
        assert await topics.names.of_namespace("own") == ["/own/a", "/own/b"]
        assert await topics.names.of_namespace("boot") == ["/boot/x"]
        assert await topics.names.of_namespace("default") == []
        with pytest.raises(ConflictError, match="has 2 topics"):
            await topics.names.delete_namespace("own")
        for name in ("default", "system", "boot"):
            with pytest.raises(ConflictError):
                await topics.names.delete_namespace(name)
        await topics.delete("/own/a")
        await topics.delete("/own/b")
        await topics.names.delete_namespace("own")
        with pytest.raises(NotFoundError):
            await topics.names.of_namespace("own")
        with pytest.raises(NotFoundError):
            await topics.names.delete_namespace("own")


# -- bounds -----------------------------------------------------------------------------------


async def test_bounds_come_from_the_topic_then_the_namespace_then_the_settings(tmp_path):
    settings = {"broker": {"policies": {"max_publish_rate": 100, "max_message_size": 7}}}
    async with some_topics(tmp_path, settings) as topics:
        topic, other = await make(topics, "/default/t", "/default/u")
        [system] = await make(topics, "/system/t")
        assert topic.policies.max_publish_rate == topic.publish_rate.per_second == 100
        await topics.names.set_namespace_policies("default", {"max_publish_rate": 50})
        assert topic.policies.max_publish_rate == topic.publish_rate.per_second == 50
        assert system.policies.max_publish_rate == 100
        in_force = await topics.set_topic_policies("/default/t", {"max_publish_rate": 0})
        assert in_force.max_publish_rate == topic.publish_rate.per_second == 0
        assert in_force.max_message_size == 7
        assert other.policies.max_publish_rate == 50
        assert (await topics.names.namespace_policies("default")).max_publish_rate == 50
        assert (await topics.names.namespace_policies("system")).max_publish_rate == 100
        await topics.names.create_namespace("made")
        assert (await topics.names.namespace_policies("made")).max_message_size == 7
        for call in (
            topics.names.namespace_policies("none"),
            topics.names.set_namespace_policies("none", {}),
            topics.set_topic_policies("/default/none", {}),
        ):
            with pytest.raises(NotFoundError):
                await call
    # Kept.
    async with some_topics(tmp_path, settings) as topics:
        assert (await topics.get("/default/t")).policies.max_publish_rate == 0
        assert (await topics.get("/default/u")).policies.max_publish_rate == 50
        await topics.set_topic_policies("/default/t", {})
        assert (await topics.get("/default/t")).policies.max_publish_rate == 50


async def test_policies_that_change_while_a_topic_opens_reach_it(tmp_path, monkeypatch):
    async with some_topics(tmp_path) as topics:
        loop, opens = asyncio.get_running_loop(), topics._open_blocking

        def open_slowly(*arguments):
            found = opens(*arguments)
            change = topics.names.set_namespace_policies("default", {"max_publish_rate": 50})
            asyncio.run_coroutine_threadsafe(change, loop).result()
            return found

        monkeypatch.setattr(topics, "_open_blocking", open_slowly)
        [topic] = await make(topics, NAME)
        assert topic.policies.max_publish_rate == 50


# -- deletion ---------------------------------------------------------------------------------


@each("is_reliable", [True, False])
async def test_a_deleted_topic_leaves_nothing_and_one_made_again_starts_clean(
    tmp_path, is_reliable
):
    async with some_topics(tmp_path) as topics:
        [topic] = await make(topics, NAME, is_reliable=is_reliable)
        await make(topics, f"{NAME}2")
        await topics.set_topic_policies(NAME, {"max_publish_rate": 5})
        before = await topic.subscribe("s", EXCLUSIVE, "c", ())
        await topic.publish(a_record())
        outbox = topic.subscription("s").attach(before.id, ())
        await topics.delete(NAME)
        with pytest.raises(NotFoundError, match="deleted"):
            await asyncio.wait_for(outbox.take(), 60)
        assert topics.find_open(NAME) is None
        assert topics.consumers.find(before.id) is None
        # The log keeps a stone for the name, which says that it is gone.
        left = {*keys_of(topics, "/default/t")} - {"/danube/topics/default/t"}
        assert [key for key in left if "t2" not in key] == []
        with pytest.raises(NotFoundError):
            await topics.get(NAME)
        with pytest.raises(NotFoundError):
            await topics.delete(NAME)
        [again] = await make(topics, NAME)
        assert again.is_reliable
        assert again.subscriptions == {}
        assert again.topic.wal.next == 0
        assert again.policies.max_publish_rate == 0
        after = await again.subscribe("s", EXCLUSIVE, "c", ())
        assert after.id != before.id
        assert topics.find_open(f"{NAME}2") is not None


async def test_a_topic_deleted_twice_at_once_is_deleted_once(tmp_path):
    async with some_topics(tmp_path) as topics:
        await make(topics, NAME)
        outcomes = await asyncio.gather(
            topics.delete(NAME), topics.delete(NAME), return_exceptions=True
        )
        assert None in outcomes
        assert all(one is None or isinstance(one, NotFoundError) for one in outcomes), outcomes
        assert await topics.names.all() == set()


# -- unload, reopen ---------------------------------------------------------------------------


async def test_an_unloaded_topic_is_opened_again_with_everything(tmp_path):
    async with some_topics(tmp_path) as topics:
        [topic] = await make(topics, NAME)
        consumer = await topic.subscribe("s", EXCLUSIVE, "c", ())
        for number in range(5):
            assert await topic.publish(a_record(b"%d" % number)) == number
        dispatch = topic.subscription("s")
        outbox = dispatch.attach(consumer.id, ())
        await take(outbox, 5)
        ack(dispatch, 0)
        ack(dispatch, 3)
        dispatch.nack(1, delay_ms=None, reason="bad")
        await topics.unload(NAME)
        with pytest.raises(UnavailableError, match="moved"):
            await outbox.take()
        assert topics.served == []
        # Alone there is nobody else to have it.
        again = await topics.get(NAME)
        assert again is not topic
        assert topics.consumers.find(consumer.id) == consumer
        reborn = again.subscription("s")
        assert reborn.delivery.cursor == 1
        outbox = reborn.attach(consumer.id, ())
        assert await take(outbox, 3) == [(1, 2), (2, 1), (4, 1)]
        assert (await reborn.next_message(outbox, 2)).payload == b"2"
        assert await again.publish(a_record()) == 5


@each("mode, is_reliable", [("local_only", True), ("memory", True), ("memory", False)])
async def test_a_topic_whose_log_nobody_else_can_have_stays(tmp_path, mode, is_reliable):
    async with some_topics(tmp_path, mode=mode) as topics:
        topic = await topics.get_or_create(NAME, is_reliable=is_reliable)
        await topic.publish(a_record(b"kept"))
        if mode == "memory":
            with pytest.raises(ConflictError, match="gone"):
                await topics.unload(NAME)
            assert await topics.get(NAME) is topic
        else:
            await topics.unload(NAME)
        again = await topics.get(NAME)
        await again.publish(a_record())
        assert again.next_offset == 2


async def test_a_topic_that_cannot_be_handed_over_stays_with_this_broker(tmp_path, monkeypatch):
    async with some_topics(tmp_path) as topics:
        [topic] = await make(topics, NAME)
        await topic.publish(a_record())

        def fail(name, **more):
            raise UnavailableError("the bucket does not answer")

        with monkeypatch.context() as patch:
            patch.setattr(topics.log, "seal", fail)
            with pytest.raises(UnavailableError):
                await topics.unload(NAME)
        assert await (await topics.get(NAME)).publish(a_record()) == 1


async def test_what_came_in_is_counted_once_also_while_a_topic_closes(tmp_path, monkeypatch):
    async with some_topics(tmp_path) as topics:
        [topic] = await make(topics, NAME)
        await topic.subscribe("s", EXCLUSIVE, "c", ())
        for _ in range(3):
            await topic.publish(a_record(b"12"))
        counted = []
        [subscription] = topic.subscriptions.values()
        close = subscription.close

        async def look_and_close(*arguments, **named):
            counted.append((topics.messages_in, topics.bytes_in))
            await close(*arguments, **named)

        monkeypatch.setattr(subscription, "close", look_and_close)
        await topics.unload(NAME)
        assert [*counted, (topics.messages_in, topics.bytes_in)] == [(3, 6), (3, 6)]


async def test_a_topic_whose_writer_failed_is_opened_again(tmp_path, monkeypatch):
    async with some_topics(tmp_path) as topics:
        [topic] = await make(topics, NAME)
        consumer = await topic.subscribe("s", EXCLUSIVE, "c", ())
        await topic.publish(a_record(b"0"))
        outbox = topic.subscription("s").attach(consumer.id, ())
        await take(outbox, 1)
        kind = type(topic.topic)
        with monkeypatch.context() as patch:
            failed = topic.topic
            real = kind.state.fget
            patch.setattr(
                kind, "state", property(lambda t: TopicState.FAILED if t is failed else real(t))
            )
            assert not topic.is_usable
            assert topics.find_open(NAME) is None
            again = await topics.get(NAME)
            with pytest.raises(UnavailableError, match="reopened"):
                await outbox.take()
        assert again is not topic
        assert again.topic is not topic.topic
        assert topics.served == [again]
        assert await again.publish(a_record(b"1")) == 1
        outbox = again.subscription("s").attach(consumer.id, ())
        assert await take(outbox, 2) == [(0, 1), (1, 1)]


async def test_a_topic_that_turns_out_to_be_anothers_is_let_go_of(tmp_path, monkeypatch):
    settings = {"dispatch": {"progress_min_offset_delta": 1}}
    async with some_topics(tmp_path, settings) as topics:
        [topic] = await make(topics, NAME)
        consumer = await topic.subscribe("s", EXCLUSIVE, "c", ())
        await topic.publish(a_record())
        dispatch = topic.subscription("s")
        outbox = dispatch.attach(consumer.id, ())
        await take(outbox, 1)

        def fenced(*_, **__):
            raise FencedError("another has it")

        monkeypatch.setattr(topics.store, "save_cursor", fenced)
        ack(dispatch, 0)
        with pytest.raises(UnavailableError, match="another broker has the topic"):
            await asyncio.wait_for(outbox.take(), 60)
        await eventually(lambda: topics.served == [])
        monkeypatch.undo()


# -- where a topic is -------------------------------------------------------------------------


async def test_a_topic_is_looked_up_here_and_opened(tmp_path):
    async with some_topics(tmp_path) as topics:
        await make(topics, NAME)
        assert await topics.locate(NAME) == topics.cluster.own
        for call in (topics.locate, topics.unload):
            with pytest.raises(NotFoundError):
                await call(f"{NAME}2")
    async with some_topics(tmp_path) as topics:
        assert topics.find_open(NAME) is None
        assert await topics.locate(NAME) == topics.cluster.own
        assert topics.find_open(NAME) is not None


async def test_a_topic_is_left_to_the_broker_that_it_was_handed_over_to(tmp_path):
    async with some_topics(tmp_path) as topics:
        await make(topics, NAME)
        own = topics.cluster.own
        other = a_member("other", broker_url="http://o:1", connect_url="http://o:1")
        metadata = topics.log.stores.metadata
        metadata.put("/danube/cluster/brokers/other", msgspec.json.encode(other))
        topics.cluster.members.expire()
        await topics.unload(NAME)
        assert await topics.locate(NAME) == other
        assert await topics.is_elsewhere(NAME)
        for call in (topics.get(NAME), topics.get_or_create(NAME, is_reliable=True)):
            with pytest.raises(ElsewhereError, match="http://o:1: look it up again"):
                await call
        # The other one has ended: then it is here after all.
        metadata.delete("/danube/cluster/brokers/other")
        topics.cluster.members.expire()
        assert await topics.locate(NAME) == own
        assert (await topics.get(NAME)).name == NAME


# -- life -------------------------------------------------------------------------------------


async def test_everything_is_opened_at_the_start_and_one_bad_topic_keeps_nobody(
    tmp_path, monkeypatch, caplog
):
    async with some_topics(tmp_path) as topics:
        await make(topics, "/default/a", "/default/bad", "/default/c")
        await make(topics, "/default/n", is_reliable=False)
    async with some_topics(tmp_path) as topics:
        real = topics.log.topic

        def opened(name, **more):
            if name == "/default/bad":
                raise InvalidRequestError("this one is bad")
            return real(name, **more)

        monkeypatch.setattr(topics.log, "topic", opened)
        await topics.open_all()
        assert {one.name for one in topics.served} == {"/default/a", "/default/c", "/default/n"}
        assert "topic not opened" in caplog.text


async def test_topic_about_which_the_stores_differ_is_refused_and_named_until_they_agree(
    tmp_path, caplog
):
    later = term_key(TopicName.parse(NAME), 99, "a1b2-c3d4")

    async with some_topics(tmp_path) as topics:
        await make(topics, NAME)
    async with some_topics(tmp_path) as topics:
        objects = topics.log.stores.objects
        objects.put(later, b"{}")
        for _ in range(3):
            with pytest.raises(UnavailableError, match="epoch 99") as refused:
                await topics.get(NAME)
            assert isinstance(refused.value.__cause__, StoresDifferError)
        assert "ister metadata accept" in topics.unopened[NAME]
        assert caplog.text.count("topic not opened") == 1
        objects.delete(later)
        await topics.get(NAME)
        assert topics.unopened == {}


async def test_while_it_ends_nothing_is_opened_and_cursors_are_written(tmp_path):
    async with some_topics(tmp_path) as topics:
        topic, _ = await make(topics, NAME, f"{NAME}2")
        consumer = await topic.subscribe("s", EXCLUSIVE, "c", ())
        await topic.publish(a_record())
        dispatch = topic.subscription("s")
        outbox = dispatch.attach(consumer.id, ())
        await take(outbox, 1)
        ack(dispatch, 0)
        await topics.close()
        with pytest.raises(UnavailableError, match="shutting down"):
            await outbox.take()
        for call in (topics.get(NAME), topics.get_or_create("/default/n", is_reliable=True)):
            with pytest.raises(UnavailableError, match="shutting down"):
                await call
        assert topics.store.load(topic.parsed, topic.incarnation)["s"].cursor == 1


@each("level", ["synced", "written"])
async def test_cursor_beyond_the_files_tells_that_they_are_an_older_copy(tmp_path, level):
    """Goal: the loss is named before the cursor is clipped; at lower levels a crash explains it."""
    metadata = MemoryMetadata(SystemClock())
    files = tmp_path / "data" / "wal" / "default" / "t"

    def opened():
        settings = {"storage": {"ack": level}}
        return some_topics(tmp_path, settings, mode="local_only", metadata=metadata)

    async with opened() as topics:
        [topic] = await make(topics, NAME)
        consumer = await topic.subscribe("s", EXCLUSIVE, "c", ())
        dispatch = topic.subscription("s")
        for _ in range(2):
            await topic.publish(a_record())
        await take(dispatch.attach(consumer.id, ()), 2)
        for offset in range(2):
            ack(dispatch, offset)
    for path in (*files.glob("wal.*"), files.parents[1] / ".heads"):
        path.unlink()
    state = TopicState.QUARANTINED if level == "synced" else TopicState.OPEN
    for _ in range(2):
        async with opened() as topics:
            topic = await topics.get(NAME)
            assert topic.topic.state is state
            cursors = topics.store.load(topic.parsed, topic.incarnation)
            assert cursors["s"].cursor == (2 if level == "synced" else 0)
