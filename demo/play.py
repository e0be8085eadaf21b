"""The demo, step by step: what is done, what is found out, and what has to be true in the end.

    shop ─► broker ─► day, kill -9 ─► tier ─► compact ─► another disk ─► evening ─► chain from 0
         ─► SQL ─► stream ─► Iceberg ─► figures

Owns: the order of the steps, and the checks. Does not own: steps and figures as such (`story`), how
they are shown.

What a crash leaves: nothing but the directory, which is the caller's. Processes end with `play`.
"""

from __future__ import annotations

import importlib.util
import os
import re
import threading
import urllib.request
from array import array
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, Final

from demo.interrupts import run_until_signal
from demo.lake import Lake, find_missing
from demo.proof import check_chain
from demo.serving import BrokerProcess
from demo.shop import ORDERS, TOPICS, Shop, make_shop, parse_id
from demo.show import Show
from demo.story import Plan, Story
from demo.traffic import SUBSCRIPTIONS, Traffic
from ister.base.clock import Clock
from ister.base.limits import MIB
from ister.client import Client
from ister.client.flight import FlightClient
from ister.errors import UnavailableError
from ister.wire.contract import RangeTicket
from ister.wire.views import TopicJson

_UPLOAD_SECONDS: Final = 120.0
_POLL_SECONDS: Final = 0.2
_HTTP_SECONDS: Final = 10.0
_GIVE_UP_SECONDS: Final = 2.0
# Bounds of the histogram, in milliseconds: 1-2-5 steps.
_BOUNDS: Final = tuple(step * 10.0**exponent for exponent in range(5) for step in (1.0, 2.0, 5.0))
_COUNTED: Final = (
    "cloud_reader.objects_opened_total",
    "cloud_reader.bytes_read_total",
    "wal_reader.frames_parsed_total",
    "wal.reader.stitch_cache_items",
)


class Player(Story):
    """Plays the demo. Used once; `broker` is there while `play` runs."""

    def __init__(self, plan: Plan, show: Show, clock: Clock | None = None) -> None:
        """Checks what is installed; starts nothing.

        Raises:
            InvalidRequestError: The directory has something in it.
        """
        super().__init__(plan, show, clock)
        missing = ["--no-spark was given"] if not plan.uses_spark else find_missing()
        self._has_spark = not missing
        self._has_iceberg = all(
            importlib.util.find_spec(name) is not None for name in ("pyiceberg", "sqlalchemy")
        )
        self.broker = BrokerProcess(
            plan.directory, engine="spark" if self._has_spark else "embedded"
        )
        self._lake: Lake | None = None
        self.figures |= {"missing": missing, "tier_maps": []}

    # -- the story --------------------------------------------------------------------------

    def play(self, after: Callable[[], None] | None = None) -> dict[str, Any]:
        """Plays it from beginning to end; returns the figures.

        Args:
            after: Called in the end, while the broker is still there.

        Raises:
            IsterError: A step failed.
        """
        began = self._clock.monotonic()
        with ExitStack() as stack:
            stack.callback(self.broker.stop)
            shop = self._make_shop()
            self._start_broker(stack)
            traffic = self._live_a_day(shop)
            self._tier()
            self._compact()
            self._move()
            self._end_the_day(traffic)
            self._read_the_chain(shop, traffic)
            self._ask_sql(shop)
            self._ask_stream(shop)
            self._export(shop)
            figures = self.figures
            figures["seconds"] = self._clock.monotonic() - began
            figures["ok"] = not figures["failures"]
            if self._lake is not None:
                self._lake.close()
            if after is not None:
                after()
        return figures

    # -- steps ------------------------------------------------------------------------------

    def _make_shop(self) -> Shop:
        plan = self._plan
        about = f"{plan.messages:,} messages from seed {plan.seed}"
        with self._step("Generate a day of a small shop", about) as step:
            shop = make_shop(plan.messages, plan.seed)
            truth = shop.truth
            self.figures["messages"] = truth.total
            self.figures["topics"] = [
                {
                    "topic": topic,
                    "messages": truth.messages[topic],
                    "payload_bytes": truth.payload_bytes[topic],
                    "example": shop.of(topic)[0].payload.decode(),
                }
                for topic in TOPICS
            ]
            counts = ", ".join(f"{truth.messages[topic]:,} {topic[9:]}" for topic in TOPICS)
            step.end(f"{counts}; {sum(truth.payload_bytes.values()) / MIB:.1f} MiB of JSON")
        return shop

    def _start_broker(self, stack: ExitStack) -> None:
        with self._step("Start a broker", "ister serve, on free ports of this machine") as step:
            if self._has_spark:
                directory = os.path.join(self._plan.directory, "lake")
                os.makedirs(directory)
                self._lake = Lake(directory, self.broker.config)
                # After a failure, or Ctrl-C: do not wait for its current work.
                stack.callback(self._lake.close, _GIVE_UP_SECONDS)
            addresses = self.broker.start()
            step.command = f"ister serve --config {os.path.basename(self.broker.config)}"
            spark = "; Spark starts beside it" if self._has_spark else ""
            step.end(f"ready on {addresses.grpc}, dashboard on http://{addresses.http}/{spark}")

    def _live_a_day(self, shop: Shop) -> Traffic:
        traffic = Traffic(self.broker, shop, self._show)
        about = "6 producers, subscriptions of all four types; and kill -9 in the middle"
        with self._step("Publish and consume, live", about) as step:
            lake = self._lake
            run_until_signal(lambda: traffic.day(lambda: lake is None or lake.is_settled))
            step.command = (
                f"ister consume {ORDERS} --subscription warehouse --kind key_shared\n"
                f"echo hello | ister produce {ORDERS}"
            )
            found = self.figures["traffic"] = _describe_traffic(traffic)
            kill = found["kill"]
            step.end(
                f"{found['in_per_second']:,.0f} msg/s in, {found['out_per_second']:,.0f} out; "
                f"steady latency p50 {found['latency']['steady']['p50']:.1f} ms, "
                f"p99 {found['latency']['steady']['p99']:.1f} ms; "
                f"killed and back in {kill['away_seconds']:.1f} s"
            )
        return traffic

    def _tier(self) -> None:
        if self._lake is None:
            self._wait_for_uploads()
            return
        about = "what is durable on the disk goes to the bucket, by Spark's tasks"
        with self._step("Tier with Spark", about) as step:
            step.command = "ister pipeline tier --config ister.yml"
            report = self._job("tier")
            self.figures["tier"] = report
            self._draw_map("After tiering: small objects, as they were uploaded")
            objects, size = _total(report, "objects"), _total(report, "bytes")
            step.end(f"{_total(report, 'messages'):,} messages in {objects} objects, {_mib(size)}")

    def _wait_for_uploads(self) -> None:
        with self._step("Tier", "the broker uploads by itself, every second here") as step:
            objects = 0
            waiting = threading.Event()
            give_up_at = self._clock.monotonic() + _UPLOAD_SECONDS
            with Client(self.broker.addresses.grpc, timeout=_HTTP_SECONDS) as client:
                for topic in TOPICS:
                    while (found := client.admin.describe_topic(topic)).tiered < found.next:
                        if self._clock.monotonic() > give_up_at:
                            raise UnavailableError("the broker does not upload", topic=topic)
                        waiting.wait(_POLL_SECONDS)
            self._draw_map("After tiering: small objects, as they were uploaded")
            views = self.figures["tier_maps"][-1]["topics"]
            objects = sum(len(view["objects"]) for view in views)
            size = sum(one["size"] for view in views for one in view["objects"])
            messages = sum(view["watermarks"]["tiered"] for view in views)
            self.figures["tier"] = {"objects": objects, "bytes": size, "messages": messages}
            step.end(f"{messages:,} messages in {objects} objects, {_mib(size)}")

    def _compact(self) -> None:
        title = "Compact to Parquet"
        if self._lake is None:
            self._leave_out(title)
            return
        with self._step(title, "small objects become large ones that any engine reads") as step:
            step.command = "ister pipeline compact --config ister.yml --format parquet"
            report = self._job("compact")
            self.figures["compact"] = report
            self._draw_map("After compaction: the same messages, in Parquet")
            before, after = _total(report, "bytes"), _total(report, "new_bytes")
            step.end(
                f"{_total(report, 'objects')} objects became {_total(report, 'merged')}, "
                f"{_mib(before)} became {_mib(after)} ({before / max(1, after):.1f} times smaller)"
            )

    def _move(self) -> None:
        about = "topics are handed over; a broker with an empty disk takes them from the bucket"
        with self._step("Move to another disk", about) as step:
            step.command = "ister topics unload /default/orders"
            began = self._clock.monotonic()
            with Client(self.broker.addresses.grpc, timeout=_HTTP_SECONDS) as client:
                for topic in TOPICS:
                    client.admin.unload_topic(topic)
            self.broker.stop()
            self.broker.configure(wal="wal-of-another-machine")
            self.broker.start()
            self.figures["moved_seconds"] = self._clock.monotonic() - began
            step.end("the new one has not a byte of the old one's files")

    def _end_the_day(self, traffic: Traffic) -> None:
        about = f"the last {len(traffic.tail):,} messages, to the same subscriptions"
        with self._step("Resume", about) as step:
            run_until_signal(traffic.evening)
            danube = (
                f"; {traffic.by_danube} of them by Danube's own client" if traffic.by_danube else ""
            )
            self.figures["by_danube"] = traffic.by_danube
            step.end(f"every subscription went on from its cursor{danube}")

    def _read_the_chain(self, shop: Shop, traffic: Traffic) -> None:
        about = "every message from offset 0 to the newest, against what was acknowledged"
        with self._step("Read the chain, and prove it", about) as step:
            step.command = f"ister consume {ORDERS} --subscription proof --from earliest"
            self._draw_map(
                "At the end: history in the bucket, the newest on the disk and in memory"
            )
            views = {view["topic"]: view for view in self.figures["tier_maps"][-1]["topics"]}
            before = self._metrics()
            self._show.bar("chain", "read", shop.truth.total)
            began, done = self._clock.monotonic(), 0
            proofs = self.figures["proofs"]
            with FlightClient(self.broker.addresses.flight) as flight:
                for topic in TOPICS:
                    proof = check_chain(
                        traffic.acknowledged[topic], self._chain(flight, topic, done)
                    )
                    done += proof.found
                    proofs["chain"].append(proof.as_json())
                    self._note(proof.say())
            seconds = self._clock.monotonic() - began
            after = self._metrics()
            read = {name: after.get(name, 0) - before.get(name, 0) for name in _COUNTED}
            tiers = _split_by_tier(done, read)
            for one in SUBSCRIPTIONS:
                end = views[one.topic]["watermarks"]["next"]
                delivery = traffic.received[one.name].prove(end)
                proofs["deliveries"].append(delivery.as_json())
                self._note(delivery.say())
            lost = sum(proof["lost"] for proof in proofs["chain"])
            duplicates = sum(one["duplicates"] for one in proofs["deliveries"])
            self.figures["chain"] = {
                "messages": done,
                "seconds": seconds,
                "tiers": tiers,
                "words": _say_tiers(tiers),
                "metrics": read,
                "lost": lost,
                "duplicates": duplicates,
            }
            self._check("messages in the topics", shop.truth.total, done)
            step.end(
                f"{done:,} messages ({_say_tiers(tiers)}): lost {lost}, stored twice "
                f"{sum(proof['doubled'] for proof in proofs['chain'])}; delivered again "
                f"{duplicates:,}"
            )

    def _ask_sql(self, shop: Shop) -> None:
        title = "Batch SQL over the topics"
        if self._lake is None:
            self._leave_out(title)
            return
        with self._step(title, "Spark joins orders with payments, in every tier") as step:
            step.command = 'spark.read.format("ister").option("config", "ister.yml")…'
            found = self.figures["sql"] = self._ask("sql")
            truth = shop.truth
            self._check(
                "cents of revenue by country, by SQL",
                dict(truth.revenue_by_country),
                {country: cents for country, _, cents in found["rows"]},
            )
            country, _, cents = found["rows"][0]
            step.end(
                f"{_money(sum(row[2] for row in found['rows']))} in {len(found['rows'])} "
                f"countries, {country} first with {_money(cents)}: as the shop has counted"
            )

    def _ask_stream(self, shop: Shop) -> None:
        title = "A streaming aggregation"
        if self._lake is None:
            self._leave_out(title)
            return
        with self._step(title, "orders by the hour, in windows, by micro-batches") as step:
            step.command = 'spark.readStream.format("ister")….trigger(availableNow=True)'
            found = self.figures["stream"] = self._ask("stream")
            self._check(
                "cents ordered by hour, by a stream",
                dict(shop.truth.ordered_by_hour),
                {hour: cents for hour, _, cents in found["rows"]},
            )
            best = max(found["rows"], key=lambda row: row[2])
            step.end(
                f"{len(found['rows'])} windows in {found['batches']} micro-batch"
                f"{'es' if found['batches'] != 1 else ''}; "
                f"the best hour is {best[0]:02d}:00 with {_money(best[2])}"
            )

    def _export(self, shop: Shop) -> None:
        title = "Export an Iceberg table, and query it"
        if self._lake is None:
            self._leave_out(title)
            return
        if not self._has_iceberg:
            self._leave_out(title, "pyiceberg is missing: pip install 'ister[lakehouse]'")
            return
        with self._step(title, "each order once, with typed columns; read without Ister") as step:
            step.command = (
                "ister pipeline export --config ister.yml --topics /default/orders "
                "--format iceberg --to ./lake/orders --include-tail"
            )
            report = self._job("export")
            found = self.figures["table"] = {**self._ask("query_table"), "export": report}
            truth = shop.truth
            self._check(
                "orders by country, in the table",
                dict(truth.orders_by_country),
                {country: count for country, count, _ in found["rows"]},
            )
            self._check(
                "cents ordered, in the table",
                truth.ordered_cents,
                sum(row[2] for row in found["rows"]),
            )
            step.end(
                f"{_total(report, 'messages'):,} rows, {_mib(_total(report, 'bytes'))}; "
                f"{found['engine']} counts "
                f"{_money(sum(row[2] for row in found['rows']))}, as the shop has"
            )

    # -- inside -----------------------------------------------------------------------------

    def _ask(self, work: str) -> dict[str, Any]:
        if self._lake is None:
            raise UnavailableError("there is no Spark")
        shown: set[str] = set()

        def on_progress(what: str, done: float, total: float) -> None:
            if what not in shown:
                shown.add(what)
                self._show.bar(what, what, total)
            self._show.update(what, done)

        return self._lake.ask(work, on_progress)

    def _job(self, name: str) -> dict[str, Any]:
        report = self._ask(name)
        for error in report["errors"]:
            self._note(f"{name}: {error['message']}")
        return report

    def _draw_map(self, title: str) -> None:
        """Notes where each topic's messages are."""
        with Client(self.broker.addresses.grpc, timeout=_HTTP_SECONDS) as client:
            views = [client.admin.show_topic(topic) for topic in TOPICS]
        self.figures["tier_maps"].append({"title": title, "topics": [_lean(v) for v in views]})

    def _chain(
        self, flight: FlightClient, topic: str, done: int
    ) -> Iterator[tuple[int, int | None]]:
        """Offset and id of every message of a topic, as the broker reads them from its tiers."""
        status = flight.watermarks([topic])[topic]
        ticket = RangeTicket(
            topic=topic,
            start=status.earliest,
            end=status.synced,
            incarnation=status.incarnation,
            columns=("offset", "payload"),
        )
        for batch in flight.read(ticket):
            for offset, payload in zip(
                *(column.to_pylist() for column in batch.columns), strict=True
            ):
                try:
                    yield offset, parse_id(payload)
                except ValueError:
                    yield offset, None
            done += batch.num_rows
            self._show.update("chain", done)

    def _metrics(self) -> dict[str, int]:
        """Counters of the broker, by their own names; those that it does not have are left out."""
        address = f"http://{self.broker.addresses.http}/metrics"
        with urllib.request.urlopen(address, timeout=_HTTP_SECONDS) as answer:
            text = answer.read().decode()
        found: dict[str, int] = {}
        for name in _COUNTED:
            pattern = rf"^(?:ister_)?{re.escape(name.replace('.', '_'))}(?:_total)? ([\d.e+]+)$"
            if (line := re.search(pattern, text, re.MULTILINE)) is not None:
                found[name] = int(float(line.group(1)))
        return found


def _describe_traffic(traffic: Traffic) -> dict[str, Any]:
    kill = traffic.kill
    if kill is None:
        raise UnavailableError("the broker was never killed")
    bulk = len(traffic.bulk)
    return {
        "producers": traffic.producers,
        "subscriptions": [
            {"name": one.name, "topic": one.topic, "type": one.kind, "consumers": one.consumers}
            for one in SUBSCRIPTIONS
        ],
        "bulk_messages": bulk,
        "in_per_second": bulk / traffic.bulk_seconds,
        "out_per_second": traffic.drained_per_second,
        "live_messages": len(traffic.live),
        "live_from": traffic.live_from,
        "pace": traffic.pace,
        "seconds": traffic.day_seconds,
        "samples": [
            [round(one.at, 3), one.acknowledged, one.received, one.lag, one.pending]
            for one in traffic.samples
        ],
        "kill": {
            "at": kill.at,
            "ready_at": kill.ready_at,
            "back_at": kill.back_at,
            "caught_up_at": kill.caught_up_at,
            "away_seconds": kill.away_seconds,
            "pending": kill.pending,
        },
        "switch": {"at": traffic.switched_at, "consumer": traffic.switched_from},
        "latency": {
            "steady": _describe_latency(traffic.steady_ms),
            "killed": _describe_latency(traffic.killed_ms),
        },
    }


def _describe_latency(values: array[float]) -> dict[str, Any]:
    ordered = sorted(values)
    count = len(ordered)

    def quantile(q: float) -> float:
        return ordered[min(count - 1, int(q * count))] if count else 0.0

    histogram = [[low, 0] for low in (0.0, *_BOUNDS)]
    number = 0
    for value in ordered:
        while number < len(_BOUNDS) and value >= _BOUNDS[number]:
            number += 1
        histogram[number][1] += 1
    return {
        "count": count,
        "p50": quantile(0.5),
        "p99": quantile(0.99),
        "max": ordered[-1] if count else 0.0,
        "histogram": histogram,
    }


def _lean(view: TopicJson) -> dict[str, Any]:
    """As much of a topic's view as a map needs."""
    names = ("object_id", "start_offset", "end_offset", "size", "format", "messages")
    return {
        "topic": view["topic"],
        "earliest": view["earliest"],
        "watermarks": view["watermarks"],
        "files": [
            {name: file.get(name) for name in ("name", "first_offset", "next_offset", "bytes")}
            for file in view["files"]
        ],
        "objects": [{name: one.get(name) for name in names} for one in view["objects"]],
        "cache": view["cache"],
        "subscriptions": [
            {name: one.get(name) for name in ("name", "type", "cursor", "lag")}
            for one in view["subscriptions"]
        ],
    }


def _split_by_tier(messages: int, counted: dict[str, int]) -> dict[str, int]:
    """Which tiers messages were read from, by the broker's own counters."""
    cache = min(messages, counted["wal.reader.stitch_cache_items"])
    files = min(messages - cache, counted["wal_reader.frames_parsed_total"])
    return {"bucket": messages - files - cache, "files": files, "cache": cache}


def _say_tiers(tiers: dict[str, int]) -> str:
    """Where messages were read from; tiers that had none are left out."""
    names = {"bucket": "from the bucket", "files": "from local files", "cache": "from memory"}
    return ", ".join(f"{tiers[key]:,} {words}" for key, words in names.items() if tiers[key])


def _total(report: dict[str, Any], name: str) -> int:
    return sum(topic.get(name, 0) for topic in report["topics"])


def _mib(size: float) -> str:
    return f"{size / MIB:.1f} MiB"


def _money(cents: int) -> str:
    return f"€\u00a0{cents / 100:,.2f}"
