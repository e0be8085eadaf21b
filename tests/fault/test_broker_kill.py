"""kill -9 and SIGTERM of a real broker, with Danube's own client at work.

Four producers and six subscriptions use one broker, which is killed at random moments, at
failpoints, as soon as it is ready and while it recovers, and comes back at the same ports. One
history is kept over all lives, and judged by `delivery_history` against the log in the end.
"""

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TypeVar

import grpc
import pytest

from ister.wire import ister_api
from tests.support.broker_load import (
    FLUSH_SECONDS,
    LEFT,
    RIGHT,
    SETTINGS,
    WRITE_SECONDS,
    Lives,
    Load,
    read_logs,
)
from tests.support.danube import connect, texts
from tests.support.delivery_history import DeliveryHistory, Verdict
from tests.support.scale import IS_NIGHTLY, scaled
from tests.support.writer_child import new_seed, say_replay

T = TypeVar("T")

KILLS = scaled(4, 300)
STOPS = scaled(1, 12)

# What a broker under load comes by, and how often it may before it has to die there.
_POINTS = {
    "wal.before_write": 30,
    "wal.after_write": 30,
    "wal.before_sync": 30,
    "wal.after_sync": 30,
    "wal.after_create_file": 3,
    "wal.after_rotate": 3,
    "wal.after_checkpoint": 5,
    "broker.after_append": 40,
    "broker.before_answer": 40,
    "broker.before_cursor": 10,
    "broker.after_cursor": 10,
    "broker.before_ready": 1,
}
_KINDS = {"load": 0.5, "failpoint": 0.2, "old": 0.1, "ready": 0.1, "recovery": 0.1}
_OLD_SECONDS = 5.5
"""A life in which many acks become older than what a kill may take."""


def new_history() -> DeliveryHistory:
    return DeliveryHistory(flush_seconds=FLUSH_SECONDS + WRITE_SECONDS)


def kinds_of_deaths(count: int, chance: random.Random) -> list[str]:
    """How each broker dies: every kind in its share, in any order."""
    kinds = [kind for kind, share in _KINDS.items() for _ in range(round(share * count))]
    kinds = ["load"] * (count - len(kinds)) + kinds[:count]
    chance.shuffle(kinds)
    return kinds


async def live_and_die(lives: Lives, load: Load, kind: str, chance: random.Random) -> str:
    """One broker from its start to its death; what it died of."""
    failpoint = kill_after = None
    if kind == "failpoint":
        point, visits_max = chance.choice(list(_POINTS.items()))
        failpoint = f"{point}=kill@{chance.randint(1, visits_max)}"
    elif kind == "recovery":
        kill_after = chance.uniform(0.05, 0.8)
    if not await lives.launch(failpoint=failpoint, kill_after=kill_after):
        return point if failpoint else kind
    if failpoint:
        if await lives.wait_for_death(3.0):
            return point
    elif kind in ("load", "old"):
        await load.wait_for_answers(20, 120.0)
        await asyncio.sleep(chance.uniform(0.0, 0.8) if kind == "load" else _OLD_SECONDS)
    elif kind == "ready":
        await asyncio.sleep(chance.uniform(0.0, 0.3))
    await lives.kill()
    return "ready" if kind == "recovery" else "load" if failpoint else kind


async def drain(lives: Lives, load: Load, history: DeliveryHistory) -> None:
    """Everything is delivered and acknowledged; after an end in order nothing comes again."""
    await load.finish()
    await lives.stop()
    before = history.deliveries
    await lives.launch()
    await asyncio.sleep(1.5)
    load.check_alive()
    assert history.deliveries == before, "all was acknowledged, and some came again"


def say_figures(test: str, seed: int, verdict: Verdict, started: float, **more: object) -> None:
    figures = {"test": test, "seed": seed, **verdict.figures(), **more}
    print(json.dumps({**figures, "seconds": round(time.monotonic() - started, 1)}))


@pytest.mark.timeout(2700)
def test_kills_of_the_broker_lose_nothing_and_repeat_only_what_they_may(tmp_path, request):
    """Goal: every message at least once to every subscription, and no more than the rules allow.

    Method: a broker under load dies over and over in all ways; then everything is drained, and the
    history of all that its clients did and saw is judged.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/kills")
    history = new_history()
    lives = Lives(tmp_path, history)
    died_of: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    started = time.monotonic()

    async def scenario() -> None:
        await lives.launch()
        async with Load(lives, history, seed) as load:
            for number, kind in enumerate(kinds_of_deaths(KILLS, chance)):
                if number not in (0, KILLS // 2):
                    died_of[await live_and_die(lives, load, kind, chance)] += 1
                    load.check_alive()
                    continue
                if number:
                    await lives.launch()
                assert await load.wait_for_answers(10, 120.0), "the load does not come back"
                if number:
                    await load.subscribe_late()
                await lives.kill()
                died_of["load"] += 1
            await lives.launch()
            assert await load.wait_for_answers(100, 120.0), "the load does not come back"
            await drain(lives, load, history)
            errors.update(load.errors)
        await lives.stop()

    try:
        asyncio.run(scenario())
    finally:
        lives.end()
    verdict = history.check(read_logs(tmp_path))
    say_figures("broker kills", seed, verdict, started, died_of=died_of, errors=errors)
    assert verdict.is_clean, verdict
    assert verdict.kills == KILLS
    assert verdict.acked == verdict.sent > 10 * KILLS, "hardly anything was sent"
    # A few kills may all come when nothing is under way.
    if IS_NIGHTLY:
        assert verdict.duplicates > KILLS, "kills with nothing under way prove nothing"
        reached = sum(died_of[point] for point in _POINTS)
        assert reached >= KILLS // 20, "failpoints were not reached"


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_end_in_order_under_load_answers_everything_and_forgets_no_ack(tmp_path, request):
    """Goal: SIGTERM under load: out in 10 s with 0, every send and ack under way has its answer.

    Method: more producers, without a pause, and a broker that is stopped and started again under
    them. As there is no kill, the judge allows no message twice in the log, not even of producers
    that do not number them, and no delivery of what was acknowledged.
    """
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    chance = random.Random(f"{seed}/stops")
    history = new_history()
    lives = Lives(tmp_path, history)
    took: list[float] = []
    started = time.monotonic()

    async def scenario() -> None:
        await lives.launch()
        async with Load(lives, history, seed, pause_seconds=0.002, more_producers=8) as load:
            for _ in range(STOPS):
                assert await load.wait_for_answers(50, 120.0), "the load does not come back"
                await asyncio.sleep(chance.uniform(0.2, 1.5))
                took.append(round(await lives.stop(), 2))
                load.check_alive()
                await lives.launch()
            await load.wait_for_answers(50, 120.0)
            await drain(lives, load, history)
        await lives.stop()

    try:
        asyncio.run(scenario())
    finally:
        lives.end()
    verdict = history.check(read_logs(tmp_path))
    say_figures("broker stops", seed, verdict, started, stops=STOPS, seconds_to_stop=took)
    assert verdict.is_clean, verdict
    assert verdict.acked == verdict.sent > 50 * STOPS, "hardly anything was sent"
    assert verdict.sent_twice == verdict.forgotten == 0


async def until_it_works(call: Callable[[], Awaitable[T]]) -> T:
    """Calls until the broker is there again, as a program does."""
    async with asyncio.timeout(60):
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                assert error.code() is grpc.StatusCode.UNAVAILABLE, error
                await asyncio.sleep(0.1)


@pytest.mark.nightly
def test_consumer_whose_broker_died_while_it_subscribed_is_the_same_one_afterwards(tmp_path):
    """Goal: a subscription is made whole or not at all, and asking again gives the same id.

    Method: the broker dies when all is written down and the client has not been told.
    """
    lives = Lives(tmp_path, new_history())

    async def scenario() -> None:
        await lives.launch()
        async with connect(lives) as danube:
            producer = await danube.producer(LEFT)
            await lives.kill()
            await lives.launch(failpoint="broker.after_subscribe=kill@1")
            subscribing = asyncio.ensure_future(
                until_it_works(lambda: danube.consumer(LEFT, "c", subscription="s"))
            )
            assert await lives.wait_for_death(30.0)
            await lives.launch()
            # The subscription is there since before this was sent, whatever its consumer knows.
            await until_it_works(lambda: producer.send(b"first"))
            inbox = await subscribing
            await producer.send(b"second")
            assert texts(await inbox.take(2)) == ["first", "second"]
            assert await danube.subscriptions(LEFT) == ["s"]
            before = inbox.ids
            await lives.kill()
            await lives.launch()
            await until_it_works(lambda: producer.send(b"third"))
            while (message := await inbox.one(ack=True)).payload != b"third":
                assert message.payload in (b"first", b"second"), "only what a kill may repeat"
            assert inbox.ids == before

    try:
        asyncio.run(scenario())
    finally:
        lives.end()


@pytest.mark.nightly
def test_dead_letter_is_not_lost_when_the_broker_dies_behind_it(tmp_path):
    """Goal: a message is dead-lettered at least once, and those behind it go on.

    Method: the broker dies when the letter is published and the message not yet done with.
    """
    lives = Lives(tmp_path, new_history())

    async def scenario() -> None:
        await lives.launch()
        async with connect(lives) as danube:
            producer = await danube.producer(LEFT)
            inbox = await danube.consumer(LEFT, "c", subscription="s")
            await danube.create_topic(RIGHT)
            letters = await danube.consumer(RIGHT, "l", subscription="letters")
            await danube.set_failure_policy(
                LEFT, subscription="s", poison="DeadLetter", retries=0, dead_letter_topic=RIGHT
            )
            await lives.kill()
            await lives.launch(failpoint="broker.after_dead_letter=kill@1")
            await until_it_works(lambda: producer.send(b"bad"))
            await inbox.nack(await inbox.one())
            assert await lives.wait_for_death(30.0)
            await lives.launch()
            await until_it_works(lambda: producer.send(b"good"))
            while (message := await inbox.one()).payload == b"bad":
                await inbox.nack(message)
            assert message.payload == b"good"
            await inbox.ack(message)
            await danube.wait_for_cursor(LEFT, 2, "s")
            end = (await danube.admin.DescribeTopic(ister_api.TopicName(topic=RIGHT))).next
            assert 1 <= end <= 2
            assert set(texts(await letters.take(end))) == {"bad"}

    try:
        asyncio.run(scenario())
    finally:
        lives.end()


@pytest.mark.nightly
def test_broker_that_keeps_cursors_to_itself_is_caught(tmp_path, request):
    """Goal: the judge has teeth: a broker that does not write cursors in time is found out.

    Method: cursors are written after an hour, and the history is told a second.
    """
    lazy = {
        **SETTINGS,
        "dispatch": {
            **SETTINGS["dispatch"],
            "progress_flush_interval_seconds": 3600,
            "progress_min_offset_delta": 1_000_000,
        },
    }
    verdict = run_broken(tmp_path, request, lazy, failpoint=None, seconds=6.0)
    assert verdict.kinds().keys() == {"repeated"}, verdict


@pytest.mark.nightly
def test_broker_that_answers_before_it_has_written_is_caught(tmp_path, request):
    """Goal: the judge has teeth: a message that was acknowledged and is gone is found out.

    Method: sends are answered when they are in memory, and the broker dies before a write.
    """
    early = {**SETTINGS, "storage": {**SETTINGS["storage"], "ack": "memory"}}
    verdict = run_broken(
        tmp_path, request, early, failpoint="wal.before_write=kill@60", seconds=10.0
    )
    assert "lost" in verdict.kinds(), verdict


def run_broken(tmp_path, request, settings, *, failpoint: str | None, seconds: float) -> Verdict:
    """The verdict about a broker with these settings that dies once."""
    seed = new_seed()
    say_replay(seed, request.node.nodeid)
    history = new_history()
    lives = Lives(tmp_path, history, settings)

    async def scenario() -> None:
        await lives.launch()
        async with Load(lives, history, seed, is_strict=False) as load:
            await load.wait_for_answers(10, 120.0)
            if failpoint:
                await lives.kill()
                await lives.launch(failpoint=failpoint)
                assert await lives.wait_for_death(seconds)
            else:
                await asyncio.sleep(seconds)
                await lives.kill()
            await lives.launch()
            await load.wait_for_answers(10, 120.0)
            await load.finish()
        await lives.stop()

    try:
        asyncio.run(scenario())
    finally:
        lives.end()
    return history.check(read_logs(tmp_path, settings))
