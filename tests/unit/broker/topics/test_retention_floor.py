"""A subscription keeps what it has yet to read while somebody consumes it, and for a while."""

import asyncio

from ister.subscription.policy import SubscriptionKind
from tests.support.broker import a_record, eventually, some_topics, take
from tests.support.cases import each
from tests.support.dispatch import ack

NAME = "/default/t"
GRACE_SECONDS = 3600


def settings(grace_seconds=GRACE_SECONDS, **limits):
    limits = limits or {"time_minutes": None, "size_mb": 0}
    retention = {**limits, "active_subscription_grace_seconds": grace_seconds}
    return {"storage": {"wal": {"rotate_max_bytes": 4096, "retention": retention}}}


async def filled(topics, *, count=5, uploads=True):
    """A topic with a file for each message, and a subscription at its beginning."""
    served = await topics.get_or_create(NAME, is_reliable=True)
    await served.subscribe("slow", SubscriptionKind.SHARED, "one", (), "earliest")
    for number in range(count):
        await served.publish(a_record(b"%d" % number + b"." * 5000))
    if uploads and served.topic.bucket is not None:
        await asyncio.to_thread(served.topic.upload)
    return served


async def trim(topics):
    return await asyncio.to_thread(topics.log.trim, NAME)


@each("mode", ["wal_cloud", "local_only"])
async def test_connected_consumer_keeps_its_floor_however_slow_it_is(tmp_path, mode):
    async with some_topics(tmp_path, settings(grace_seconds=0), mode=mode) as topics:
        served = await filled(topics)
        dispatch = served.subscriptions["slow"]
        outbox = dispatch.attach(1, ())
        await take(outbox, 5)
        # No cursor moves, and the grace period is over.
        assert await trim(topics) == 0
        ack(dispatch, 0)
        ack(dispatch, 1)
        await eventually(lambda: dispatch.delivery.cursor == 2)
        assert await trim(topics) == 2
        assert served.topic.watermarks.trimmed == 2
        await dispatch.flush()
        dispatch.detach(outbox)
        await asyncio.sleep(0)

        async def is_trimmed():
            # Again and again: in the millisecond of its last activity it counts as active.
            await trim(topics)
            return served.topic.watermarks.trimmed > 2

        await eventually(is_trimmed)


def let_time_pass(dispatch):
    dispatch._active_at -= GRACE_SECONDS + 1
    dispatch._cursor.moved_at -= GRACE_SECONDS + 1


async def test_subscription_that_was_active_lately_keeps_its_floor(tmp_path):
    async with some_topics(tmp_path, settings(), mode="local_only") as topics:
        served = await filled(topics)
        dispatch = served.subscriptions["slow"]
        assert await trim(topics) == 0, "it has just been made"
        let_time_pass(dispatch)
        outbox = dispatch.attach(1, ())
        dispatch.detach(outbox)
        assert await trim(topics) == 0, "its consumer was there a moment ago"
        let_time_pass(dispatch)
        assert await trim(topics) == 4
        assert served.topic.earliest == served.topic.watermarks.trimmed == 4


async def test_without_subscriptions_the_limits_alone_count(tmp_path):
    async with some_topics(tmp_path, settings(), mode="local_only") as topics:
        served = await filled(topics)
        await served.unsubscribe("slow")
        assert await trim(topics) == 4


async def test_by_floors_a_file_goes_only_if_all_of_the_documents_conditions_hold(tmp_path):
    """Goal: uploaded, read by active subscriptions, old enough, and the log is large enough."""

    # Four rotated files of about 5,000 bytes each, and the active one.
    floors = {"min_minutes": 0, "min_bytes": 13_000}
    async with some_topics(tmp_path, settings(**floors), mode="wal_cloud") as topics:
        served = await filled(topics, uploads=False)
        dispatch = served.subscriptions["slow"]
        let_time_pass(dispatch)
        assert await trim(topics) == 0, "nothing is uploaded"
        await asyncio.to_thread(served.topic.upload)
        outbox = dispatch.attach(1, ())
        await take(outbox, 5)
        assert await trim(topics) == 0, "an active subscription has not read it"
        ack(dispatch, 0)
        await eventually(lambda: dispatch.delivery.cursor == 1)
        await dispatch.flush()
        assert await trim(topics) == 1
        for offset in range(1, 5):
            ack(dispatch, offset)
        await eventually(lambda: dispatch.delivery.cursor == 5)
        await dispatch.flush()
        # 20,000 bytes are left; 15,000 and then 10,000.
        assert await trim(topics) == 2
        assert served.topic.watermarks.trimmed == 3
        assert await trim(topics) == 0, "the log is not above the floor"


async def test_by_floors_a_large_log_keeps_what_is_young(tmp_path):
    floors = {"min_minutes": 60, "min_bytes": 0}
    async with some_topics(tmp_path, settings(**floors), mode="wal_cloud") as topics:
        served = await filled(topics)
        await served.unsubscribe("slow")
        assert await trim(topics) == 0
