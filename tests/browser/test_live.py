"""Pages stay up to date, say so, and say when they cannot."""

import pytest

from tests.support.dashboard import reads, says, settled, until

TOPIC = "/default/ticks"


def test_new_messages_are_seen_without_a_reload(shop, open_page):
    shop.publish(TOPIC, b"1", b"2", b"3")
    page = open_page(shop, f"#/topics{TOPIC}")
    settled(page)
    page.evaluate("window.isTheSamePage = true")
    next_offset = page.locator(".marks > div:has(dt:text-is('next')) .figure")
    reads(next_offset, "3")
    shop.publish(TOPIC, b"4", b"5")
    until(
        page,
        "[...document.querySelectorAll('.marks .figure')].some((one) => one.innerText === '5')",
    )
    reads(next_offset, "5")
    assert page.evaluate("window.isTheSamePage")
    until(page, "document.querySelector('.tier-map').dataset.end === '5'")
    says(page.locator("#freshness"), "last update")
    says(page.locator("#freshness"), "Live")


@pytest.mark.nightly
def test_what_somebody_types_and_where_they_are_survive_an_update(shop, open_page):
    page = open_page(shop, "#/topics")
    settled(page)
    page.get_by_role("link", name="/default/payments").focus()
    with page.expect_response("**/api/topics?*"):
        pass
    page.wait_for_timeout(100)
    assert page.evaluate("document.activeElement.textContent") == "/default/payments"


@pytest.mark.nightly
def test_a_hidden_tab_asks_for_nothing(shop, open_page):
    page = open_page(shop, "#/brokers")
    settled(page)
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.evaluate(
        """() => {
            window.pretend = (is) => {
                Object.defineProperty(document, 'hidden', {value: is, configurable: true});
                document.dispatchEvent(new Event('visibilitychange'));
            };
            window.pretend(true);
        }"""
    )
    page.wait_for_timeout(300)
    asked.clear()
    page.wait_for_timeout(3000)
    assert asked == []
    with page.expect_response("**/api/cluster"):
        page.evaluate("window.pretend(false)")


@pytest.mark.nightly
def test_a_broker_that_is_gone_is_said_to_be_and_its_return_too(empty, open_page):
    empty.publish(TOPIC, b"kept")
    page = open_page(empty, "#/topics")
    settled(page)
    empty.broker.kill()
    banner = page.locator(".banner.bad")
    banner.wait_for()
    says(banner, "The broker does not answer.")
    says(banner, "ago")
    says(page.locator("#freshness"), "No answer")
    says(page.locator("#announce"), "does not answer")
    # What was known is still there.
    assert page.get_by_role("link", name=TOPIC).is_visible()
    empty.broker.start()
    banner.wait_for(state="detached")
    reads(page.locator("#announce"), "The broker answers again.")
    says(page.locator("#freshness"), "Live")


def test_nothing_is_called_healthy_while_the_broker_is_gone(shop, open_page):
    page = open_page(shop, "#/")
    settled(page)
    well = shop.api("/api/overview")
    well["health"] = {"ready": True, "state": "ok", "words": [], "checks": []}
    page.route("**/api/overview?*", lambda route: route.fulfill(json=well))
    page.wait_for_selector("#health:text-is('Healthy')")
    page.route("**/api/**", lambda route: route.abort())
    page.wait_for_selector("#health:text-is('The broker does not answer')")
    panel = page.locator("section.health")
    assert "bad" in panel.get_attribute("class")
    says(panel, "Its state is not known.")
    assert page.title().startswith("No answer")
    page.unroute("**/api/**")
    page.wait_for_selector("#health:text-is('Healthy')")
    assert page.title() == "Overview · Ister"


@pytest.mark.nightly
def test_a_broker_that_is_back_and_not_ready_is_back(shop, open_page):
    page = open_page(shop, "#/topics")
    settled(page)
    page.route("**/api/**", lambda route: route.abort())
    page.locator(".banner.bad").wait_for()
    page.unroute("**/api/**")
    body = '{"error": {"code": "UNAVAILABLE", "message": "the broker is not ready"}}'
    page.route("**/api/**", lambda route: route.fulfill(status=503, body=body))
    page.locator(".banner.bad").wait_for(state="detached")
    reads(page.locator("#announce"), "The broker answers again.")
    page.unroute("**/api/**")
    page.get_by_role("link", name="/default/payments").wait_for()
