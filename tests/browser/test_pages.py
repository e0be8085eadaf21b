"""Every page of the dashboard, beside what the API says."""

import json
import time

from tests.servers.broker import BrokerProcess
from tests.support.dashboard import Site, eventually, reads, says, settled, until

ORDERS = "/default/orders"


def texts(page, selector):
    return [one.strip() for one in page.locator(selector).all_inner_texts()]


def column(page, panel, title):
    """The cells of a column of the table in a panel, as text."""
    cells = page.locator(f'section[aria-labelledby="{panel}"] [data-label="{title}"]')
    return [one.strip() for one in cells.all_inner_texts()]


def number(value):
    return f"{value:,}"


def test_overview_says_how_the_broker_is(shop, open_page):
    page = open_page(shop)
    settled(page)
    overview = shop.api("/api/overview")
    reads(page.locator("h1"), "Overview")
    assert page.title() == "Overview · Ister"
    words = {"ok": "Healthy", "attention": "Needs attention", "bad": "Unhealthy"}
    reads(page.locator("#health"), words[overview["health"]["state"]])
    said = page.locator(".alarm-words").all_inner_texts()
    wanted = [] if overview["health"]["state"] == "ok" else overview["health"]["words"]
    assert [one.lower() for one in said] == [one.lower() for one in wanted]
    assert texts(page, ".tile-label") == ["In", "Out", "Behind", "Not uploaded yet"]
    assert page.locator(".tile .sparkline").count() == 4
    assert page.locator("figure.chart svg[role=img]").count() == 2
    for chart in page.locator("figure.chart svg").all():
        assert "the last five minutes" in chart.get_attribute("aria-label")
    assert ORDERS in column(page, "topics", "Topic")
    says(page.locator("section[aria-labelledby=disk]"), "free of")
    footer = page.locator("#footer").inner_text()
    assert overview["broker"]["version"] in footer
    assert overview["broker"]["node"] in footer


def test_topics_are_listed_and_searched(shop, open_page):
    page = open_page(shop, "#/topics")
    settled(page)
    names = [one["topic"] for one in shop.api("/api/topics?fold=yes")["topics"]]
    assert texts(page, "tbody th a") == names
    page.get_by_role("searchbox").type("ORD")
    until(page, "document.querySelectorAll('tbody th').length === 1")
    assert texts(page, "tbody th a") == [ORDERS]
    page.wait_for_url("**/#/topics?search=ORD")
    assert page.get_by_role("searchbox").input_value() == "ORD"
    page.get_by_role("searchbox").fill("nowhere")
    page.wait_for_selector(".empty")
    says(page.locator(".empty"), "No topic has “nowhere” in its name.")
    page.get_by_role("searchbox").fill("")
    until(page, f"document.querySelectorAll('tbody th').length === {len(names)}")
    page.get_by_role("link", name=ORDERS).click()
    page.wait_for_selector(f"h1:text-is('{ORDERS}')")


def test_a_topic_has_its_figures(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}")
    settled(page)
    topic = shop.api(f"/api/topics{ORDERS}")
    reads(page.locator("h1"), ORDERS)
    marks = dict(zip(texts(page, ".marks dt"), texts(page, ".marks .figure"), strict=True))
    expected = {"earliest": topic["earliest"], **topic["watermarks"]}
    assert marks == {name: number(at) for name, at in expected.items()}

    subscriptions = topic["subscriptions"]
    assert column(page, "subscriptions", "Name") == [one["name"] for one in subscriptions]
    assert column(page, "subscriptions", "Cursor") == [
        number(one["cursor"]) for one in subscriptions
    ]
    assert column(page, "subscriptions", "Lag") == [number(one["lag"]) for one in subscriptions]
    kinds = dict(
        zip(*(column(page, "subscriptions", one) for one in ("Name", "Type")), strict=True)
    )
    assert kinds == {
        "archive": "failover",
        "billing": "exclusive",
        "mailer": "key-shared",
        "reports": "exclusive",
        "search-index": "shared",
    }
    states = dict(
        zip(*(column(page, "subscriptions", one) for one in ("Name", "State")), strict=True)
    )
    assert states["mailer"].startswith("blocked")
    assert "failed too often" in states["mailer"]
    assert "no consumer is connected" in states["reports"]

    assert column(page, "files", "First offset") == [
        number(one["first_offset"]) for one in topic["files"][::-1]
    ]
    page.get_by_role("button", name="Show all", exact=False).click()
    newest_first = topic["objects"][::-1]
    assert column(page, "objects", "Object") == [one["object_id"] for one in newest_first]
    assert column(page, "objects", "First offset") == [
        number(one["start_offset"]) for one in newest_first
    ]
    assert column(page, "objects", "Last offset") == [
        number(one["end_offset"]) for one in newest_first
    ]


def drawn(page):
    """What the tier map shows, each with where and how wide it is."""
    return page.evaluate(
        """() => [...document.querySelectorAll('.tier-map .segment')].map((one) => ({
            kind: one.dataset.kind, name: one.dataset.name,
            start: Number(one.dataset.start), end: Number(one.dataset.end),
            x: one.x.baseVal.value, width: one.width.baseVal.value}))"""
    )


def test_the_tier_map_is_what_the_api_says_and_to_scale(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}")
    settled(page)
    topic = shop.api(f"/api/topics{ORDERS}")
    expected = [
        ("object", one["object_id"], one["start_offset"], one["end_offset"] + 1)
        for one in topic["objects"]
    ]
    expected += [
        ("file", one["name"], one["first_offset"], one["next_offset"]) for one in topic["files"]
    ]
    cache = topic["cache"]
    if cache["next"] > cache["start"]:
        expected.append(("cache", "cache", cache["start"], cache["next"]))
    assert len(topic["objects"]) > 3
    assert len(topic["files"]) > 1
    shown = drawn(page)
    assert [(one["kind"], one["name"], one["start"], one["end"]) for one in shown] == expected

    bounds = page.locator(".tier-map").evaluate("one => [+one.dataset.start, +one.dataset.end]")
    assert bounds == [0, topic["watermarks"]["next"]]
    track = page.locator(".lane-track").first.evaluate(
        "one => [one.x.baseVal.value, one.width.baseVal.value]"
    )
    for one in shown:
        # One pixel is the gap to the next segment.
        left = track[0] + track[1] * one["start"] / bounds[1]
        width = track[1] * (one["end"] - one["start"]) / bounds[1]
        assert abs(one["x"] - left) < 0.1
        assert abs(one["width"] - max(2, width)) <= 1.1

    marks = {
        name: int(one.get_attribute("data-at"))
        for one in page.locator(".tier-map .mark").all()
        for name in one.get_attribute("data-names").split()
    }
    assert set(marks) == set(topic["watermarks"])
    for name, at in topic["watermarks"].items():
        # Marks that stand within three pixels share a label.
        assert abs(marks[name] - at) * track[1] / bounds[1] < 10, name
    cursors = {
        one.get_attribute("data-name"): int(one.get_attribute("data-at"))
        for one in page.locator(".tier-map .cursor").all()
    }
    assert cursors == {one["name"]: one["cursor"] for one in topic["subscriptions"]}
    label = page.locator(".tier-map").get_attribute("aria-label")
    assert f"in {len(topic['objects'])} objects" in label
    assert f"in {len(topic['files'])} files" in label


def test_the_tier_map_shows_the_newest_part_larger(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}")
    settled(page)
    end = shop.api(f"/api/topics{ORDERS}")["watermarks"]["next"]
    page.get_by_label("Newest 10 %").check()
    bounds = page.locator(".tier-map").evaluate("one => [+one.dataset.start, +one.dataset.end]")
    assert bounds == [end - end // 10, end]
    assert all(one["end"] > bounds[0] for one in drawn(page))
    says(page.locator("section[aria-labelledby=tiers]"), "cursors further back")
    # It stays so when the page is brought up to date.
    with page.expect_response(f"**/api/topics{ORDERS}?*"):
        pass
    page.wait_for_timeout(100)
    assert page.get_by_label("Newest 10 %").is_checked()
    again = page.locator(".tier-map").evaluate("one => [+one.dataset.start, +one.dataset.end]")
    assert again == bounds


def test_a_partitioned_topic_leads_to_its_partitions(shop, open_page):
    page = open_page(shop, "#/topics/default/stock")
    settled(page)
    parts = [f"/default/stock-part-{number}" for number in range(3)]
    assert column(page, "partitions", "Topic") == parts
    page.get_by_role("link", name=parts[1]).click()
    page.wait_for_selector(f"h1:text-is('{parts[1]}')")
    settled(page)
    assert page.get_by_role("link", name="/default/stock", exact=True).is_visible()


def test_partitions_are_under_their_topic(shop, open_page):
    page = open_page(shop, "#/topics")
    settled(page)
    stock = page.locator(
        "tbody tr", has=page.get_by_role("link", name="/default/stock", exact=True)
    )
    parts = shop.api("/api/topics/default/stock")["topics"]
    held = sum(one["watermarks"]["next"] for one in parts)
    assert stock.locator("[data-label=Messages]").inner_text() == number(held) == "300"
    assert page.get_by_role("link", name="/default/stock-part-0").count() == 0
    page.get_by_role("button", name="Partitions of /default/stock").click()
    eventually(lambda: texts(page, "tr.part th a") == [one["topic"] for one in parts])
    # Small lines begin and end at the same place in every row.
    lines = page.locator("tbody .sparkline").evaluate_all(
        "all => all.map((one) => one.getBoundingClientRect()).map((box) => [box.left, box.right])"
    )
    assert len(lines) == page.locator("tbody tr").count()
    assert len({(round(left), round(right)) for left, right in lines}) == 1


def test_a_chart_says_its_values_at_the_pointer_and_by_keys(shop, open_page):
    page = open_page(shop)
    settled(page)
    until(page, "document.querySelector('.handle')?.ariaValueMax > 2")
    handle = page.get_by_role("slider", name="Messages per second: value at a time")
    tip = page.locator("section[aria-labelledby=chart-messages] .tip")
    assert not tip.is_visible()
    box = handle.bounding_box()
    page.mouse.move(box["x"] + box["width"] - 12, box["y"] + 40)
    assert tip.is_visible()
    says(tip, "In")
    says(tip, "msg/s")
    page.mouse.move(5, 5)
    assert not tip.is_visible()
    handle.focus()
    newest = handle.get_attribute("aria-valuetext")
    assert tip.is_visible()
    page.keyboard.press("Home")
    oldest = handle.get_attribute("aria-valuetext")
    assert oldest != newest
    assert oldest.startswith(tip.locator(".tip-time").inner_text())
    # It stays where it is while the page is brought up to date.
    with page.expect_response("**/api/overview?*"):
        pass
    page.wait_for_timeout(100)
    assert handle.get_attribute("aria-valuetext") == oldest
    page.keyboard.press("Escape")
    assert not tip.is_visible()


def test_charts_show_five_minutes_an_hour_or_a_day(shop, open_page):
    page = open_page(shop)
    settled(page)
    for label, words in (("1 hour", "the last hour"), ("1 day", "the last day")):
        page.get_by_label(label).check()
        until(page, f"document.querySelector('.chart svg').ariaLabel.includes('{words}')")
    # Also elsewhere, and when one comes back.
    page.goto(f"{shop.url}/#/topics{ORDERS}")
    page.wait_for_selector("section[aria-labelledby=rates]")
    assert "the last day" in page.locator(".chart svg").get_attribute("aria-label")
    page.reload()
    settled(page)
    assert page.get_by_label("1 day").is_checked()
    page.get_by_label("5 min").check()
    until(page, "document.querySelector('.chart svg').ariaLabel.includes('five minutes')")


def test_an_alarm_leads_to_the_subscription_and_to_what_to_do(shop, open_page):
    page = open_page(shop)
    settled(page)
    alarm = page.locator(".alarms li", has_text="mailer")
    alarm.get_by_role("link", name="mailer").click()
    row = page.locator("tr.wanted")
    row.wait_for()
    says(row, "blocked")
    assert row.evaluate("one => one.getBoundingClientRect().bottom <= innerHeight")
    row.get_by_role("link", name="What to do").click()
    page.wait_for_selector("h1:text-is('Health')")
    check = page.locator("#check-subscriptions")
    check.wait_for()
    assert check.get_attribute("open") is not None
    says(check, "seek to the offset")
    says(check, "IsterSubscriptionBlocked")
    checks = shop.api("/api/overview")["health"]["checks"]
    assert page.locator(".check").count() == len(checks)


def test_a_topic_that_keeps_nothing_says_so(shop, open_page):
    page = open_page(shop, "#/topics/shop/prices")
    settled(page)
    says(page.locator("main"), "not reliable")
    assert page.locator(".tier-map").count() == 0
    page.goto(f"{shop.url}/#/topics/shop/prices/messages")
    page.wait_for_selector(".empty")
    says(page.locator(".empty"), "not stored")


def test_brokers(shop, open_page):
    page = open_page(shop, "#/brokers")
    settled(page)
    (broker,) = shop.api("/api/brokers")["brokers"]
    card = page.get_by_label(f"Broker {broker['node']}").inner_text()
    assert broker["connect_url"] in card
    assert "this broker" in card
    # Its load is that of now, although it has nobody to tell.
    says(page.locator("main"), "A single broker")


def test_pipeline_without_one_says_what_to_start(shop, open_page):
    page = open_page(shop, "#/pipeline")
    settled(page)
    reads(page.locator("#running"), "No pipeline is running")
    says(page.locator("main"), "ister pipeline run")
    assert texts(page, "section[aria-labelledby=jobs] tbody th") == [
        "tier",
        "resort",
        "compact",
        "export",
        "gc",
        "scrub",
        "replay",
        "stats",
    ]


def a_pipeline(now):
    """What `/api/pipeline` says while one runs."""
    tier = {"topic": ORDERS, "objects": 4, "messages": 12_000, "bytes": 3_200_000}
    return {
        "is_running": True,
        "engine": "spark",
        "words": "A pipeline runs on worker-1.",
        "lease": {"job": "run", "host": "worker-1", "process": 4711, "since": now - 7200},
        "status": {
            "updated_at": now,
            "host": "worker-1",
            "cycles": 90,
            "tier": {
                "is_on": True,
                "topics": 6,
                "lag_messages": 1200,
                "tiered_messages_total": 510_000,
                "tiered_bytes_total": 44_000_000,
                "tiered_objects_total": 187,
                "failing_topics": ["/shop/page-views"],
                "failing_topics_total": 1,
                "last_error": None,
            },
            "jobs": {"compact": {"next_at": now + 600}, "stats": {"is_running": True}},
            "memory": {"jvm_rss_bytes": 900 * 1024**2},
        },
        "reports": {
            "tier": {"started_at": now - 60, "seconds": 3.2, "topics": [tier], "errors": []},
            "compact": {
                "started_at": now - 9000,
                "seconds": 71.0,
                "topics": [],
                "errors": [{"topic": ORDERS, "message": "<b>the bucket</b> does not answer"}],
            },
        },
        "requests": {"scrub": {"requested_at": now, "by": "ada", "state": "waiting"}},
    }


def test_pipeline_shows_uploads_jobs_requests_and_reports(shop, open_page):
    page = open_page(shop, "#/brokers")
    content = json.dumps(a_pipeline(int(time.time())))
    page.route("**/api/pipeline", lambda route: route.fulfill(body=content))
    page.goto(f"{shop.url}/#/pipeline")
    page.wait_for_selector("#running")
    settled(page)
    reads(page.locator("#running"), "A pipeline is running")
    says(page.locator("main"), "On worker-1, process 4711")
    uploads = page.locator("section[aria-labelledby=uploads]").inner_text()
    assert "1,200 messages" in uploads
    assert "510,000 messages, 42.0 MiB" in uploads
    assert "JVM 900 MiB" in uploads
    assert "Failing: /shop/page-views." in uploads
    jobs = dict(zip(*(column(page, "jobs", one) for one in ("Job", "Result")), strict=True))
    assert jobs["tier"] == "ok 1 topic"
    assert jobs["compact"] == "1 error <b>the bucket</b> does not answer"
    assert jobs["stats"] == "never ran"
    upcoming = dict(zip(*(column(page, "jobs", one) for one in ("Job", "Next")), strict=True))
    assert upcoming["compact"] == "in 10 min"
    assert upcoming["scrub"] == "asked for"
    assert upcoming["stats"] == "runs now"
    says(page.locator("section[aria-labelledby=requests]"), "ada")
    page.locator("details.report summary").first.click()
    says(page.locator("details.report[open]"), "3.1 MiB")
    # An opened report stays open when the page is brought up to date.
    with page.expect_response("**/api/pipeline"):
        pass
    page.wait_for_timeout(100)
    assert page.locator("details.report[open]").count() == 1


def test_pages_that_do_not_exist_say_so(shop, open_page):
    page = open_page(shop, "#/nothing/here")
    page.wait_for_selector("h1:text-is('Page not found')")
    page.goto(f"{shop.url}/#/topics/default/none")
    page.wait_for_selector("section.problem")
    says(page.locator("section.problem"), "topic /default/none does not exist")
    page.goto(f"{shop.url}/#/topics/default/%3Cscript%3E")
    until(page, "document.querySelector('section.problem')?.innerText.includes('script')")
    assert page.locator("main script").count() == 0


def test_an_empty_broker_says_what_to_do_and_shows_the_first_topic(empty, open_page):
    page = open_page(empty)
    page.wait_for_selector(".empty")
    says(page.locator(".empty"), "ister produce /default/orders")
    empty.publish(ORDERS, b"first")
    page.wait_for_selector(f"tbody th a:text-is('{ORDERS}')")
    page.goto(f"{empty.url}/#/topics{ORDERS}")
    page.wait_for_selector(".tier-map")
    says(page.locator("main"), "No subscriptions yet.")
    assert eventually(lambda: drawn(page)), "no segments"


def test_a_log_in_memory_has_neither_disk_nor_pipeline(playwright_api, tmp_path, open_page):
    settings = {"storage": {"mode": "memory", "wal": {"dir": None}, "uploader": None}}
    with BrokerProcess(tmp_path, settings=settings) as broker:
        site = Site(broker)
        site.publish(ORDERS, b"1", b"2")
        page = open_page(site)
        settled(page)
        says(page.locator("section[aria-labelledby=disk]"), "no disk is used")
        page.goto(f"{site.url}/#/topics{ORDERS}")
        page.wait_for_selector(".tier-map")
        assert [one["kind"] for one in drawn(page)] == ["cache"]
        page.goto(f"{site.url}/#/pipeline")
        page.wait_for_selector("#running")
        words = page.locator("section[aria-labelledby=running]").inner_text()
        assert "storage.mode is memory" in words
        assert "Start one" not in words
