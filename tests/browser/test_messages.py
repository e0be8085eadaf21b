"""The message browser: where it begins, how payloads are shown, and that they stay text."""

import base64
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.dashboard import eventually, reads, says, settled, until
from tests.support.shop import HOSTILE
from tests.support.shop import ODDITIES as ODDITY_LIST

ODDITIES = "/default/oddities"
ORDERS = "/default/orders"


def offsets(page):
    texts = page.locator("button.toggle").all_inner_texts()
    return [int(one.replace("›", "").replace(",", "").strip()) for one in texts]


def opened(page, offset):
    """Opens a message; returns its payload."""
    page.get_by_role("button", name=f"Message {offset}", exact=True).click()
    return page.get_by_label(f"Payload of message {offset}", exact=True)


@pytest.mark.nightly
def test_the_newest_messages_come_first_to_mind(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}/messages?limit=25")
    settled(page)
    end = shop.api(f"/api/topics{ORDERS}")["watermarks"]["next"]
    newest = list(range(end - 1, end - 26, -1))
    eventually(lambda: offsets(page) == newest)
    page.get_by_role("button", name="Older").click()
    until(page, f"document.querySelector('.toggle').innerText.includes('{end - 26:,}')")
    eventually(lambda: offsets(page) == [one - 25 for one in newest])
    page.get_by_role("button", name="Newer").click()
    until(page, f"document.querySelector('.toggle').innerText.includes('{end - 1:,}')")
    eventually(lambda: offsets(page) == newest)


def test_from_an_offset_and_from_the_earliest(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}/messages")
    settled(page)
    page.get_by_label("Offset", exact=True).fill("1234")
    page.get_by_label("At most").select_option("25")
    page.get_by_role("button", name="Show", exact=True).click()
    until(page, "document.querySelector('.toggle').innerText.includes('1,258')")
    eventually(lambda: offsets(page) == list(range(1258, 1233, -1)))
    assert "start=1234" in page.url
    # Those are in the bucket only, and it is said so.
    assert set(page.locator("[data-label='Read from']").all_inner_texts()) == {"bucket"}
    page.get_by_label("From", exact=True).select_option("earliest")
    page.get_by_role("button", name="Show", exact=True).click()
    until(page, "/^\\D*24$/.test(document.querySelector('.toggle').innerText)")
    eventually(lambda: offsets(page)[-2:] == [1, 0])


@pytest.mark.nightly
def test_from_a_time(shop, open_page):
    message = shop.api(f"/api/topics{ORDERS}/messages?start=2500&limit=1")["messages"][0]
    at = datetime.fromtimestamp(message["publish_time"] // 1000, UTC)
    iso = at.isoformat().replace("+00:00", ".000Z")
    expected = shop.api(f"/api/topics{ORDERS}/messages?start=t:{iso}&limit=50")["messages"]
    page = open_page(shop, f"#/topics{ORDERS}/messages")
    settled(page)
    page.get_by_label("Publish time").fill(at.strftime("%Y-%m-%dT%H:%M:%S"))
    with page.expect_response("**/messages?*"):
        page.get_by_role("button", name="Show", exact=True).click()
    until(page, "document.querySelectorAll('.toggle').length > 0 && location.hash.includes('t%3A')")
    until(
        page, f"document.querySelector('.toggle').innerText.includes('{expected[-1]['offset']:,}')"
    )
    eventually(lambda: offsets(page) == [one["offset"] for one in expected[::-1]])


def test_payloads_are_text_whatever_they_say(shop, open_page):
    page = open_page(shop, f"#/topics{ODDITIES}/messages")
    settled(page)
    reads(opened(page, 0), HOSTILE)
    main = page.locator("main")
    says(main, "<b>name</b>")
    says(main, "<i>value</i>")
    says(opened(page, 1), "</pre><script>alert(2)</script>")
    assert main.locator("script, img, b, i").count() == 0
    assert page.evaluate("document.body.dataset.hacked") is None


def test_payloads_as_json_text_and_bytes(shop, open_page):
    page = open_page(shop, f"#/topics{ODDITIES}/messages")
    settled(page)
    best = {offset: opened(page, offset) for offset in (1, 2, 4)}
    assert best[1].inner_text().splitlines()[0] == "{"
    says(best[1], '"n": [')
    assert best[2].inner_text().splitlines()[0].startswith("000000  00 01 02 03")
    reads(best[4], "Grüße aus Köln \N{SNOWMAN}\nzweite Zeile")
    page.get_by_label("Text", exact=True).check()
    assert page.get_by_label("Payload of message 1", exact=True).inner_text().startswith('{"text"')
    # The newest first.
    says(page.locator("tr.extra").nth(1), "not text")
    page.get_by_label("JSON", exact=True).check()
    says(page.locator("tr.extra").nth(0), "It is not JSON.")
    page.get_by_label("Hex", exact=True).check()
    dump = page.get_by_label("Payload of message 4", exact=True).inner_text()
    assert dump.splitlines()[0] == (
        "000000  47 72 c3 bc c3 9f 65 20  61 75 73 20 4b c3 b6 6c  Gr····e aus K··l"
    )
    page.get_by_label("By schema").check()
    says(page.locator("tr.extra").first, "It has no schema.")
    # An empty payload and one that is too long for a page.
    assert (
        page.locator("tbody tr:has(button[aria-label='Message 3']) .payload").inner_text()
        == "empty"
    )
    page.get_by_label("Best").check()
    opened(page, 5)
    says(page.locator("tr.extra").first, "Only the first 64 KiB are shown.")


def test_payloads_are_decoded_by_their_schema(shop, open_page):
    page = open_page(shop, "#/topics/default/payments/messages?limit=25")
    settled(page)
    first = offsets(page)[0]
    message = shop.api(f"/api/topics/default/payments/messages?start={first}&limit=1")["messages"][
        0
    ]
    assert message["decoded"], message
    shown = opened(page, first).inner_text()
    assert f'"cents": {message["decoded"]["cents"]}' in shown
    assert f'"method": "{message["decoded"]["method"]}"' in shown
    details = page.locator("tr.extra").inner_text()
    assert "payment v1 (avro)" in details
    assert "Payload, decoded by its schema" in details


@pytest.mark.nightly
def test_messages_stay_while_new_ones_are_counted(shop, open_page):
    topic = "/default/counted"
    shop.publish(topic, *(b"%d" % number for number in range(10)))
    page = open_page(shop, f"#/topics{topic}/messages")
    settled(page)
    shop.publish(topic, b"10", b"11", b"12")
    newest = page.get_by_role("button", name="Show the newest")
    newest.wait_for()
    says(page.locator(".range"), "3 messages arrived since.")
    eventually(lambda: offsets(page) == list(range(9, -1, -1)))
    newest.click()
    until(page, "document.querySelectorAll('.toggle').length === 13")
    eventually(lambda: offsets(page) == list(range(12, -1, -1)))


def test_messages_are_filtered_by_key_attribute_and_content(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}/messages?limit=25")
    settled(page)
    message = shop.api(f"/api/topics{ORDERS}/messages?start=1000&limit=1")["messages"][0]
    page.get_by_label("Key", exact=True).fill(message["routing_key"])
    page.get_by_label("JSON condition").fill(f"order == {message['json']['order']}")
    page.keyboard.press("Enter")
    until(page, "document.querySelectorAll('.toggle').length === 1")
    eventually(lambda: offsets(page) == [1000])
    says(page.locator(".range"), "1 match in")
    # What is shown is in the address.
    page.reload()
    settled(page)
    eventually(lambda: offsets(page) == [1000])
    page.get_by_role("button", name="Clear filters").click()
    until(page, "document.querySelectorAll('.toggle').length === 25")
    page.get_by_label("Attribute").fill("source=nowhere")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_selector(".empty")
    says(page.locator(".empty"), "No matching messages in this range.")
    page.goto(f"{shop.url}/#/topics{ORDERS}/messages?where=order%20is%201")
    page.wait_for_selector(".banner.bad")
    says(page.locator(".banner.bad"), "invalid condition")
    # From a message to all of its key.
    page.goto(f"{shop.url}/#/topics{ORDERS}/messages?start=1000&limit=25")
    opened(page, 1000)
    page.locator("tr.extra").get_by_role("link", name=message["routing_key"]).click()
    until(page, "location.hash.includes('key=')")
    until(page, "!document.querySelector('tr.extra')")
    keys = page.locator("td[data-label=Key]")
    eventually(lambda: {*keys.all_inner_texts()} == {message["routing_key"]})


def test_a_live_tail_adds_what_comes(shop, open_page):
    topic = "/default/tailed"
    shop.publish(topic, b"old", b"other")
    page = open_page(shop, f"#/topics{topic}/messages?contains=o")
    settled(page)
    tail = page.get_by_role("button", name="Live tail")
    tail.click()
    page.wait_for_selector("button.switch[aria-pressed=true]")
    shop.publish(topic, b"one", b"hidden", b"two")
    until(page, "document.querySelectorAll('.toggle').length === 4")
    eventually(lambda: offsets(page) == [4, 2, 1, 0])
    tail.click()
    shop.publish(topic, b"more")
    page.get_by_role("button", name="Show the newest").wait_for()
    eventually(lambda: offsets(page) == [4, 2, 1, 0])


def test_messages_are_downloaded(shop, open_page):
    page = open_page(shop, f"#/topics{ODDITIES}/messages")
    settled(page)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Download").click()
    file = waiting.value
    assert file.suggested_filename == "default-oddities.jsonl"
    lines = [json.loads(line) for line in Path(file.path()).read_text().splitlines()]
    assert [one["offset"] for one in lines] == list(range(len(ODDITY_LIST)))
    assert [base64.b64decode(one["payload_base64"]) for one in lines] == [
        payload for payload, _ in ODDITY_LIST
    ]
    page.wait_for_selector(f".toast:has-text('{len(lines)} messages downloaded')")


def test_an_offset_that_is_not_there_is_said_beside_the_form(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}/messages?start=99999999")
    settled(page)
    page.wait_for_selector(".banner.bad")
    says(page.locator(".banner.bad"), "beyond the end")
    page.get_by_label("Offset", exact=True).fill("7")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_selector(".banner.bad", state="detached")
    eventually(lambda: offsets(page)[-1:] == [7])
