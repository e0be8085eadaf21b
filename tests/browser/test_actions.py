"""What can be done from the pages: behind a question, and really done."""

import pytest

from ister.client import Client
from tests.support.dashboard import eventually, says, settled, until

ORDERS = "/default/orders"


def dialog(page):
    return page.locator("dialog[open]")


def test_seek_moves_the_cursor_once_it_is_confirmed(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}")
    settled(page)
    sent = []
    page.on("request", lambda request: sent.append(request.url) if request.method == "POST" else 0)
    seek = page.get_by_role("button", name="Seek reports")
    seek.click()
    says(dialog(page), "is at offset")
    dialog(page).get_by_role("button", name="Cancel").click()
    dialog(page).wait_for(state="detached")
    assert sent == []
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Seek reports"

    before = shop.subscription(ORDERS, "reports")["cursor"]
    to = 777 if before != 777 else 778
    seek.click()
    dialog(page).get_by_label("Offset", exact=True).fill(str(to))
    assert dialog(page).get_by_label("an offset", exact=True).is_checked()
    dialog(page).get_by_role("button", name="Move the cursor").click()
    says(page.locator(".toast").last, f"continues at offset {to}")
    assert len(sent) == 1
    assert shop.subscription(ORDERS, "reports")["cursor"] == to
    until(page, f"document.querySelector('.cursor[data-name=reports]').dataset.at === '{to}'")


def test_seek_to_a_time_and_what_is_wrong_is_said_in_the_dialog(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}")
    settled(page)
    page.get_by_role("button", name="Seek reports").click()
    dialog(page).get_by_label("a publish time", exact=True).check()
    dialog(page).get_by_role("button", name="Move the cursor").click()
    says(dialog(page).get_by_role("alert"), "Enter a date and a time.")
    dialog(page).get_by_label("Offset", exact=True).fill("99999999")
    dialog(page).get_by_role("button", name="Move the cursor").click()
    until(
        page, "document.querySelector('dialog [role=alert]')?.innerText.includes('beyond the end')"
    )
    says(dialog(page).get_by_role("alert"), "It was not done.")
    dialog(page).get_by_label("Publish time, in your time zone").fill("2001-01-01T00:00:00")
    dialog(page).get_by_role("button", name="Move the cursor").click()
    says(page.locator(".toast").last, "continues at offset 0")
    assert shop.subscription(ORDERS, "reports")["cursor"] == 0


@pytest.mark.nightly
def test_unload_closes_the_topic_and_it_opens_again(shop, open_page):
    topic = "/default/unloaded"
    shop.publish(topic, b"1", b"2")
    page = open_page(shop, f"#/topics{topic}")
    settled(page)
    page.get_by_role("button", name="Unload").click()
    # The safe answer has the focus.
    assert page.evaluate("document.activeElement.innerText") == "Cancel"
    dialog(page).get_by_role("button", name="Unload the topic").click()
    says(page.locator(".toast").last, f"{topic} was unloaded")
    eventually(lambda: shop.api(f"/api/topics{topic}")["state"] != "open")
    shop.publish(topic, b"3")
    page.wait_for_selector(".badges .badge.ok:text-is('open')")
    assert shop.api(f"/api/topics{topic}")["watermarks"]["next"] == 3


@pytest.mark.nightly
def test_jobs_without_a_pipeline_are_refused_in_words(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}")
    settled(page)
    for job in ("Compact", "Scrub"):
        page.get_by_role("button", name=f"{job} now…").click()
        says(dialog(page), f"It processes only {ORDERS}.")
        dialog(page).get_by_role("button", name=f"{job} now").click()
        alert = dialog(page).get_by_role("alert")
        alert.wait_for()
        says(alert, "It was not done.")
        says(alert, "ister pipeline run")
        page.keyboard.press("Escape")
        dialog(page).wait_for(state="detached")
    page.goto(f"{shop.url}/#/pipeline")
    page.get_by_role("button", name="Export now").click()
    says(dialog(page), "It processes all topics.")


def test_a_topic_is_created_used_and_deleted(shop, open_page):
    topic = "/default/made-here"
    page = open_page(shop, "#/topics")
    settled(page)
    page.get_by_role("button", name="Create a topic").click()
    dialog(page).get_by_label("Name").fill("no slash")
    dialog(page).get_by_role("button", name="Create the topic").click()
    dialog(page).get_by_role("alert").wait_for()
    says(dialog(page).get_by_role("alert"), "It was not done.")
    dialog(page).get_by_label("Name").fill(topic)
    dialog(page).get_by_role("button", name="Create the topic").click()
    says(page.locator(".toast").last, f"topic {topic} was created")
    page.wait_for_selector(f"h1:text-is('{topic}')")
    settled(page)

    page.get_by_role("button", name="Publish a message").click()
    dialog(page).get_by_label("Payload").fill('{"id": 7}')
    dialog(page).get_by_label("Routing key").fill("seven")
    dialog(page).get_by_label("Attributes").fill("source=page\nkind=test")
    dialog(page).get_by_role("button", name="Publish the message").click()
    page.wait_for_selector(".toast:has-text('at offset 0')")
    (message,) = shop.api(f"/api/topics{topic}/messages")["messages"]
    assert message["json"] == {"id": 7}
    assert message["attributes"] == {"source": "page", "kind": "test"}

    page.get_by_role("button", name="Policies…").click()
    dialog(page).get_by_label("Messages per second in").fill("500")
    dialog(page).get_by_role("button", name="Change the policies").click()
    page.wait_for_selector(".toast:has-text('policies of')")
    assert shop.api(f"/api/topics{topic}")["own_policies"] == {"max_publish_rate": 500}

    page.get_by_role("button", name="Delete the topic").click()
    confirm = dialog(page).get_by_role("button", name="Delete the topic")
    dialog(page).get_by_role("textbox").fill("made-here")
    confirm.click()
    dialog(page).get_by_role("alert").wait_for()
    assert shop.api(f"/api/topics{topic}")["watermarks"]["next"] == 1
    dialog(page).get_by_role("textbox").fill(topic)
    confirm.click()
    page.wait_for_selector(".toast:has-text('was deleted')")
    page.wait_for_selector("h1:text-is('Topics')")
    assert topic not in [one["topic"] for one in shop.api("/api/topics")["topics"]]


def test_dead_letters_are_requeued(shop, open_page):
    topic, dead = "/default/letters", "/default/letters-dead"
    shop.publish(topic, b"bad", b"good")
    page = open_page(shop, f"#/topics{topic}")
    with Client(shop.address) as client:
        consumer = client.consumer(topic, "work", start="earliest")
        settled(page)
        page.get_by_role("button", name="Failure policy of work").click()
        dialog(page).get_by_label("A message that failed too often").select_option("dead_letter")
        dialog(page).get_by_label("Redeliveries before that").fill("0")
        dialog(page).get_by_role("button", name="Change the policy").click()
        says(page.locator(".toast").last, "failure policy of work was changed")
        consumer.nack(consumer.receive(60), reason="no such address")
        consumer.ack(consumer.receive(60))
        consumer.close()
    page.get_by_role("link", name=dead).click()
    page.wait_for_selector("h1:has-text('Dead letters of')")
    eventually(lambda: shop.api(f"/api/topics{dead}/dead-letters/count")["pending"] == 1)
    page.reload()
    page.wait_for_selector("section[aria-labelledby=groups]")
    words = page.locator("section[aria-labelledby=groups]").inner_text()
    assert "no such address (1)" in words
    assert f"of {topic}" in words
    page.get_by_role("button", name=f"Requeue 1 message of work of {topic}").click()
    says(dialog(page), "Fix the consumer first")
    dialog(page).get_by_role("button", name="Requeue").click()
    page.wait_for_selector(".toast:has-text('1 message requeued')")
    page.wait_for_selector(".empty:has-text('No pending dead letters.')")
    newest = shop.api(f"/api/topics{topic}/messages")["messages"][-1]
    assert (newest["offset"], newest["text"]) == (2, "bad")
    page.goto(f"{shop.url}/#/topics{topic}")
    page.get_by_role("button", name="Delete subscription work").click()
    dialog(page).get_by_role("textbox").fill("work")
    dialog(page).get_by_role("button", name="Delete the subscription").click()
    page.wait_for_selector(".toast:has-text('subscription work was deleted')")
    assert shop.api(f"/api/topics{topic}")["subscriptions"] == []


def test_a_page_of_another_origin_can_do_nothing(shop, open_page):
    page = open_page(shop, "#/brokers")
    settled(page)
    before = shop.subscription(ORDERS, "reports")["cursor"]
    status = page.evaluate(
        """async () => (await fetch('api/topics/default/orders/subscriptions/reports/seek', {
            method: 'POST', headers: {'Content-Type': 'application/json'},
            body: JSON.stringify({to: 1})})).status"""
    )
    assert status == 403
    assert shop.subscription(ORDERS, "reports")["cursor"] == before
