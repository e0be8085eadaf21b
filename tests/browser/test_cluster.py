"""The page of the cluster: two real brokers, and what they say of topics that wait."""

from contextlib import ExitStack

import pytest

from ister.client import Client
from tests.servers.broker import BrokerProcess
from tests.support.dashboard import Site, eventually, reads, says, settled

TOPIC = "/default/orders"


@pytest.fixture(scope="module")
def pair(playwright_api, tmp_path_factory):
    directory = tmp_path_factory.mktemp("pair")
    settings = {
        "storage": {
            "cloud": {"root": str(directory / "objects")},
            "metadata": {"path": str(directory / "metadata.db")},
        },
        "broker": {"cluster": {"zone": "west"}},
    }
    with ExitStack() as stack:
        yield [
            Site(stack.enter_context(BrokerProcess(directory / name, settings=settings)))
            for name in ("a", "b")
        ]


def dialog(page):
    return page.locator("dialog[open]")


def is_owned(site, topic, *, by):
    """Whether a broker has heard that another one owns the topic; nobody does during a move."""
    owner = site.api(f"/api/topics{topic}")["owner"]
    return owner is not None and owner["node"] == node_of(by)


def node_of(site):
    return next(one["node"] for one in site.api("/api/brokers")["brokers"] if one["is_this"])


def test_brokers_are_drained_and_activated_from_any_page(pair, open_page):
    a, b = pair
    there = node_of(b)
    with Client(a.address) as client:
        client.admin.create_topic(TOPIC)
        client.admin.move_topic(TOPIC, there)
    page = open_page(a, "#/brokers")
    settled(page)
    card = page.get_by_label(f"Broker {there}")
    says(card, "active")
    says(card, "west")
    assert card.get_by_role("link", name="Its dashboard").get_attribute("href") == b.url
    page.get_by_role("button", name=f"Drain {there}").click()
    says(dialog(page), "takes no new ones")
    # The safe answer has the focus.
    assert page.evaluate("document.activeElement.innerText") == "Cancel"
    dialog(page).get_by_role("button", name="Drain the broker").click()
    says(page.locator(".toast").last, f"{there} is draining")
    page.wait_for_selector(f"[data-node='{there}'] .badge:text-is('draining')")
    says(page.locator(".page-head"), "1 not active")
    eventually(lambda: is_owned(a, TOPIC, by=a))
    page.get_by_role("button", name=f"Activate {there}").click()
    dialog(page).get_by_role("button", name="Activate the broker").click()
    page.wait_for_selector(f"[data-node='{there}'] .badge:text-is('active')")


def test_topic_is_moved_to_the_broker_that_is_chosen(pair, open_page):
    a, b = pair
    with Client(a.address) as client:
        client.admin.create_topic("/default/moved")
        client.admin.move_topic("/default/moved", node_of(a))
    eventually(lambda: is_owned(b, "/default/moved", by=a))
    page = open_page(b, "#/topics/default/moved")
    settled(page)
    page.get_by_role("button", name="Move…").click()
    chosen = dialog(page).get_by_label("To broker")
    assert chosen.input_value() == node_of(b)
    dialog(page).get_by_role("button", name="Move the topic").click()
    says(page.locator(".toast").last, node_of(b))
    eventually(lambda: is_owned(b, "/default/moved", by=b))
    page.goto(f"{b.url}/#/brokers")
    page.wait_for_selector("h2#balance")
    page.get_by_role("button", name="Rebalance").click()
    dialog(page).get_by_role("button", name="Move topics").click()
    page.wait_for_selector(".toast:has-text('topics are moving')")


def test_topics_that_wait_for_a_disk_say_what_a_take_over_gives_up(pair, open_page):
    """Goal: the page shows which disk is missing, and asks before messages are given up."""
    a, _ = pair
    found = a.api("/api/cluster")
    gone = "00000000deadbeef"
    found["waiting"] = [{"topic": TOPIC, "node": gone, "offset": 1200, "since": 1_760_745_600}]
    found["waiting_total"] = 1
    nodes = [one["node"] for one in found["brokers"]]
    found["moves"] = [
        {"topic": "/default/x", "from": nodes[0], "to": nodes[1], "reason": "moved", "since": 1}
    ]
    page = open_page(a, "#/topics")
    page.route("**/api/cluster", lambda route: route.fulfill(json=found))
    page.goto(f"{a.url}/#/brokers")
    page.wait_for_selector("h2#waiting")
    reads(page.locator("h2#waiting"), "1 topic waits for a disk")
    text = page.locator("section[aria-labelledby=waiting]").inner_text()
    assert gone in text
    assert "offset 1,200 and later" in text
    assert "2025-10-18 00:00:00" in text
    says(page.locator("section[aria-labelledby=moves]"), "/default/x")
    sent = []
    page.on("request", lambda request: sent.append(request) if request.method == "POST" else 0)
    page.get_by_role("button", name=f"Take over {TOPIC}").click()
    says(dialog(page), "It cannot be undone")
    assert sent == []
    dialog(page).get_by_role("button", name="Give up these messages").click()
    # Its broker is up, after all.
    page.wait_for_selector("dialog [role=alert]:has-text('is up')")
    assert sent[0].url.endswith(f"/api/topics{TOPIC}/take-over")
    assert sent[0].post_data_json == {"confirm": True}
