"""The message browser: where it begins, how payloads are shown, and that they stay text."""

from datetime import UTC, datetime

import pytest

from browser.rig import settled, until
from browser.shop import HOSTILE

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
    assert offsets(page) == list(range(end - 25, end))
    page.get_by_role("button", name="Older").click()
    until(page, f"document.querySelector('.toggle').innerText.includes('{end - 50:,}')")
    assert offsets(page) == list(range(end - 50, end - 25))
    page.get_by_role("button", name="Newer").click()
    until(page, f"document.querySelector('.toggle').innerText.includes('{end - 25:,}')")
    assert offsets(page) == list(range(end - 25, end))


def test_from_an_offset_and_from_the_earliest(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}/messages")
    settled(page)
    page.get_by_label("Offset", exact=True).fill("1234")
    page.get_by_label("At most").select_option("25")
    page.get_by_role("button", name="Show", exact=True).click()
    until(page, "document.querySelector('.toggle').innerText.includes('1,234')")
    assert offsets(page) == list(range(1234, 1259))
    assert "start=1234" in page.url
    # Those are in the bucket only, and it is said so.
    assert set(page.locator("[data-label='Read from']").all_inner_texts()) == {"bucket"}
    page.get_by_label("From", exact=True).select_option("earliest")
    page.get_by_role("button", name="Show", exact=True).click()
    until(page, "/^\\D*0$/.test(document.querySelector('.toggle').innerText)")
    assert offsets(page)[:2] == [0, 1]


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
        page, f"document.querySelector('.toggle').innerText.includes('{expected[0]['offset']:,}')"
    )
    assert offsets(page) == [one["offset"] for one in expected]


def test_payloads_are_text_whatever_they_say(shop, open_page):
    page = open_page(shop, f"#/topics{ODDITIES}/messages")
    settled(page)
    assert opened(page, 0).inner_text() == HOSTILE
    main = page.locator("main")
    assert "<b>name</b>" in main.inner_text()
    assert "<i>value</i>" in main.inner_text()
    assert "</pre><script>alert(2)</script>" in opened(page, 1).inner_text()
    assert main.locator("script, img, b, i").count() == 0
    assert page.evaluate("document.body.dataset.hacked") is None


def test_payloads_as_json_text_and_bytes(shop, open_page):
    page = open_page(shop, f"#/topics{ODDITIES}/messages")
    settled(page)
    best = {offset: opened(page, offset) for offset in (1, 2, 4)}
    assert best[1].inner_text().splitlines()[0] == "{"
    assert '"n": [' in best[1].inner_text()
    assert best[2].inner_text().splitlines()[0].startswith("000000  00 01 02 03")
    assert best[4].inner_text() == "Grüße aus Köln \N{SNOWMAN}\nzweite Zeile"
    page.get_by_label("Text", exact=True).check()
    assert page.get_by_label("Payload of message 1", exact=True).inner_text().startswith('{"text"')
    assert "not text" in page.locator("tr.extra").nth(1).inner_text()
    page.get_by_label("JSON", exact=True).check()
    assert "It is not JSON." in page.locator("tr.extra").nth(2).inner_text()
    page.get_by_label("Hex", exact=True).check()
    dump = page.get_by_label("Payload of message 4", exact=True).inner_text()
    assert dump.splitlines()[0] == (
        "000000  47 72 c3 bc c3 9f 65 20  61 75 73 20 4b c3 b6 6c  Gr····e aus K··l"
    )
    page.get_by_label("By schema").check()
    assert "It has no schema." in page.locator("tr.extra").first.inner_text()
    # An empty payload and one that is too long for a page.
    assert (
        page.locator("tbody tr:has(button[aria-label='Message 3']) .payload").inner_text()
        == "empty"
    )
    page.get_by_label("Best").check()
    opened(page, 5)
    assert "Only the first 64 KiB are shown." in page.locator("tr.extra").last.inner_text()


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
    assert "3 messages came since you looked." in page.locator(".range").inner_text()
    assert offsets(page) == list(range(10))
    newest.click()
    until(page, "document.querySelectorAll('.toggle').length === 13")
    assert offsets(page) == list(range(13))


def test_an_offset_that_is_not_there_is_said_beside_the_form(shop, open_page):
    page = open_page(shop, f"#/topics{ORDERS}/messages?start=99999999")
    settled(page)
    page.wait_for_selector(".banner.bad")
    assert "beyond the end" in page.locator(".banner.bad").inner_text()
    page.get_by_label("Offset", exact=True).fill("7")
    page.get_by_role("button", name="Show", exact=True).click()
    page.wait_for_selector(".banner.bad", state="detached")
    assert offsets(page)[0] == 7
