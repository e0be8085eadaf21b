"""Searches for a time: few at once, bounded, ended with their callers, apart from sends."""

import asyncio
import threading

import pytest

from ister.base.limits import KIB, MIB
from ister.base.metrics import Metrics
from ister.base.positions import time_of
from ister.broker.topics.time_searches import TimeSearches
from ister.errors import CapacityError, InvalidRequestError, NotFoundError, UnavailableError
from ister.subscription.policy import SubscriptionKind
from ister.wire import ister_api
from tests.support.broker import a_broker, eventually

NOW = 1_700_000_000_000
LATER = NOW + 1_000_000


class Endless:
    """A search that reads chunk after chunk until it is told to end."""

    def __init__(self):
        self.chunks = 0
        self.began = threading.Event()
        self.error = None

    def __call__(self, on_read):
        self.began.set()
        try:
            while True:
                on_read(1)
                self.chunks += 1
        except Exception as error:
            self.error = error
            raise


def made(**options):
    return TimeSearches(Metrics(), **options)


async def test_answers_and_errors_come_back():
    searches = made()
    assert await searches.run(lambda on_read: 7) == 7
    assert searches.run_blocking(lambda on_read: 8) == 8

    def fail(on_read):
        raise NotFoundError("none")

    with pytest.raises(NotFoundError):
        await searches.run(fail)
    with pytest.raises(NotFoundError):
        searches.run_blocking(fail)
    assert searches.count == 0
    searches.close()
    with pytest.raises(UnavailableError):
        await searches.run(fail)


async def test_a_search_ends_with_its_caller():
    searches = made()
    search = Endless()
    asking = asyncio.ensure_future(searches.run(search))
    await asyncio.to_thread(search.began.wait)
    asking.cancel()
    await eventually(lambda: searches.count == 0)
    assert isinstance(search.error, UnavailableError)
    # In a thread, by asking whether anybody waits.
    gone, second = threading.Event(), Endless()
    thread = asyncio.ensure_future(
        asyncio.to_thread(searches.run_blocking, second, is_gone=gone.is_set)
    )
    await asyncio.to_thread(second.began.wait)
    gone.set()
    with pytest.raises(UnavailableError):
        await thread
    await eventually(lambda: searches.count == 0)
    searches.close()


async def test_few_run_at_once_and_some_wait():
    searches = made(threads=2, waiting_max=4, per_caller_max=3)
    running = [Endless() for _ in range(2)]
    asking = [asyncio.ensure_future(searches.run(one, caller="a")) for one in running]
    for one in running:
        await asyncio.to_thread(one.began.wait)
    third = Endless()
    asking.append(asyncio.ensure_future(searches.run(third, caller="a")))
    await eventually(lambda: searches.count == 3)
    with pytest.raises(CapacityError):
        await searches.run(Endless(), caller="a")
    asking.append(asyncio.ensure_future(searches.run(Endless(), caller="b")))
    await eventually(lambda: searches.count == 4)
    with pytest.raises(CapacityError):
        await searches.run(Endless(), caller="c")
    assert not third.began.is_set()
    for one in asking:
        one.cancel()
    await eventually(lambda: searches.count == 0)
    assert not third.began.is_set()
    searches.close()


def test_a_search_is_bounded_and_counted():
    metrics = Metrics()
    searches = TimeSearches(metrics, bytes_max=100)
    with pytest.raises(InvalidRequestError, match="searched"):
        searches.run_blocking(Endless())
    numbers = metrics.snapshot()
    assert numbers["broker.time_searches_total"] == 1
    assert numbers["broker.time_search_bytes_total"] == 101
    assert numbers["broker.time_searches"] == 0
    searches.close()


async def test_an_end_ends_all_searches():
    searches = made(threads=1)
    first, second = Endless(), Endless()
    asking = [asyncio.ensure_future(searches.run(one)) for one in (first, second)]
    await asyncio.to_thread(first.began.wait)
    await asyncio.to_thread(searches.close)
    for one in asking:
        with pytest.raises(UnavailableError):
            await one
    assert not second.began.is_set()


def filled(topic, times, size=100):
    for time in times:
        topic.append(b"x" * size, publish_time=time)
    topic.flush()


async def test_the_index_spares_a_search_what_is_older(tmp_path):
    """Goal: one block of a large file is read, wherever the time is."""

    async with a_broker(tmp_path) as (broker, _services, _):
        topic = (await broker.topics.get_or_create("/default/t", is_reliable=True)).topic
        for time in range(40):
            topic.append(b"x" * 256 * KIB, publish_time=NOW + time)
        topic.flush()
        for wanted in (0, 20, 39):
            sizes = []
            found = topic.find_time(NOW + wanted, 0, 40, on_read=sizes.append)
            assert found == wanted
            assert sum(sizes) <= 2 * MIB
        sizes = []
        assert topic.find_time(NOW + 30, 10, 40, on_read=sizes.append) == 30
        assert sum(sizes) <= 2 * MIB


async def test_a_range_behind_a_message_of_the_future_is_searched_chunk_by_chunk(tmp_path):
    """Goal: where the index cannot tell, a search can be ended at every chunk."""

    async with a_broker(tmp_path) as (broker, _services, _):
        topic = (await broker.topics.get_or_create("/default/t", is_reliable=True)).topic
        filled(topic, [LATER])
        for _ in range(30):
            topic.append(b"x" * 256 * KIB, publish_time=NOW)
        topic.flush()
        sizes = []
        assert topic.find_time(NOW + 1, 1, 31, on_read=sizes.append) is None
        assert len(sizes) > 1
        assert topic.find_time(NOW + 1, 0, 31) == 0
        assert topic.find_time(NOW, 5, 31) == 5

        def stop(size):
            raise UnavailableError("enough")

        with pytest.raises(UnavailableError):
            topic.find_time(NOW + 1, 1, 31, on_read=stop)


async def test_seeks_and_subscriptions_search_on_threads_of_their_own(tmp_path):
    """Goal: searches that hang keep no thread that sends and cursors need."""

    async with a_broker(tmp_path) as (broker, services, _):
        served = await broker.topics.get_or_create("/default/t", is_reliable=True)
        filled(served.topic, [NOW, NOW + 10])
        await served.subscribe("s", SubscriptionKind.SHARED, "c", (), "earliest")
        names = []
        resolve = served.topic.resolve_start

        def noting(start, **options):
            names.append(threading.current_thread().name)
            return resolve(start, **options)

        served.topic.resolve_start = noting
        asked = ister_api.SeekRequest(topic="/default/t", subscription="s", publish_time_ms=NOW + 5)
        answer = await services.admin.Seek(asked)
        assert answer.cursor == 1
        start = time_of(NOW + 10)
        await served.subscribe("t", SubscriptionKind.SHARED, "c", (), start)
        assert served.subscriptions["t"].delivery.cursor == 1
        assert [name.rpartition("_")[0] for name in names[:2]] == ["ister-search"] * 2
